"""The invariants of a program: one that breaks any of them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Compute, GradientBucket, Program
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.program_check import check
from autoshard.search.fixed_styles import random_plan
from tests.graphs import mlp_graph

GRAPH = mlp_graph(batch=6, hidden=10)
PLAN = random_plan(PlanningContext(GRAPH, Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")), 4)
SOUND = lower(PLAN, GRAPH)


def _with_value(program: Program, number: int, **changes: object) -> Program:
    values = list(program.values)
    values[number] = replace(values[number], **changes)
    return replace(program, values=tuple(values))


def _first(program: Program, kind: type) -> int:
    return next(number for number, i in enumerate(program.instructions) if isinstance(i, kind))


def _with_instruction(program: Program, kind: type, **changes: object) -> Program:
    instructions = list(program.instructions)
    number = _first(program, kind)
    instructions[number] = replace(instructions[number], **changes)  # type: ignore[type-var]
    return replace(program, instructions=tuple(instructions))


def _without(program: Program, kind: type) -> Program:
    number = _first(program, kind)
    return replace(program, instructions=program.instructions[:number] + program.instructions[number + 1 :])


def _with_parameter(program: Program, **changes: object) -> Program:
    first, *others = program.parameters
    return replace(program, parameters=(replace(first, **changes), *others))


def _lying(program: Program, kind: str) -> str:
    """A value with such a placement, not the loss."""
    values = (v for v in program.values if any(type(p).__name__ == kind for p in v.layout.placements))
    return next(value.name for value in values if value.name != program.loss)


BROKEN: dict[str, Callable[[Program], Program]] = {
    "two values of one name": lambda p: _with_value(p, 0, name=p.values[1].name),
    "another dtype": lambda p: _with_value(p, 0, dtype="float64"),
    "another shape": lambda p: _with_value(p, 0, shape=(1, *p.values[0].shape)),
    "a local shape of another layout": lambda p: _with_value(p, 0, local_shape=p.values[0].local_shape[::-1]),
    "an operand from nowhere": lambda p: _with_instruction(p, Collective, operand="nowhere"),
    "a step left out": lambda p: _without(p, Collective),
    "an operator left out": lambda p: _without(p, Compute),
    "another collective": lambda p: _with_instruction(p, Collective, forward="broadcast"),
    "another gradient": lambda p: _with_instruction(p, Collective, backward="broadcast"),
    "another strategy": lambda p: _with_instruction(p, Compute, strategy="="),
    "a gradient that no bucket sums": lambda p: replace(p, gradient_buckets=()),
    "a bucket for nothing": lambda p: replace(
        p, gradient_buckets=(*p.gradient_buckets, GradientBucket(("dp", "tp"), "float32", (p.parameters[0].path,)))
    ),
    "an output that is not made": lambda p: replace(p, outputs=(*p.outputs, "nowhere")),
    "a loss of which each device has a part": lambda p: replace(p, loss=_lying(p, "Shard"), outputs=()),
    "an output that is still to be summed": lambda p: replace(p, outputs=(*p.outputs, _lying(p, "Partial"))),
    "storage of another size": lambda p: _with_parameter(p, split_shape=(1,)),
    "an update of another layout": lambda p: replace(p, buffer_updates=((p.inputs[0], p.loss or ""),)),
}


def test_what_is_sound_passes() -> None:
    check(SOUND, GRAPH, chosen_strategies(PLAN, GRAPH))
    assert any(isinstance(i, Collective) for i in SOUND.instructions)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused(name: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(BROKEN[name](SOUND), GRAPH, chosen_strategies(PLAN, GRAPH))


def test_an_update_of_the_same_layout_passes() -> None:
    """A buffer's new value, by the layouts of both."""
    value = SOUND.value(SOUND.inputs[0])
    twin = replace(SOUND, buffer_updates=((value.name, value.name),))
    check(twin, GRAPH, chosen_strategies(PLAN, GRAPH))
