"""Gradients are summed beside backward, weights of a block gathered together: in the program's order, where it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.emit.runtime import flat_weights
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Program
from autoshard.program import gradient_buckets
from autoshard.program.gradient_buckets import backward_ends
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.module_scopes import operands_of
from autoshard.program.program_check import check
from autoshard.program.weight_buckets import gradient_ready_at, parameter_paths
from autoshard.rules import Strategy
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation import simulate
from autoshard.verification.case import Case, check_files, make_case, written
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package
from autoshard.verification.ranks.lockstep import LockstepError, run_lockstep
from tests.forced import data_parallel, forced_plan, pinned_plan, sharded_plan
from tests.slow import quick, quick_at, slow, thinned

MODELS = Path(__file__).parents[1] / "models"
LLAMA, GPT2 = f"{MODELS / 'decoders.py'}:llama", f"{MODELS / 'decoders.py'}:gpt2"  # GPT-2's embedding is tied
PLANS = [(LLAMA, "dp=2"), (GPT2, "dp=3"), (GPT2, "dp=2,tp=2")]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few kilobytes each, so that small models have many."""
    monkeypatch.setattr(gradient_buckets, "FIRST_BUCKET_BYTES", 1000)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 5000)
    yield


def made(spec: str, mesh: str) -> tuple[Graph, Program, dict[str, str]]:
    """Data parallel, a random plan of it."""
    graph = capture(spec, {"batch": 6}, "fp32")
    plan = forced_plan(graph, Mesh.parse(mesh), data_parallel(graph))
    program = lower(plan, graph)
    check(program, graph, chosen_strategies(plan, graph))
    return graph, program, emit(program, plan, graph)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "mesh"), quick(PLANS, PLANS[2:]))
def test_many_buckets_give_the_numbers_of_the_original(spec: str, mesh: str) -> None:
    graph, program, files = made(spec, mesh)
    assert len(program.gradient_buckets) >= 4
    proof = check_files(make_case(spec, {"batch": 6}, graph), program, files)
    assert proof.passed, proof.failure


def parameters_of(package: LoadedPackage, model: Any) -> dict[str, Any]:
    return {package.runtime.sharding(p).name: p for p in model.parameters()}


def step(package: LoadedPackage, mesh: Any, model: Any, batch: dict[str, Tensor], **options: Any) -> None:
    local = [package.batches.local_part(name, x, mesh) for name, x in batch.items()]
    package.train.compute_gradients(model, mesh, local, **options)


def batch_of(package: LoadedPackage, seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 60, shape, generator=drawn) for name, (shape, *_) in package.model.INPUTS.items()}


@pytest.mark.parametrize(("spec", "mesh"), thinned(PLANS, 3))
def test_buckets_start_where_the_program_says(spec: str, mesh: str) -> None:
    """Each once its last gradient is made, and before backward makes one that the program completes later."""
    _, program, files = made(spec, mesh)
    values = {p.path: p.value for p in program.parameters}
    ready_at = gradient_ready_at(program.weight_buckets)
    ends = backward_ends(program.instructions, program.by_name, values.values(), ready_at)
    after = {bucket.parameters: bucket.after for bucket in program.gradient_buckets}
    with written(files) as folder:
        package = load_package(Path(folder))
        gradients = package.runtime.gradients
        start, take = gradients._Bucket.start, gradients._Bucket.take
        log: list[tuple[str, tuple[str, ...]]] = []

        def started(bucket: Any) -> None:
            if bucket.axis.mesh.rank == 0:
                names = tuple(name for name, _ in bucket.members)
                assert after[names] == 0 or torch._C._current_graph_task_id() != -1, "backward has ended"
                log.append(("start", names))
            start(bucket)

        def taken(bucket: Any, position: int, gradient: Tensor) -> None:
            if bucket.axis.mesh.rank == 0:
                log.append(("made", (bucket.members[position][0],)))
            take(bucket, position, gradient)

        gradients._Bucket.start, gradients._Bucket.take = started, taken

        def work(ranks: Any) -> None:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.initial.INITIAL)
            step(package, ranks, model, batch_of(package, 0))

        run_lockstep(dict(Mesh.parse(mesh).axes), work, mesh_type=package.runtime.ParallelMesh)
    assert [names for what, names in log if what == "start"] == [b.parameters for b in program.gradient_buckets]
    for position, (what, names) in enumerate(log):
        if what == "start":
            before = [ends[values[path]] for other, (path, *_) in log[:position] if other == "made"]
            later = [ends[values[path]] for other, (path, *_) in log[position:] if other == "made"]
            assert min(before) == after[names] and all(end <= after[names] for end in later)


