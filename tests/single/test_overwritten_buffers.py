"""Buffers that the forward replaces while backward, an output or another buffer still needs their old values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.emit.runtime.weights import regathering
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture import capture as capturing
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, StepPlan
from autoshard.ir.program import Compute, Instruction, Program
from autoshard.program.instruction_storage import facts, storage_roots
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.program_check import check
from autoshard.search.fixed_styles import random_plan
from autoshard.verification import check_files, make_case
from tests.slow import quick, quick_at

F = nn.functional
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scale": lambda h, b: h * b[0],
    "copied": lambda h, b: h * b.clone().mean(0),
    "weight": lambda h, b: F.linear(h, b),
    "product": lambda h, b: h @ b.t(),
    "view": lambda h, b: h * b.t().reshape(4, 4)[:, 1],
    "row": lambda h, b: h / (1 + b[1:2].square()),
    "where": lambda h, b: torch.where(b[2] > 0, h, h.detach() * b[2]),
    "added": lambda h, b: (h + b[3]).tanh(),
}
WRITES: dict[str, Callable[[nn.Module, str, Tensor], None]] = {
    "in place": lambda m, name, h: getattr(m, name).mul_(0.9).add_(h.mean(0), alpha=0.1),
    "rows": lambda m, name, h: getattr(m, name)[1:3].copy_(h[:2]),
    "assigned": lambda m, name, h: setattr(m, name, getattr(m, name) * 0.5 + h[:4] * 0.5),
    "independent": lambda m, name, h: setattr(m, name, h[:4] + 1),
    "turned": lambda m, name, h: setattr(m, name, getattr(m, name).t()),
}


class Inner(nn.Module):
    """Reads a buffer of its own, and one that it is given."""

    def __init__(self, reads: list[str], write: str | None) -> None:
        super().__init__()
        self.linear, self.reads, self.write = nn.Linear(4, 4), reads, write
        if write:
            self.register_buffer("own", torch.randn(4, 4))

    def forward(self, h: Tensor, buffer: Tensor) -> Tensor:
        h = self.linear(h)
        for read in self.reads:
            h = READS[read](h, buffer)
        if self.write:
            h = h + READS[self.reads[0]](h, self.own.clone())
            with torch.no_grad():
                WRITES[self.write](self, "own", h)
        return h.tanh()


class Buffers(nn.Module):
    """Blocks that read buffers; all of them are written by the end, some in place, one as a shift register."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.register_buffer("first", torch.randn(4, 4))
        self.register_buffer("before", torch.randn(4, 4))
        self.writes = draw.choice([*WRITES, "swapped"])
        self.blocks = nn.ModuleList(
            Inner(draw.sample([*READS], 2), draw.choice([None, *WRITES]) if seed % 3 else None) for _ in range(2)
        )
        self.returned = draw.random() < 0.5
        self.norm, self.again = nn.BatchNorm1d(4), nn.BatchNorm1d(4) if seed else nn.Identity()
        if seed:
            self.again.running_mean = self.norm.running_mean

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        old, h = self.first.clone(), x
        for block in self.blocks:
            h = block(h, old)
        h = self.again(self.norm(h)) * old.t().mean(0)
        with torch.no_grad():
            if self.writes == "swapped":
                self.first, self.before = self.before, self.first
            else:
                self.before = self.first.clone()
                WRITES[self.writes](self, "first", h)
        loss = F.mse_loss(h, y)
        return (loss, old) if self.returned else (loss,)


def model(seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Buffers(seed), (torch.randn(6, 4), torch.randn(6, 4))


def _copies(step: Instruction) -> bool:
    """A batch norm is called with copies of its statistics."""
    return isinstance(step, Compute) and step.target == "aten.batch_norm"


def overwritten(program: Program, graph: Graph) -> set[str]:
    """The updated buffers whose storage backward reads."""
    fixed = (*program.inputs, *(p.value for p in (*program.parameters, *program.buffers)))
    root = storage_roots(program.instructions, graph, fixed)
    steps = [step for step in program.instructions if not _copies(step)]
    saved = {root[name] for step in steps for name in facts(step, graph).retained}
    return saved & {buffer for buffer, _ in program.buffer_updates}


def failure(seed: int, mesh: str, count: int = 1, again: str = "") -> str:
    spec = f"{__file__}:model"
    graph = capture(spec, {"seed": seed})
    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("a100-80g-sxm")), seed)
    plan = replace(plan, step=StepPlan(count, recompute=(BlockPolicy(again, "input"),) if again else ()))
    program = lower(plan, graph)
    check(program, graph, chosen_strategies(plan, graph))
    assert not overwritten(program, graph)
    case = make_case(spec, {"seed": seed}, graph, steps=2, micro_batches=count)
    return check_files(case, program, emit(program, plan, graph)).failure


@pytest.mark.parametrize("seed", quick(range(12), range(1)))
def test_old_values_are_kept(seed: int) -> None:
    assert not failure(seed, ("dp=2,tp=2", "tp=3")[seed % 2], count=1 + seed % 2)


@pytest.mark.parametrize("seed", quick_at([3, 9], 1))
def test_a_block_is_computed_again_of_the_old_value(seed: int) -> None:
    assert not failure(seed, "tp=2", again="blocks.1")


def test_a_lost_copy_is_an_error_under_hooks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault."""
    monkeypatch.setattr(capturing, "keep_overwritten", lambda graph: graph)
    spec = f"{__file__}:model"
    graph = capture(spec, {"seed": 0})
    plan = random_plan(PlanningContext(graph, Mesh.parse("tp=2"), load_hardware("a100-80g-sxm")), 0)
    program = lower(plan, graph)
    assert overwritten(program, graph)
    proof = check_files(make_case(spec, {"seed": 0}, graph, steps=1), program, emit(program, plan, graph))
    assert not proof.passed


@pytest.mark.parametrize("written", ["input", "result"])
def test_versions_are_checked_whatever_hooks_are_there(written: str) -> None:
    x, scale = torch.ones(3, requires_grad=True), torch.ones(3)
    with regathering():
        y = (x * scale).exp()
    with torch.no_grad():
        (scale if written == "input" else y).mul_(2)
    with pytest.raises(RuntimeError, match="written over since"):
        y.sum().backward()
