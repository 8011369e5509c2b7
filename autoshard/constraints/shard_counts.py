"""Layouts as shard counts, the original interface's notation: how often each dim of each operand is sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, Partial, Shard
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.instance import Instance
from autoshard.rules.algebra.strategy import Strategy

Counts = tuple[int, ...]
Named = tuple[str, tuple[int, ...]]  # a tensor's name and shape


def counts(layout: Layout, rank: int, mesh: Mesh) -> Counts:
    """Number of parts of each of the `rank` dims."""
    result = [1] * rank
    for placement, size in zip(layout.placements, mesh.sizes, strict=True):
        if isinstance(placement, Shard):
            result[placement.dim] *= size
    return tuple(result)


def of_operands(strategy: Strategy, tensors: Sequence[Named | None], mesh: Mesh) -> tuple[Counts | None, ...]:
    """Shard counts of every operand; None where it is absent."""
    pairs = zip(strategy.operands, tensors, strict=True)
    return tuple(counts(layout, len(tensor[1]), mesh) if layout and tensor else None for layout, tensor in pairs)


def operand_shapes(graph: Graph, op: Op) -> list[Named | None]:
    """Name (of a parameter, its path) and shape of each operand."""
    paths = {stored.tensor: stored.path for stored in (*graph.parameters, *graph.buffers)}
    return [None if name is None else (paths.get(name, name), graph.tensor(name).shape) for name in op.operands]


def text(cuts: Sequence[Counts | None]) -> str:
    """`((4, 2), (2, 1))`, absent operands left out."""
    return str(tuple(cut for cut in cuts if cut is not None))


def agree(wanted: Sequence[Counts | None], offered: Sequence[Counts | None]) -> bool:
    return distance(wanted, offered) == 0


def distance(wanted: Sequence[Counts | None], offered: Sequence[Counts | None]) -> float:
    """Distance between shard counts, 0 where all that are wanted are there."""
    total = 0.0
    for want, cut in zip(wanted, offered, strict=True):
        if want is not None and cut is not None:
            total += sum(abs(math.log2(a / b)) for a, b in zip(want, cut, strict=False))
    return total


def matched(
    wanted: Sequence[Counts | None], positions: int, tensors: Sequence[Named | None]
) -> tuple[Counts | None, ...] | str:
    """Shard counts by position (absent operands may be left out when counting), or what is wrong with their number."""
    present = [i for i, tensor in enumerate(tensors) if tensor is not None]
    if len(wanted) not in (positions, len(present)):
        names = ", ".join(tensor[0] for tensor in tensors if tensor is not None)
        return f"cuts of {len(wanted)}, but there are {len(present)} tensors: {names}"
    cuts: list[Counts | None] = [None] * positions
    for position, cut in zip(range(positions) if len(wanted) == positions else present, wanted, strict=True):
        tensor = tensors[position]
        if cut is not None and tensor is None:
            return f"operand {position} is absent: expected None, got {cut}"
        if cut is not None and tensor is not None and len(cut) != len(tensor[1]):
            return f"{tensor[0]} has {len(tensor[1])} dims {list(tensor[1])}, but {cut} cuts {len(cut)}"
        cuts[position] = cut
    return tuple(cuts)


def impossible(wanted: Sequence[Counts | None], mesh: Mesh) -> str:
    """Reason why the mesh has no such counts: each is a product of axis sizes, and an axis shards a tensor once."""
    possible = sorted({math.prod(some) for n in range(len(mesh.sizes) + 1) for some in combinations(mesh.sizes, n)})
    for cut in wanted:
        for count in cut or ():
            if count not in possible:
                return f"{count} shards are no product of axis sizes of {mesh}: {', '.join(map(str, possible))}"
        if cut and math.prod(cut) > mesh.size:
            return f"{cut} needs {math.prod(cut)} devices, {mesh} has {mesh.size}"
    return ""


def problem(wanted: Sequence[Counts | None], bound: Instance, mesh: Mesh) -> str:
    """Reason why an operator can't be sharded so: the mesh, one loop sharded in two ways, more devices than exist."""
    reason = impossible(wanted, mesh)
    if reason:
        return reason
    loops: dict[str, tuple[int, int, int]] = {}  # factor -> (cut, operand, dim)
    for position, (cut, term) in enumerate(zip(wanted, bound.rule.operands, strict=True)):
        for dim, count in enumerate(cut or ()):
            factors = term.dims[dim].factors if term is not None else ()
            if len(factors) == 1:
                before = loops.setdefault(factors[0], (count, position, dim))
                if before[0] != count:
                    return _unequal(factors[0], before, (count, position, dim))
            elif not factors and count > 1:
                return f"dim {dim} of operand {position} can't be cut"
    return _too_many({factor: cut for factor, (cut, _, _) in loops.items() if cut > 1}, mesh)


def _unequal(factor: str, one: tuple[int, int, int], other: tuple[int, int, int]) -> str:
    places = " and ".join(f"dim {dim} of operand {position}" for _, position, dim in (one, other))
    return f"{places} are one loop ({factor}) and must be sharded equally, got {one[0]} and {other[0]}"


def _too_many(loops: dict[str, int], mesh: Mesh) -> str:
    needed = math.prod(loops.values())
    if needed <= mesh.size:
        return ""
    spelt = " x ".join(f"{factor} {cut}" for factor, cut in loops.items())
    return f"it needs {needed} devices ({spelt}), {mesh} has {mesh.size}"


def result_problem(wanted: Counts, results: Sequence[Layout], mesh: Mesh) -> str:
    """Reason why a result can't be left so: beyond its own shards a dim can only take axes on which it is a sum."""
    allowed: list[set[int]] = [set() for _ in wanted]
    for layout in results:
        summed = math.prod(n for p, n in zip(layout.placements, mesh.sizes, strict=True) if isinstance(p, Partial))
        for dim, cut in enumerate(counts(layout, len(wanted), mesh)):
            allowed[dim] |= {cut, cut * summed}
    for dim, count in enumerate(wanted):
        if count not in allowed[dim]:
            possible = " or ".join(map(str, sorted(allowed[dim])))
            return f"dim {dim} of the result can be sharded {possible} times after these shards, not {count}"
    return ""