@pytest.mark.usefixtures("whole_packages")
def test_micro_batches_are_summed_over_devices_once() -> None:
    """What two micro-batches leave is summed with the last one; sums are not summed again."""
    _, program, files = made(GPT2, "dp=2")
    with written(files) as folder:
        package = load_package(Path(folder))

        def gradients_of(ranks: Any, ways: list[tuple[int, bool]]) -> tuple[dict[str, Tensor], list[str]]:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.initial.INITIAL)
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
            results = [gradients_of(ranks, run) for run in ways]
            with pytest.raises(RuntimeError, match="was summed over devices"):
                gradients_of(ranks, [(0, True), (1, False)])
            return results

        for *single, (together, reduced) in run_lockstep({"dp": 2}, work, mesh_type=package.runtime.ParallelMesh):
            assert len(reduced) - len(single[0][1]) == 2 * _inside(single[0][1], program), "one reduction a bucket"
            for name, gradient in together.items():
                expected = sum(gradients[name] for gradients, _ in single)
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
            package.runtime.init_parameters(model, 0, package.initial.INITIAL)
            buckets = whole if ranks.rank == 0 else [*reversed(whole)]
            with package.runtime.reducing(ranks, parameters_of(package, model), buckets):
                batch = batch_of(package, 0)
                model(*(package.batches.local_part(name, x, ranks) for name, x in batch.items())).backward()

        with pytest.raises(LockstepError, match="rank 1 calls"):
            run_lockstep({"dp": 2}, work, mesh_type=package.runtime.ParallelMesh)


# --- weights that go together ---

SHARDED = [(LLAMA, "dp=2", "fp32"), (LLAMA, "dp=3", "bf16-mixed"), (GPT2, "dp=2,fs=2", "fp32"), (GPT2, "dp=2", "fp32")]


def sharded(spec: str, mesh: str, precision: str, batch: int = 6) -> tuple[Graph, Program, dict[str, str]]:
    """Every parameter in shards over the last axis."""
    graph = capture(spec, {"batch": batch, "layers": 3}, precision)
    device_mesh = Mesh.parse(mesh)
    plan = sharded_plan(graph, device_mesh, device_mesh.names[-1])
    program = lower(plan, graph)
    check(program, graph, chosen_strategies(plan, graph))
    return graph, program, emit(program, plan, graph)


@pytest.mark.parametrize(("spec", "mesh", "precision"), quick(SHARDED, SHARDED[1:2]))
def test_weights_of_a_block_go_together(spec: str, mesh: str, precision: str) -> None:
    """Every weight that is gathered is in a bucket, a block has one; the numbers are the original's."""
    graph, program, files = sharded(spec, mesh, precision)
    gathered = {i for i, step in enumerate(program.instructions) if isinstance(step, Collective) and step.regathered}
    assert gathered == {position for bucket in program.weight_buckets for position in bucket.gathers}
    tied = spec == GPT2
    blocks = [bucket.block for bucket in program.weight_buckets]
    assert blocks == [*range(3 + tied)], "three layers, and a tied embedding by itself"
    assert {bucket.dtype for bucket in program.weight_buckets} == {"float32"}
    assert [bucket.block for bucket in program.weight_buckets if bucket.retained][:1] == [0 if tied else 2]
    proof = check_files(make_case(spec, {"batch": 6, "layers": 3}, graph), program, files)
    assert proof.passed, proof.failure


