"""Which (blocks, unit) each factor may be cut by: proposed by products, carried both ways through the graph.

A factor f in a product (pre f post) of a dim, cut plainly, cuts the dim in `pre` blocks in units of `post`. So a view
`(n d) -> n d` proposes unit d to what makes its operand, and a split `(3 h) -> h, h, h` proposes 3 blocks. A proposal
for a dim of a tensor is one for the factors there, in every op that makes or reads it, and from there for the other
dims with the same factor, until nothing changes. It travels breadth-first, and each factor keeps the first few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from autoshard.graph.model import Graph, Op
from autoshard.mesh import Mesh
from autoshard.partition import runs
from autoshard.rules.derive import part_sizes
from autoshard.rules.instance import Instance
from autoshard.rules.nesting import dim_cut, factor_problem
from autoshard.rules.notation import Dim
from autoshard.rules.table import instance

Refinement = tuple[int, int]
Refinements = tuple[tuple[str, tuple[Refinement, ...]], ...]
MOST = 3  # refinements of one factor, beside the plain cut
PLAIN: Refinement = (1, 1)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Op name -> its factors' (blocks, unit) other than the plain (1, 1)."""

    by_op: dict[str, Refinements]

    def refinements(self, op: Op) -> Refinements:
        return self.by_op.get(op.name, ())


@dataclass(frozen=True)
class _Proposal:
    """To cut a dim of a tensor in `blocks` blocks, in multiples of `unit`."""

    tensor: str
    dim: int
    blocks: int
    unit: int


def candidates(graph: Graph, mesh: Mesh) -> Candidates:
    """The fixed point. Only what differs from the plain cut, for some set of axes of this mesh, is kept."""
    sizes = tuple(size for size in mesh.sizes if size > 1)
    instances = {op.name: instance(graph, op) for op in graph.ops}
    touching = _touching(graph)
    kept: dict[tuple[str, str], list[Refinement]] = {}
    queue = deque(
        p for op in graph.ops for f in instances[op.name].assignable for p in _spread(op, instances[op.name], f, PLAIN)
    )
    seen: set[_Proposal] = set()
    while queue:
        proposal = queue.popleft()
        size = graph.tensor(proposal.tensor).shape[proposal.dim]
        if proposal in seen or not _differs(size, (proposal.blocks, proposal.unit), (PLAIN,), sizes):
            continue
        seen.add(proposal)
        for op in touching[proposal.tensor]:
            bound = instances[op.name]
            for factor, refinement in _received(op, bound, proposal):
                own = kept.setdefault((op.name, factor), [])
                if len(own) < MOST and _differs(bound.size[factor], refinement, (PLAIN, *own), sizes):
                    own.append(refinement)
                    queue.extend(_spread(op, bound, factor, refinement))
    return Candidates({op.name: _listed(op, instances[op.name], kept) for op in graph.ops})


def _listed(op: Op, bound: Instance, kept: dict[tuple[str, str], list[Refinement]]) -> Refinements:
    own = ((factor, tuple(kept.get((op.name, factor), ()))) for factor in bound.assignable)
    return tuple((factor, refinements) for factor, refinements in own if refinements)


def _touching(graph: Graph) -> dict[str, list[Op]]:
    """The ops that make or read each tensor, once each."""
    result: dict[str, list[Op]] = {tensor.name: [] for tensor in graph.tensors}
    for op in graph.ops:
        for name in dict.fromkeys([*op.operands, *op.results]):
            if name is not None:
                result[name].append(op)
    return result


def _places(op: Op, bound: Instance) -> Iterator[tuple[str, int, Dim]]:
    """(tensor, dim index, dim) of every operand and result."""
    pairs = [*zip(op.operands, bound.rule.operands, strict=True), *zip(op.results, bound.rule.results, strict=True)]
    for name, term in pairs:
        if name is not None and term is not None:
            yield from ((name, index, dim) for index, dim in enumerate(term.dims))


def _spread(op: Op, bound: Instance, factor: str, refinement: Refinement) -> Iterator[_Proposal]:
    """What a refinement of a factor means for every dim that holds it."""
    for tensor, index, dim in _places(op, bound):
        if factor in dim.factors:
            _, blocks, unit = dim_cut(part_sizes(bound, dim), dim.parts.index(factor), (1, *refinement))
            if (blocks, unit) != PLAIN:
                yield _Proposal(tensor, index, blocks, unit)


def _received(op: Op, bound: Instance, proposal: _Proposal) -> Iterator[tuple[str, Refinement]]:
    """What a proposal for a dim means for the factors in it that can be cut: the inverse of `dim_cut`, if any."""
    for tensor, index, dim in _places(op, bound):
        if (tensor, index) != (proposal.tensor, proposal.dim):
            continue
        for factor in dim.factors:
            if factor not in bound.assignable or factor in bound.rule.plain:
                continue
            _, pre, post = dim_cut(part_sizes(bound, dim), dim.parts.index(factor), (1, 1, 1))
            if proposal.blocks % pre == 0 and proposal.unit % post == 0:
                yield factor, (proposal.blocks // pre, proposal.unit // post)


def _differs(size: int, refinement: Refinement, others: tuple[Refinement, ...], axes: tuple[int, ...]) -> bool:
    """Can the refinement be used, and does it hold other indices than each of the others, for some axes of the mesh?"""
    own = _signature(size, refinement, axes)
    return any(own) and all(own != _signature(size, other, axes) for other in others)


@cache
def _signature(size: int, refinement: Refinement, axes: tuple[int, ...]) -> tuple[bytes | None, ...]:
    """What the devices hold, for every set of axes in mesh order; None where that can't be."""
    blocks, unit = refinement
    subsets = sorted({subset for count in range(1, len(axes) + 1) for subset in combinations(axes, count)})
    cuts = [tuple((parts, blocks, unit) for parts in subset) for subset in subsets]
    return tuple(runs(size, cut).key if not factor_problem(size, cut, False) else None for cut in cuts)
