"""Gradients are summed beside backward: in the order of the program's buckets, started where the program says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.capture.capture import capture
from autoshard.emit import emit
from autoshard.formulation.formulate import Allowed
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.program import gradient_buckets
from autoshard.program.gradient_buckets import backward_ends
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.program_check import check
from autoshard.rules import Strategy
from autoshard.verify.case import check_files, make_case, written
from autoshard.verify.ranks.loaded_package import LoadedPackage, load_package
from autoshard.verify.ranks.lockstep import LockstepError, run_lockstep
from tests.forced import forced_plan

MODELS = Path(__file__).parents[1] / "models"
LLAMA, GPT2 = f"{MODELS / 'decoders.py'}:llama", f"{MODELS / 'decoders.py'}:gpt2"  # GPT-2's embedding is tied
PLANS = [(LLAMA, "dp=2"), (GPT2, "dp=3"), (GPT2, "dp=2,tp=2")]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few kilobytes each, so that small models have many."""
    monkeypatch.setattr(gradient_buckets, "FIRST_BUCKET_BYTES", 1000)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 5000)
    yield


def data_parallel(graph: Graph) -> Allowed:
    """The first axis cuts what depends on weights, along the batch."""

    def allowed(op: Op, strategy: Strategy) -> bool:
        weights = {p.tensor for p in graph.parameters}
        uses = zip(op.operands, strategy.operands, strict=True)
        made = zip(op.results, strategy.results, strict=True)
        whole = all(str(layout).startswith("R") for name, layout in uses if name in weights and layout is not None)
        return whole and all(not str(layout).startswith("R") for n, layout in made if graph.tensor(n).requires_grad)

    return allowed


def made(spec: str, mesh: str) -> tuple[Graph, Program, dict[str, str]]:
    graph = capture(spec, {"batch": 6}, "fp32")
    plan = forced_plan(graph, Mesh.parse(mesh), data_parallel(graph))
    program = lower(plan, graph)
    check(program, graph, chosen_strategies(plan, graph))
    return graph, program, emit(program, plan, graph)


@pytest.mark.parametrize(("spec", "mesh"), PLANS)
def test_many_buckets_give_the_numbers_of_the_original(spec: str, mesh: str) -> None:
    graph, program, files = made(spec, mesh)
    assert len(program.gradient_buckets) >= 4
    proof = check_files(make_case(spec, {"batch": 6}, graph), program, files)
    assert proof.passed, proof.failure


def parameters_of(package: LoadedPackage, model: Any) -> dict[str, Any]:
    return {package.runtime.sharding(p).name: p for p in model.parameters()}


def step(package: LoadedPackage, mesh: Any, model: Any, batch: dict[str, Tensor], **options: Any) -> None:
    local = [package.train.local_part(name, x, mesh) for name, x in batch.items()]
    package.train.compute_gradients(model, mesh, local, **options)


def batch_of(package: LoadedPackage, seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 60, shape, generator=drawn) for name, (shape, *_) in package.model.INPUTS.items()}


@pytest.mark.parametrize(("spec", "mesh"), PLANS)
def test_buckets_start_where_the_program_says(spec: str, mesh: str) -> None:
    """Each once its last gradient is made, and before backward makes one that the program completes later."""
    _, program, files = made(spec, mesh)
    values = {p.path: p.value for p in program.parameters}
    ends = backward_ends(program.instructions, program.by_name, values.values())
    with written(files) as folder:
        package = load_package(Path(folder))
        gradients = package.runtime.gradients
        start, take = gradients._Bucket.start, gradients._Bucket.take
        log: list[tuple[str, tuple[str, ...]]] = []

        def started(bucket: Any) -> None:
            if bucket.axis.mesh.rank == 0:
                assert torch._C._current_graph_task_id() != -1, "backward has ended"
                log.append(("start", tuple(name for name, _ in bucket.members)))
            start(bucket)

        def taken(bucket: Any, position: int, gradient: Tensor) -> None:
            if bucket.axis.mesh.rank == 0:
                log.append(("made", (bucket.members[position][0],)))
            take(bucket, position, gradient)

        gradients._Bucket.start, gradients._Bucket.take = started, taken

        def work(ranks: Any) -> None:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.train.INITIAL)
            step(package, ranks, model, batch_of(package, 0))

        run_lockstep(dict(Mesh.parse(mesh).axes), work, mesh_type=package.runtime.ParallelMesh)
    assert [names for what, names in log if what == "start"] == [b.parameters for b in program.gradient_buckets]
    after = {bucket.parameters: bucket.after for bucket in program.gradient_buckets}
    for position, (what, names) in enumerate(log):
        if what == "start":
            before = [ends[values[own]] for other, (own, *_) in log[:position] if other == "made"]
            later = [ends[values[own]] for other, (own, *_) in log[position:] if other == "made"]
            assert min(before) == after[names] and all(end <= after[names] for end in later)


def test_micro_batches_are_summed_over_devices_once() -> None:
    """What two micro-batches leave is summed with the last one; sums are not summed again."""
    _, program, files = made(GPT2, "dp=2")
    with written(files) as folder:
        package = load_package(Path(folder))

        def gradients_of(ranks: Any, ways: list[tuple[int, bool]]) -> tuple[dict[str, Tensor], list[str]]:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.train.INITIAL)
            reduced: list[str] = []
            transport = ranks["dp"].transport
            all_reduce = transport.all_reduce
            transport.all_reduce = lambda x, *op: reduced.append("") or all_reduce(x, *op)
            for seed, last in ways:
                step(package, ranks, model, batch_of(package, seed), last=last)
            transport.all_reduce = all_reduce
            return {name: p.grad.clone() for name, p in parameters_of(package, model).items()}, reduced

        def work(ranks: Any) -> list[tuple[dict[str, Tensor], list[str]]]:
            ways = [[(0, True)], [(1, True)], [(2, True)], [(0, False), (1, False), (2, True)]]
            found = [gradients_of(ranks, way) for way in ways]
            with pytest.raises(RuntimeError, match="was summed over devices"):
                gradients_of(ranks, [(0, True), (1, False)])
            return found

        for *single, (together, reduced) in run_lockstep({"dp": 2}, work, mesh_type=package.runtime.ParallelMesh):
            assert len(reduced) - len(single[0][1]) == 2 * _inside(single[0][1], program), "one reduction a bucket"
            for name, gradient in together.items():
                expected = sum(own[name] for own, _ in single)
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def _inside(reduced: list[str], program: Program) -> int:
    """Sums over devices of one forward and backward that are no buckets."""
    return len(reduced) - len(program.gradient_buckets)


def test_ranks_that_order_buckets_otherwise_are_named() -> None:
    _, _, files = made(GPT2, "dp=2")
    with written(files) as folder:
        package = load_package(Path(folder))
        whole = package.model.GRADIENT_BUCKETS

        def work(ranks: Any) -> None:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.train.INITIAL)
            buckets = whole if ranks.rank == 0 else [*reversed(whole)]
            with package.runtime.reducing(ranks, parameters_of(package, model), buckets):
                batch = batch_of(package, 0)
                model(*(package.train.local_part(name, x, ranks) for name, x in batch.items())).backward()

        with pytest.raises(LockstepError, match="rank 1 calls"):
            run_lockstep({"dp": 2}, work, mesh_type=package.runtime.ParallelMesh)
