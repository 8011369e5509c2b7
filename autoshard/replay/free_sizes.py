"""Which sizes of the inputs a package may be given otherwise than planned, and in which steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from autoshard.ir.graph import FreeSize, Graph
from autoshard.ir.layout import LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Compute, DimCut, LocalAttribute, Program
from autoshard.replay.other_sizes import OtherSizes, SizeNumber, followed
from autoshard.rules.captured_length import SEQUENCE, own_length

BATCH = "batch"
UNTRIED = "it was planned from a graph of a file, without the model's code, which may compute numbers of its {}"
STAGES = "its stages hand on tensors of fixed shapes"
CUTS = "its plan cuts something in parts that the {} has to be of"


@dataclass(frozen=True)
class PlannedSize:
    """`planned`, of all devices; another from `least` to `most` must be a multiple of `unit`. `dims`: of the inputs
    that have it."""

    planned: int
    unit: int
    least: int
    most: int
    dims: tuple[tuple[str, tuple[int, ...]], ...]


def told_of(graph: Graph) -> tuple[FreeSize, ...]:
    """What capture told of the sizes of its inputs; of a graph for which none was asked, that."""
    named = (BATCH, SEQUENCE) if own_length(graph) else (BATCH,)
    return graph.free_sizes or tuple(FreeSize(name, UNTRIED.format(name), 0, 0) for name in named)


def free_size(program: Program, others: OtherSizes, told: FreeSize) -> PlannedSize | str:
    """The size that `told`, from capture, names, or why it can't change. `others`: where its code is the same."""
    if program.step.stages > 1:
        return STAGES
    if told.fixed:
        return told.fixed
    other = others.batch if told.name == BATCH else others.sequence
    if other is None:
        return CUTS.format(told.name)
    alone = OtherSizes(other) if told.name == BATCH else OtherSizes(None, other, None, others.length, others.more)
    dims, sizes = dict(_input_dims(program, other)), list(_sizes(program, other))
    lengths = {program.value(name).shape[dim] for name, own in dims.items() for dim in own}
    if len(lengths) != 1 or any(not _whole(own, theirs, program.mesh) for own, theirs in sizes):
        return CUTS.format(told.name)
    (planned,) = lengths
    units = (unit for own, theirs in sizes for unit in _units(own, theirs, program.mesh, alone, planned))
    unit = math.lcm(*units)
    if planned % unit:
        return CUTS.format(told.name)
    names = {name: program.value(name).tensor for name in dims}
    return PlannedSize(planned, unit, told.least, told.most, tuple((names[name], own) for name, own in dims.items()))


def _input_dims(program: Program, other: Program) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in program.inputs:
        both = zip(program.value(name).shape, other.value(name).shape, strict=True)
        dims = tuple(dim for dim, (own, theirs) in enumerate(both) if own != theirs)
        if dims:
            yield name, dims


def _sizes(program: Program, other: Program) -> Iterator[tuple[LocalAttribute, LocalAttribute]]:
    """Of each tensor, argument and cut: here, and at the other size."""
    for value in program.values:
        yield value.local_shape, other.value(value.name).local_shape
    for own, theirs in zip(program.instructions, other.instructions, strict=True):
        if isinstance(own, Compute) and isinstance(theirs, Compute):
            yield from ((value, dict(theirs.attributes).get(name, value)) for name, value in own.attributes)
        if isinstance(own, Collective) and isinstance(theirs, Collective):
            yield from zip(_cuts(own), _cuts(theirs), strict=True)


def _cuts(step: Collective) -> list[LocalSize]:
    return [cut.size for cut in (step.joined, step.cut) if isinstance(cut, DimCut)]


def _whole(own: LocalAttribute, other: LocalAttribute, mesh: Mesh) -> bool:
    """Is all that differs a size that all devices have alike?"""
    if isinstance(own, tuple) and isinstance(other, tuple) and len(own) == len(other):
        return all(_whole(a, b, mesh) for a, b in zip(own, other, strict=True))
    return own == other or isinstance(followed(own, other, own, mesh, OtherSizes()), SizeNumber)


def _units(own: LocalAttribute, other: LocalAttribute, mesh: Mesh, others: OtherSizes, planned: int) -> Iterable[int]:
    """What the size must be a multiple of, for this to be whole and the same on all devices."""
    if isinstance(own, tuple) and isinstance(other, tuple):
        return [unit for each in zip(own, other, strict=True) for unit in _units(*each, mesh, others, planned)]
    at_batch, at_length = (other, own) if others.batch else (own, other)
    number = followed(own, at_batch, at_length, mesh, others)
    if not isinstance(number, SizeNumber):
        return []
    slope = Fraction(int(number), planned) if number.batch else number.slope
    return [(slope / _grain(own)).denominator]


def _grain(size: LocalAttribute) -> int:
    """Of a cut in blocks, or in multiples of a unit: the least that each device can have more."""
    shards = size.shards if isinstance(size, LocalSize) else ()
    return math.prod(shard.blocks * (shard.unit if isinstance(shard.unit, int) else 1) for shard in shards)
