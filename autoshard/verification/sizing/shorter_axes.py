"""Puts a plan for many devices on a mesh with shorter axes: same strategies, nesting and evenness, on fewer ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.cluster.hardware import Hardware
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.layout import AxisShard, LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.program.lower import chosen_strategies, lower
from autoshard.replay.resize import keyed_ops, reapply
from autoshard.verification.sizing.reduced_sizes import evenness, lost_evenness

MOST_TRIED = 8  # meshes that are lowered


@dataclass(frozen=True)
class Counterpart:
    """A plan at other sizes or on a shorter mesh, with its program; `lost`: what is split otherwise than planned."""

    plan: Plan
    program: Program
    lost: tuple[str, ...]


def counterpart(plan: Plan, full: Graph, small: Graph, hardware: Hardware, most_ranks: int) -> Counterpart:
    """`plan` of `full` applied to `small`: on its own mesh, or on the largest shorter one that keeps evenness and
    unevenness. If none does, the one that loses least. Raises UsageError if a decision has no counterpart anywhere."""
    program = lower(plan, full)
    best, refused = None, None
    for mesh in itertools.islice(_meshes(plan, full, small, most_ranks), MOST_TRIED):
        try:
            candidate = _on(mesh, plan, full, small, hardware, program)
        except UsageError as error:
            refused = refused or error
            continue
        if best is None or len(candidate.lost) < len(best.lost):
            best = candidate
        if not best.lost:
            break
    if best is None:
        raise refused or UsageError(f"no mesh of at most {most_ranks} devices stands for {plan.mesh}", "other sizes")
    return best


def _on(mesh: Mesh, plan: Plan, full: Graph, small: Graph, hardware: Hardware, program: Program) -> Counterpart:
    reapplied = reapply(plan, full, small, hardware, mesh)
    lowered = lower(reapplied, small)
    return Counterpart(reapplied, lowered, tuple(lost_evenness(program, full, lowered, small)))


def _meshes(plan: Plan, full: Graph, small: Graph, most_ranks: int) -> Iterator[Mesh]:
    """The mesh itself if it is small enough; then shorter ones that seem to keep evenness, the largest first."""
    if plan.mesh.size <= most_ranks:
        yield plan.mesh
    cuts = _cuts(plan, full, small)
    others = []
    for mesh in _shorter(plan.mesh, most_ranks):
        missed = sum(_keeps_cut(cut, mesh) is False for cut in cuts)
        if missed == 0:
            yield mesh
        else:
            others.append((missed, mesh))
    yield from (mesh for _, mesh in sorted(others, key=lambda pair: pair[0]))


def _shorter(mesh: Mesh, most_ranks: int) -> list[Mesh]:
    """Meshes with no axis longer and none reduced below 2; the largest first, of equal ones the most square."""
    shorter = []
    lengths = [range(min(2, size), min(size, most_ranks) + 1) for size in mesh.sizes]
    for sizes in _within(lengths, most_ranks):
        if sizes != mesh.sizes:
            shorter.append((-math.prod(sizes), max(sizes), sizes))
    return [Mesh(tuple(zip(mesh.names, sizes, strict=True))) for *_, sizes in sorted(shorter)]


def _within(lengths: list[range], most: int) -> Iterator[tuple[int, ...]]:
    if not lengths:
        yield ()
        return
    least = math.prod(span.start for span in lengths[1:])
    for size in lengths[0]:
        if size * least <= most:
            yield from ((size, *tail) for tail in _within(lengths[1:], most // size))


Cut = tuple[
    int, tuple[str, ...], str
]  # the length of a dim at small sizes, the axes that cut it, how they do as planned


def _cuts(plan: Plan, full: Graph, small: Graph) -> set[Cut]:
    """Plain splits of the plan (those in blocks or units are read from the lowered program)."""
    chosen, cuts = chosen_strategies(plan, full), set()
    counterparts = keyed_ops(small)
    for key, op in keyed_ops(full).items():
        if key not in counterparts:
            continue
        pairs = [*zip(op.operands, counterparts[key].operands, chosen[op.name].operands, strict=True)]
        pairs += zip(op.results, counterparts[key].results, chosen[op.name].results, strict=True)
        for name, other, layout in pairs:
            if name is None or other is None or layout is None:
                continue
            sizes = zip(full.tensor(name).shape, small.tensor(other).shape, strict=True)
            for dim, (planned, now) in enumerate(sizes):
                shards = layout.shards(dim)
                if shards and all((s.blocks, s.unit) == (1, 1) for _, s in shards):
                    axes = tuple(plan.mesh.names[axis] for axis, _ in shards)
                    cuts.add((now, axes, evenness(_size(planned, axes), plan.mesh)))
    return cuts


def _size(length: int, axes: tuple[str, ...]) -> LocalSize:
    return LocalSize(length, tuple(AxisShard(axis) for axis in axes))


def _keeps_cut(cut: Cut, mesh: Mesh) -> bool:
    length, axes, planned = cut
    return evenness(_size(length, axes), mesh) == planned
