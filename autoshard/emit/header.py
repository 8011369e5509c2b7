"""What a package says about itself: the plan it came from, how to make it again, and its strategy in words."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard import plan_io
from autoshard.again import command
from autoshard.graph.model import Graph, Registration
from autoshard.hardware import parse_hardware
from autoshard.layout import Replicate, Shard
from autoshard.plan import Plan
from autoshard.program.model import Collective, Program


@dataclass(frozen=True)
class Input:
    """One model input. Synthetic integers are drawn from [low, high)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    low: int = 0
    high: int = 2


@dataclass(frozen=True)
class Header:
    """Predictions are of one step, per device. `strategy` has one sentence per mesh axis."""

    plan_hash: str
    command: str
    versions: str
    hardware: str
    strategy: tuple[str, ...]
    inputs: tuple[Input, ...]
    predicted_seconds: float
    predicted_peak_bytes: float
    registrations: tuple[Registration, ...] = ()
    devices_per_node: int = 8


def header_of(program: Program, plan: Plan, graph: Graph) -> Header:
    return Header(
        plan_hash=plan_io.plan_hash(plan),
        command=command(plan, graph.training),
        versions=", ".join(f"{name} {version}" for name, version in plan.versions),
        hardware=plan.hardware,
        strategy=strategy_words(program),
        inputs=tuple(_input(program, graph, name) for name in program.inputs),
        predicted_seconds=plan.predicted_seconds,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        registrations=graph.registrations,
        devices_per_node=parse_hardware(plan.hardware_text).devices_per_node,
    )


def _input(program: Program, graph: Graph, name: str) -> Input:
    value = program.value(name)
    return Input(value.tensor, value.shape, value.dtype, str(value.layout), 0, integer_bound(graph, value.tensor))


def integer_bound(graph: Graph, tensor: str) -> int:
    """One more than the largest integer that an input may hold, from what it is an index of; 2 where nothing tells."""
    seen, todo = {tensor}, [tensor]
    while todo:
        for op, position in graph.consumers[todo.pop()]:
            if op.target == "aten.embedding" and position == 1 and op.operands[0] is not None:
                return graph.tensor(op.operands[0]).shape[0]
            if op.target in ("aten.cross_entropy_loss", "aten.nll_loss_nd", "aten.nll_loss") and position == 1:
                assert op.operands[0] is not None
                shape = graph.tensor(op.operands[0]).shape
                return shape[1] if len(shape) > 1 else shape[0]
            fresh = [name for name in op.results if name not in seen and "int" in graph.tensor(name).dtype]
            seen.update(fresh)
            todo += fresh
    return 2


def strategy_words(program: Program) -> tuple[str, ...]:
    """One sentence per mesh axis on what it divides."""
    axes = enumerate(program.mesh.axes)
    return tuple(f"{name} ({size}): {_axis_words(program, i, name)}" for i, (name, size) in axes)


def _gathers(step: Collective, axis: str) -> bool:
    return isinstance(step.after[step.axes.index(axis)], Replicate)


def _axis_words(program: Program, axis: int, name: str) -> str:
    cut_inputs = [v for v in program.inputs if isinstance(program.value(v).layout.placements[axis], Shard)]
    stored = {p.value: p for p in program.parameters if isinstance(p.layout.placements[axis], Shard)}
    gathered = {
        step.operand
        for step in program.instructions
        if isinstance(step, Collective) and name in step.axes and _gathers(step, name)
    } & set(stored)
    facts = []
    count = len(program.parameters)
    if cut_inputs:
        dims = sorted({p.dim for v in cut_inputs if isinstance(p := program.value(v).layout.placements[axis], Shard)})
        batch = "the batch" if dims == [0] else f"the inputs along dim {', '.join(map(str, dims))}"
        facts.append(f"cuts {batch} (data parallel)")
    if gathered:
        facts.append(f"stores {len(gathered)} of {count} parameters in shards that are gathered for use")
    if len(stored) > len(gathered):
        facts.append(f"cuts {len(stored) - len(gathered)} of {count} parameters where they are used")
    sums = [b for b in program.gradient_buckets if name in b.axes]
    if sums:
        facts.append(f"sums the gradients of {sum(len(b.parameters) for b in sums)} parameters after backward")
    return "; ".join(facts) or "divides activations only"