@pytest.mark.parametrize(("spec", "mesh"), [(LLAMA, "dp=3"), slow(GPT2, "dp=2,fs=2")])
@pytest.mark.parametrize("precision", ["bf16-mixed", slow("fp16-mixed")])
def test_weights_of_two_dtypes_go_together_bit_for_bit(spec: str, mesh: str, precision: str) -> None:
    """A block in mixed precision is one gather; gradients are those of a gather for each dtype, in their own bits."""
    _, program, files = sharded(spec, mesh, precision)
    with written(files) as folder:
        package = load_package(Path(folder))
        together = package.model.WEIGHT_BUCKETS
        assert len(together) == len(program.weight_buckets) and max(len(names) for _, names, *_ in together) == 2
        apart = [(axes, {dtype: group}, *tail) for axes, names, *tail in together for dtype, group in names.items()]

        def work(ranks: Any) -> list[tuple[dict[str, Tensor], int]]:
            results = []
            for buckets in (together, apart):
                model = package.model.build_model(ranks)
                package.runtime.init_parameters(model, 0, package.initial.INITIAL)
                log: list[tuple[Any, ...]] = []
                _logged(ranks.joint(program.weight_buckets[0].axes).transport, (), log)
                parameters, batch = parameters_of(package, model), batch_of(package, 0)
                inputs = [package.batches.local_part(name, x, ranks) for name, x in batch.items()]
                with package.runtime.gathered_together(ranks, parameters, buckets), package.runtime.regathering():
                    model(*inputs).backward()
                gradients = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
                results.append((gradients, sum(kind == "all_gather" for _, kind, _ in log)))
            return results

        local = package.runtime.local
        ran = run_lockstep(dict(Mesh.parse(mesh).axes), work, mesh_type=package.runtime.ParallelMesh)
    for (one, gathers), (other, more) in ran:
        assert gathers < more and one.keys() == other.keys() and len(one) > 10
        assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())


@given(
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=5),
    devices=st.integers(1, 4),
    data=st.data(),
)
def test_places_of_several_dtypes(sizes: list[int], devices: int, data: st.DataObject) -> None:
    """Each part at a multiple of its item size, within its device's, none over another; one dtype is without a gap."""
    numbers = st.lists(st.integers(0, 7), min_size=devices, max_size=devices).map(tuple)
    counts = tuple(data.draw(numbers) for _ in sizes)
    starts, lengths = flat_weights._places_of(counts, tuple(sizes))
    largest, taken = max(sizes), list[int]()
    for device in range(devices):
        begin, end = (largest * sum(lengths[:i]) for i in (device, device + 1))
        for shares, size, places in zip(counts, sizes, starts, strict=True):
            part = range(size * places[device], size * (places[device] + shares[device]))
            assert not part or (begin <= part.start and part.stop <= end)
            taken += part
    assert len(taken) == len({*taken})
    held = sum(size * sum(shares) for size, shares in zip(sizes, counts, strict=True))
    assert largest * sum(lengths) < held + devices * (len(sizes) + 1) * largest
    assert len({*sizes}) > 1 or largest * sum(lengths) == held


@pytest.mark.parametrize(("spec", "mesh", "precision"), quick_at(SHARDED, 2))
def test_the_simulated_collectives_are_those_that_run(spec: str, mesh: str, precision: str) -> None:
    """In the same order, of the same bytes: what one rank calls in a step is what the timeline shows."""
    graph, program, files = sharded(spec, mesh, precision)
    timeline = simulate(program, graph, load_hardware("a100-80g-sxm"))
    expected = [(e.axes, e.collective, e.bytes) for e in timeline.events if e.collective]
    assert sum(kind == "all_gather" for _, kind, _ in expected) < 12
    with written(files) as folder:
        package = load_package(Path(folder))

        def work(ranks: Any) -> list[tuple[Any, ...]]:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.initial.INITIAL)
            log: list[tuple[Any, ...]] = []
            for names in {bucket.axes for bucket in (*program.weight_buckets, *program.gradient_buckets)}:
                _logged(ranks.joint(names).transport, names, log)
            step(package, ranks, model, batch_of(package, 0))
            return log

        logs = run_lockstep(dict(Mesh.parse(mesh).axes), work, mesh_type=package.runtime.ParallelMesh)
    kinds = {bucket.axes for bucket in (*program.weight_buckets, *program.gradient_buckets)}
    moved = [entry for entry in expected if entry[0] in kinds and entry[1] != "all_to_all"]
    for log in logs:
        assert [entry[:2] for entry in log] == [entry[:2] for entry in moved]
        for (_, _, size), (_, _, said) in zip(log, moved, strict=True):
            uneven = 0.2 if Mesh.parse(mesh).size % 3 == 0 else 0.02  # 67 words: the largest part counts
            assert size == said or said == pytest.approx(size, rel=uneven) or size < 64  # a count, the loss


