"""Which sizes of the inputs a package may be given otherwise than planned, and in which steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoshard.ir.graph import FreeSize
from autoshard.ir.layout import LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Compute, DimCut, LocalAttribute, Program
from autoshard.replay.batch_numbers import BatchNumber, followed

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
    dims: tuple[tuple[str, int], ...]


def free_batch(program: Program, other: Program | None, told: FreeSize | None) -> PlannedSize | str:
    """The batch, or why it can't change. `other`: the same at another batch, where its code is the same.

    `told`: what capture found, None where it tried nothing.
    """
    if program.step.stages > 1:
        return STAGES
    if told is None or told.fixed:
        return UNTRIED.format(BATCH) if told is None else told.fixed
    if other is None:
        return CUTS.format(BATCH)
    dims = tuple(_input_dims(program, other))
    sizes = list(_sizes(program, other))
    lengths = {program.value(name).shape[dim] for name, dim in dims}
    if len(lengths) != 1 or any(not _whole(own, theirs, program.mesh) for own, theirs in sizes):
        return CUTS.format(BATCH)
    (planned,) = lengths
    numbers = [number for own, theirs in sizes for number in _numbers(followed(own, theirs, program.mesh))]
    unit = math.lcm(*(planned // math.gcd(planned, number) for number in numbers))
    names = {name: program.value(name).tensor for name, _ in dims}
    return PlannedSize(planned, unit, told.least, told.most, tuple((names[name], dim) for name, dim in dims))


def _input_dims(program: Program, other: Program) -> Iterator[tuple[str, int]]:
    for name in program.inputs:
        both = zip(program.value(name).shape, other.value(name).shape, strict=True)
        yield from ((name, dim) for dim, (own, theirs) in enumerate(both) if own != theirs)


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
    return own == other or isinstance(followed(own, other, mesh), BatchNumber)


def _numbers(value: LocalAttribute) -> Iterable[int]:
    if isinstance(value, tuple):
        return [number for part in value for number in _numbers(part)]
    return [int(value)] if isinstance(value, BatchNumber) else []
