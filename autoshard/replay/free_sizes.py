"""Sizes of the inputs that may differ from the planned ones in a package, and their steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from autoshard.errors import UsageError
from autoshard.graph_capture.dynamic_sizes.polynomials import Point
from autoshard.ir.dynamic import value_at
from autoshard.ir.graph import FreeSize, Graph
from autoshard.ir.layout import LocalSize
from autoshard.ir.program import Collective, Compute, DimCut, LocalAttribute, Program
from autoshard.replay.other_sizes import BATCH, OtherSizes, SizeNumber, followed, local_size
from autoshard.rules.resize.captured_length import SEQUENCE, sequence_length

UNTRIED = "it was planned from a graph of a file, without the model's code, which may compute numbers of its {}"
STAGES = "its stages hand on tensors of fixed shapes"
CUTS = "its plan cuts something in parts that the {} has to be of"


@dataclass(frozen=True)
class PlannedSize:
    """A size that may change. `planned`, of all devices; another from `least` to `most` must be a multiple of `unit`.
    `dims`: dims of the inputs that have it."""

    planned: int
    unit: int
    least: int
    most: int
    dims: tuple[tuple[str, tuple[int, ...]], ...]


def recorded_free_sizes(graph: Graph) -> tuple[FreeSize, ...]:
    """Sizes of the inputs that capture found to be free, or a note that none was tried; () for dynamic sizes, for which
    see `check_dynamic`."""
    if graph.dynamic:
        return ()
    named = (BATCH, SEQUENCE) if sequence_length(graph) else (BATCH,)
    return graph.free_sizes or tuple(FreeSize(name, UNTRIED.format(name), 0, 0) for name in named)


def free_size(program: Program, others: OtherSizes, captured: FreeSize) -> PlannedSize | str:
    """Size that `captured`, from capture, names, or why it can't change. `others`: with the same code."""
    if program.step.stages > 1:
        return STAGES
    if captured.fixed:
        return captured.fixed
    if captured.name not in others.names:
        return CUTS.format(captured.name)
    alone = next((subset for subset in others.fewer if subset.names == (captured.name,)), others)
    dims, numbers = dict(_input_dims(program, alone)), list(_numbers(program, alone))
    lengths = {program.value(name).shape[dim] for name, varying in dims.items() for dim in varying}
    if len(lengths) != 1 or any(not isinstance(number, SizeNumber) for number, _ in numbers):
        return CUTS.format(captured.name)
    (planned,) = lengths
    unit = math.lcm(*(_unit(number, grain) for number, grain in numbers if isinstance(number, SizeNumber)))
    if planned % unit:
        return CUTS.format(captured.name)
    names = {name: program.value(name).tensor for name in dims}
    return PlannedSize(
        planned, unit, captured.least, captured.most, tuple((names[name], varying) for name, varying in dims.items())
    )


def check_dynamic(program: Program, others: OtherSizes, graph: Graph) -> None:
    """Raises UsageError if the code of a plan does not follow the graph's dynamic sizes."""
    if not graph.dynamic:
        return
    names = " and ".join(size.name for size in graph.dynamic)
    hint = "another mesh, or --pin for what is cut so; or sizes with a larger divisor"
    if others.names != tuple(size.name for size in graph.dynamic):
        raise UsageError(f"the plan's code can't follow {names}: it cuts something in parts of the planned sizes", hint)
    numbers = list(_numbers(program, others))
    if others.check is not None and not _borne_out(program, others, *others.check):
        raise UsageError(f"the plan's code can't follow {names}: a number is none that grows with them", hint)
    for point in ([size.least for size in graph.dynamic], others.planned):
        for number, grain in numbers:
            if not isinstance(number, SizeNumber) or (value_at(number.polynomial, point) / grain).denominator != 1:
                raise UsageError(f"the plan cuts something unevenly at {names} of {', '.join(map(str, point))}", hint)


def _borne_out(program: Program, others: OtherSizes, point: Point, there: Program) -> bool:
    """True if every number at `point`, of the program `there`, is what the other points predict."""
    wider = replace(others, points=(*others.points, (point, there)))
    for rows in _sizes(program, wider):
        for *values, last in _flat(rows):
            number = followed(values, program.mesh, others)
            if isinstance(number, SizeNumber) and value_at(number.polynomial, point) != local_size(last, program.mesh):
                return False
    return True


def _flat(values: list[LocalAttribute]) -> Iterator[list[LocalAttribute]]:
    """Numbers of several tuples, place by place."""
    first = values[0]
    if isinstance(first, tuple) and all(isinstance(value, tuple) and len(value) == len(first) for value in values):
        for row in zip(*(value for value in values if isinstance(value, tuple)), strict=True):
            yield from _flat(list(row))
    else:
        yield values


def _input_dims(program: Program, others: OtherSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in program.inputs:
        shapes = zip(*(variant.value(name).shape for variant in (program, *others.programs)), strict=True)
        dims = tuple(dim for dim, sizes in enumerate(shapes) if len({*sizes}) > 1)
        if dims:
            yield name, dims


def _numbers(program: Program, others: OtherSizes) -> Iterator[tuple[LocalAttribute, int]]:
    """Numbers of each tensor, argument and shard that differ at other sizes, a `SizeNumber` if all devices have it
    alike; and the smallest step by which each device's number can grow."""
    for rows in _sizes(program, others):
        yield from _differing(rows, program, others)


def _differing(
    values: list[LocalAttribute], program: Program, others: OtherSizes
) -> Iterator[tuple[LocalAttribute, int]]:
    first = values[0]
    if all(value == first for value in values):
        return
    if all(isinstance(value, tuple) and isinstance(first, tuple) and len(value) == len(first) for value in values):
        for row in zip(*(value for value in values if isinstance(value, tuple)), strict=True):
            yield from _differing(list(row), program, others)
        return
    yield followed(values, program.mesh, others), _grain(first)


def _sizes(program: Program, others: OtherSizes) -> Iterator[list[LocalAttribute]]:
    """Size of each tensor, argument and shard: in `program`, then at the other sizes."""
    for value in program.values:
        yield [value.local_shape, *(variant.value(value.name).local_shape for variant in others.programs)]
    every = [program.instructions, *(variant.instructions for variant in others.programs)]
    for steps in zip(*every, strict=True):
        computing = [step for step in steps if isinstance(step, Compute)]
        if len(computing) == len(steps):
            attributes = [dict(step.attributes) for step in computing]
            yield from ([by_name.get(name, value) for by_name in attributes] for name, value in computing[0].attributes)
        moving = [step for step in steps if isinstance(step, Collective)]
        if len(moving) == len(steps):
            yield from ([*sizes] for sizes in zip(*map(_cuts, moving), strict=True))


def _cuts(step: Collective) -> list[LocalSize]:
    return [cut.size for cut in (step.joined, step.cut) if isinstance(cut, DimCut)]


def _unit(number: SizeNumber, grain: int) -> int:
    """Unit of the one size, whose multiples make this number whole and the same on all devices."""
    slope = sum((coeff for powers, coeff in number.polynomial.items() if any(powers)), Fraction(0))
    return (slope / grain).denominator


def _grain(size: LocalAttribute) -> int:
    """Smallest step by which each device's size can grow, of a shard in blocks or in multiples of a unit."""
    shards = size.shards if isinstance(size, LocalSize) else ()
    return math.prod(shard.blocks * (shard.unit if isinstance(shard.unit, int) else 1) for shard in shards)