@pytest.mark.parametrize(("spec", "steps"), [slow(LLAMA, 4), (GPT2, 6)])
@pytest.mark.slow
def test_weights_in_shards_over_two_axes_are_gathered_at_once(spec: str, steps: int) -> None:
    """One gather over both axes, and so with the others of its block, though one axis after the other is planned."""
    graph = capture(spec, {"batch": 8, "layers": 3}, "fp32")
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=2,fs=2"), strategy="fsdp"))
    program = lower(plan, graph)
    check(program, graph, chosen_strategies(plan, graph))
    gathers = [step for step in program.instructions if isinstance(step, Collective) and step.regathered]
    assert gathers and {step.axes for step in gathers} == {("dp", "fs")}
    assert sum(len(bucket.gathers) for bucket in program.weight_buckets) == len(gathers)
    assert len(program.weight_buckets) <= steps
    proof = check_files(make_case(spec, {"batch": 8, "layers": 3}, graph), program, emit(program, plan, graph))
    assert proof.passed, proof.failure


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", slow("bf16-mixed")])
def test_biases_that_the_tensor_axis_masks_or_slices_go_with_the_weights(precision: str) -> None:
    """Each had a gather and a scatter of its own: four of both a layer."""
    graph = capture(GPT2, {"batch": 6, "layers": 3}, precision)
    paths = [p.path for p in graph.parameters]
    pins = tuple(f"parameter:{path}=Shard(0)@dp,Replicate@tp" for path in paths if path.endswith("bias"))
    request = SearchRequest(Mesh.parse("dp=2,tp=2"), strategy="fsdp-tp", pins=pins, all_to_all=False)
    plan = search(graph, load_hardware("h100-80g-sxm"), request)
    program = lower(plan, graph)
    check(program, graph, chosen_strategies(plan, graph))
    assert {"mask", "slice"} <= {step.forward for step in program.instructions if isinstance(step, Collective)}
    together = {path for bucket in program.weight_buckets for path in parameter_paths(program, bucket)}
    assert {path for path in paths if ".h." in path} <= together
    proof = check_files(make_case(GPT2, {"batch": 6, "layers": 3}, graph), program, emit(program, plan, graph))
    assert proof.passed, proof.failure


