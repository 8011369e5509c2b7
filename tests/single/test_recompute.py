"""Blocks that backward computes again: the same numbers, fewer bytes between forward and backward, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.emit import emit
from autoshard.emit.runtime.recompute import KEPT
from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, Plan, StepPlan
from autoshard.ir.program import Compute
from autoshard.program.lower import lower
from autoshard.program.module_tree import module_tree
from autoshard.search.fixed_step import repeated_blocks
from autoshard.verification.case import Case, check_files, make_case, written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.forced import forced_plan, sharded_plan
from tests.meter import Meter
from tests.slow import slow


def build(layers: int = 3, dropout: float = 0.1) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=16, n_head=2, n_positions=8, vocab_size=40, use_cache=False,
                        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)  # fmt: skip
    ids = torch.randint(0, 40, (4, 8))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def build_normed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)]
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    return Normed(), (torch.randn(8, 6),)


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own(self.shared(x).tanh())


def build_shared() -> tuple[nn.Module, tuple[Tensor, ...]]:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            one = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Block(one) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    return Shared(), (torch.randn(4, 8),)


SPEC = f"{__file__}:build"


@cache
def captured() -> Graph:
    return capture(SPEC, {})


@cache
def case(micro_batches: int) -> Case:
    return make_case(SPEC, {}, captured(), steps=2, micro_batches=micro_batches)


def policies(*keeps: str) -> tuple[BlockPolicy, ...]:
    """One for each block, in turns."""
    blocks = repeated_blocks(captured())
    return tuple(BlockPolicy(path, keeps[i % len(keeps)]) for i, path in enumerate(blocks))


def planned(mesh: str, zero: bool, step: StepPlan) -> Plan:
    graph = captured()
    plan = (
        sharded_plan(graph, Mesh.parse(mesh), "dp") if zero else forced_plan(graph, Mesh.parse(mesh), lambda *_: True)
    )
    return replace(plan, step=step)


@pytest.mark.parametrize(
    ("mesh", "zero", "keeps", "count"),
    [
        slow("tp=2", False, ("input",), 1),
        ("tp=2", False, ("input", "expensive", "all"), 2),
        slow("dp=2", True, ("expensive", "input"), 2),
    ],
)
def test_the_step_is_that_of_the_original(mesh: str, zero: bool, keeps: tuple[str, ...], count: int) -> None:
    """Dropout is on: what is drawn again must be what was drawn."""
    plan = planned(mesh, zero, StepPlan(count, recompute=policies(*keeps)))
    program = lower(plan, captured())
    proof = check_files(case(count), program, emit(program, plan, captured()))
    assert proof.passed, proof.failure


def test_without_dropout() -> None:
    """No class of the model draws a number then."""
    graph = capture(SPEC, {"dropout": 0.0})
    plan = forced_plan(graph, Mesh.parse("dp=1"), lambda *_: True)
    plan = replace(plan, step=StepPlan(recompute=policies("input")))
    program = lower(plan, graph)
    proof = check_files(make_case(SPEC, {"dropout": 0.0}, graph, steps=1), program, emit(program, plan, graph))
    assert proof.passed, proof.failure


def test_the_call_is_visible_and_runs_of_equal_blocks_stay_loops() -> None:
    plan = planned("tp=2", False, StepPlan(recompute=policies("input")))
    text = emit(lower(plan, captured()), plan, captured())["model_parallel.py"]
    assert text.count("recomputed(") == 1 or text.count("recomputed(") == 3
    mixed = planned("tp=2", False, StepPlan(recompute=(BlockPolicy("transformer.h.1", "expensive"),)))
    text = emit(lower(mixed, captured()), mixed, captured())["model_parallel.py"]
    assert text.count("recomputed(") == 1 and 'keep="expensive")' in text


def alive_after_forward(plan: Plan) -> int:
    """Bytes that forward leaves behind for backward."""
    program = lower(plan, captured())
    with written(emit(program, plan, captured())) as folder:
        package = load_package(Path(folder))

    def run(mesh: Any) -> int:
        model = package.model.build_model(mesh)
        package.runtime.init_parameters(model, 0)
        ids = torch.randint(0, 40, (4, 8))
        with Meter([*model.parameters(), *model.buffers(), ids]) as meter:
            before = sum(size for _, size in meter.alive.values())
            loss = model(ids, ids)
            result = sum(size for _, size in meter.alive.values()) - before
        del loss
        return result

    return run_lockstep({"dp": 1}, run, mesh_type=package.runtime.ParallelMesh)[0]


@pytest.mark.slow
def test_fewer_bytes_wait_for_backward() -> None:
    alive_bytes = {keep: alive_after_forward(planned("dp=1", False, StepPlan(recompute=policies(keep)))) for keep in
             ("all", "expensive", "input")}  # fmt: skip
    assert alive_bytes["input"] < 0.7 * alive_bytes["expensive"] < 0.7 * alive_bytes["all"], alive_bytes


def test_no_collective_is_on_the_list_of_what_is_kept() -> None:
    """One that writes into a tensor, inside an autograd Function, would be replaced by what it was given."""
    assert KEPT and {op.namespace for op in KEPT} == {"aten"}


def test_what_can_not_be_computed_again_is_refused() -> None:
    graph = capture(f"{__file__}:build_normed", {})
    plan = forced_plan(graph, Mesh.parse("dp=2"), lambda *_: True)
    with pytest.raises(UsageError, match=r"layers.0 can't be recomputed: it would change layers.0.1.running_mean"):
        from autoshard.program.step_check import check_step

        check_step(StepPlan(recompute=(BlockPolicy("layers.0", "input"),)), graph)
    torn = replace(plan, step=StepPlan(recompute=(BlockPolicy("layers", "input"),)))
    with pytest.raises(UsageError, match="layers can't be recomputed by itself"):
        module_tree(lower(torn, graph))


def test_a_weight_of_several_blocks_is_gathered_again_where_nothing_is_computed_again() -> None:
    """A block whose forward runs again has what it reads by then; the block behind it asks for the weight itself."""
    graph = capture(f"{__file__}:build_shared", {})
    plan = sharded_plan(graph, Mesh.parse("dp=2"), "dp")
    program = lower(replace(plan, step=StepPlan(1, recompute=(BlockPolicy("layers.1", "input"),))), graph)
    weights = {i.op: i.regathered for i in program.instructions if isinstance(i, Compute) and i.op.startswith("linear")}
    shared = ("p_layers_0_shared_weight_1",)
    assert weights["linear_2"] == weights["linear_3"] == () and weights["linear_4"] == shared


def test_the_generators_own_numbers_are_drawn_again() -> None:
    """As production draws dropout; also where another micro-batch has run before the backward of this one."""

    def gradients(keep: str, between: bool) -> dict[str, Tensor]:
        plan = planned("dp=1", False, StepPlan(2, recompute=policies(keep)))
        with written(emit(lower(plan, captured()), plan, captured())) as folder:
            package = load_package(Path(folder))

        def run(mesh: Any) -> dict[str, Tensor]:
            mesh.random.exact = False
            model = package.model.build_model(mesh)
            package.runtime.init_parameters(model, 0)
            ids = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(0))
            with mesh.micro_batch(0):
                loss = model(ids, ids)[0]
            with mesh.micro_batch(1):
                if between:
                    model(ids, ids)
                loss.backward()
            return {package.runtime.sharding(p).name: p.grad.clone() for p in model.parameters()}

        return run_lockstep({"dp": 1}, run, mesh_type=package.runtime.ParallelMesh)[0]

    expected = gradients("all", between=False)
    for keep in ("input", "expensive"):
        grads = gradients(keep, between=True)
        assert all(torch.equal(grads[name], value) for name, value in expected.items())