class Twice(nn.Module):
    """Reads a weight and a bias in two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.layer(self.layer(x).tanh()).tanh()) - y).square().mean()


def twice() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Twice(), (torch.randn(4, 8), torch.randn(4, 3))


@pytest.mark.parametrize("first", quick_at([True, False], 1))
def test_a_weight_that_is_used_in_its_shard_too(first: bool) -> None:
    """One use takes the shard as it is, the other gathers it: the gradient has both, once and whole."""
    spec, mesh = f"{__file__}:twice", Mesh.parse("dp=2,tp=2")
    graph = capture(spec, {})
    uses = [op.name for op in graph.ops if op.target == "aten.linear"][:2]
    shard, whole = ("R S0", "S0 R"), ("S0 S0", "R R")  # of what the operator reads, of its weight
    wanted = dict(zip(uses, (shard, whole) if first else (whole, shard), strict=True))

    def allowed(op: Op, strategy: Strategy) -> bool:
        read = tuple(str(layout).replace("+", "") for layout in strategy.operands[:2])
        return op.name not in wanted or read == wanted[op.name]

    pins = [f"parameter:{p.path}=Shard(0)@dp,Replicate@tp" for p in graph.parameters]
    plan = pinned_plan(graph, mesh, pins, allowed)
    program = lower(plan, graph)
    values = {p.path: p.value for p in program.parameters}
    readers = [step for step in program.instructions if values["layer.bias"] in operands_of(step)]
    assert sum(isinstance(step, Collective) for step in readers) == 1 and len(readers) == 2
    assert any("layer.bias" in bucket.parameters for bucket in program.gradient_buckets)
    proof = check_files(make_case(spec, {}, graph), program, emit(program, plan, graph))
    assert proof.passed, proof.failure
    check(program, graph, chosen_strategies(plan, graph))


def _logged(transport: Any, names: tuple[str, ...], log: list[tuple[Any, ...]]) -> None:
    """Notes axes, kind and bytes of what the transport is asked for."""
    gather, scatter, reduce = transport.all_gather, transport.reduce_scatter, transport.all_reduce

    def all_gather(x: Tensor, lengths: Any) -> Tensor:
        gathered = gather(x, lengths)
        log.append((names, "all_gather", float(gathered.nbytes)))
        return gathered

    def reduce_scatter(x: Tensor, lengths: Any) -> Tensor:
        log.append((names, "reduce_scatter", float(x.nbytes)))
        return scatter(x, lengths)

    def all_reduce(x: Tensor, *op: str) -> Any:
        log.append((names, "all_reduce", float(x.nbytes)))
        return reduce(x, *op)

    transport.all_gather, transport.reduce_scatter, transport.all_reduce = all_gather, reduce_scatter, all_reduce


FAULTS = {
    "the shards of others": ("[weight.leaf.reshape(-1) for", "[wanted[0].leaf.reshape(-1) for"),
    "stale weights": ("copy_(places, shards)", "copy_(places, [1.001 * x for x in shards])"),
    "gradients that are not given back": ("other.give_gradients()", "pass"),
    "gradients given back twice": ("hand_over(weight.parameter, part.", "hand_over(weight.parameter, 2 * part."),
    "scattered before the last gradient": ("if self.arrived == len(self.weights)", "if self.arrived == 1"),
    "the part of another device": ("zip(starts[self], self.counts", "zip([0, *starts[self][1:]], self.counts"),
    "a weight let go too early": ("self.whole = whole.detach() if", "self.whole = torch.zeros_like(whole) if"),
}


@pytest.fixture(scope="module")
def llama_in_shards() -> tuple[Case, Program, dict[str, str]]:
    graph, program, files = sharded(LLAMA, "dp=3", "fp32")  # uneven
    return make_case(LLAMA, {"batch": 6, "layers": 3}, graph), program, files


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, llama_in_shards: tuple[Case, Program, dict[str, str]]) -> None:
    case, program, files = llama_in_shards
    name, (before, after) = "runtime/flat_weights.py", FAULTS[fault]
    assert files[name].count(before) == 1
    proof = check_files(case, program, files | {name: files[name].replace(before, after)})
    assert not proof.passed


@pytest.mark.slow
def test_what_has_no_gradient_moves_once_a_step_not_once_a_layer() -> None:
    """Labels, masks and tables of positions, which every layer reads: brought to each layout once, in any plan; and by
    Megatron's strategies not at all."""
    graph, mesh = capture(LLAMA, {"batch": 6}, "fp32"), Mesh.parse("tp=2")
    moved = 0
    for seed in range(6):
        program = lower(forced_plan(graph, mesh, lambda op, strategy: True, seed), graph)
        targets = _moves_without_gradient(program)
        assert len({*targets}) == len(targets)
        moved += len(targets)
    assert moved, "no plan moves any"
    plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(mesh, strategy="megatron"))
    assert _moves_without_gradient(lower(plan, graph)) == []


def _moves_without_gradient(program: Program) -> list[tuple[str, str]]:
    """(tensor, its layout after)."""
    moves = [step for step in program.instructions if isinstance(step, Collective)]
    after = [program.value(step.result) for step in moves]
    return [(value.tensor, str(value.layout)) for value in after if not value.requires_grad]
