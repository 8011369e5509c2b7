"""The (blocks, unit) by which each factor may be cut: proposed by products, carried both ways through the graph.

A factor f in a product (pre f post) of a dim, cut plainly, cuts the dim in `pre` blocks in units of `post`. So a view
`(n d) -> n d` proposes unit d to what makes its operand, and a split `(3 h) -> h, h, h` proposes 3 blocks. A proposal
for a dim of a tensor is one for the factors there, in every op that makes or reads it, and from there for the other
dims with the same factor, until nothing changes. It travels breadth-first, and each factor keeps the first few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

from autoshard.ir.graph import Graph, Op
from autoshard.ir.intervals import Unit, runs
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.derive import part_sizes
from autoshard.rules.algebra.instance import Instance
from autoshard.rules.algebra.nesting import dim_cut, factor_problem
from autoshard.rules.dynamic_strategies import probes
from autoshard.rules.finite_values import signs
from autoshard.rules.operator_table import instance
from autoshard.rules.operators import constants, record

Refinement = tuple[int, Unit]
Refinements = tuple[tuple[str, tuple[Refinement, ...]], ...]
MOST = 3  # refinements of one factor, beside the plain cut
PLAIN = (1, 1)


@dataclass(frozen=True, eq=False)
class Granularities:
    """Op name -> its factors' (blocks, unit) other than the plain (1, 1), and the op's `Signature`."""

    by_op: dict[str, Refinements]
    signatures: dict[str, Signature] = field(default_factory=dict)

    def refinements(self, op: Op) -> Refinements:
        return self.by_op.get(op.name, ())


@dataclass(frozen=True, eq=False)
class Signature:
    """Facts that equal operators of repeated layers share (one object for all): the bound rule, and the dims of its
    factors. A slot is a position in (*operands, *results); a place is a (slot, dim).

    `holding[factor]`: (slot, dim, pre, post) of every dim (pre factor post) that holds it. `receiving[slot, dim]`:
    (factor, pre, post) of those there that can be cut in blocks and units.
    """

    instance: Instance
    holding: dict[str, list[tuple[int, int, int, int]]]
    receiving: dict[tuple[int, int], list[tuple[str, int, int]]]


_Proposal = tuple[str, int, int, int]  # cut dim `dim` of `tensor` in `blocks` blocks, in multiples of `unit`


def granularities(graph: Graph, mesh: Mesh) -> Granularities:
    """Fixed point of the proposals, keeping those that differ from the plain cut for some set of axes of this mesh."""
    known = graph.once(_known)
    if mesh not in known:
        known[mesh] = _granularities(graph, mesh)
    return known[mesh]


def _known(graph: Graph) -> dict[Mesh, Granularities]:
    """Granularities for each mesh requested so far."""
    return {}


def _granularities(graph: Graph, mesh: Mesh) -> Granularities:
    sizes = tuple(size for size in mesh.sizes if size > 1)
    signatures = _signatures(graph)
    touched = touching(graph)
    accepted: dict[tuple[str, str], list[tuple[int, int]]] = {}
    queue = deque(
        p
        for op in graph.ops
        for f in signatures[op.name].instance.assignable
        for p in _spread(op, signatures[op.name], f, PLAIN)
    )
    seen: set[_Proposal] = set()
    while queue:
        proposal = queue.popleft()
        if proposal in seen:
            continue
        seen.add(proposal)
        tensor, dim, blocks, unit = proposal
        if not _differs(graph.by_name[tensor].shape[dim], (blocks, unit), (PLAIN,), sizes):
            continue
        for op, slot in touched[tensor]:
            signature = signatures[op.name]
            for factor, pre, post in signature.receiving.get((slot, dim), ()):
                if blocks % pre or unit % post:
                    continue
                refinement = blocks // pre, unit // post
                prior = accepted.setdefault((op.name, factor), [])
                if len(prior) < MOST and _differs(signature.instance.size[factor], refinement, (PLAIN, *prior), sizes):
                    prior.append(refinement)
                    queue.extend(_spread(op, signature, factor, refinement))
    by_op = {op.name: _listed(op, signatures[op.name], accepted, _parts(graph, op, sizes)) for op in graph.ops}
    return Granularities(by_op, signatures)


def _listed(
    op: Op, signature: Signature, accepted: dict[tuple[str, str], list[tuple[int, int]]], parts: tuple[Refinement, ...]
) -> Refinements:
    """Refinements of each factor. `parts`: of the rows of operand 0, in addition to the proposals."""
    rows = {factor for factor, places in signature.holding.items() if (0, 0, 1, 1) in places} if parts else set()
    by_factor = (
        (factor, (*accepted.get((op.name, factor), ()), *(parts if factor in rows else ())))
        for factor in signature.instance.assignable
    )
    return tuple((factor, refinements) for factor, refinements in by_factor if refinements)


def _parts(graph: Graph, op: Op, axes: tuple[int, ...]) -> tuple[Refinement, ...]:
    """Lengths into which the rows of the table that an operator looks up in are to be split."""
    if not graph.manual_splits or record(op.target).chooses != "rows":
        return ()
    splits = dict.fromkeys(lengths for tensor, lengths in graph.manual_splits if tensor == op.operands[0])
    return tuple((1, lengths) for lengths in splits if len(lengths) in axes)


def touching(graph: Graph) -> dict[str, list[tuple[Op, int]]]:
    """(op, slot) pairs that make or read each tensor."""
    result: dict[str, list[tuple[Op, int]]] = {tensor.name: [] for tensor in graph.tensors}
    for op in graph.ops:
        for slot, name in enumerate((*op.operands, *op.results)):
            if name is not None:
                result[name].append((op, slot))
    return result


def _signatures(graph: Graph) -> dict[str, Signature]:
    """Op name -> its signature: one object for all with the same target, arguments, shapes and dtypes."""
    facts: dict[str, tuple[object, ...]] = {t.name: (t.shape, t.dtype, t.requires_grad) for t in graph.tensors}
    if graph.dynamic:  # a length that is dynamic is another than an equal one that is not
        (generic, *_) = probes(graph).graphs
        facts = {name: (*fact, generic.tensor(name).shape) for name, fact in facts.items()}
    known: dict[tuple[object, ...], Signature] = {}
    signatures: dict[str, Signature] = {}
    for op in graph.ops:
        tensors = tuple(None if name is None else facts[name] for name in (*op.operands, *op.results))
        constant = constants(graph).issuperset(op.results)
        known_rule = graph.rule_of.get(op.name), signs(graph).of(op)
        key = (op.target, op.attributes, tensors, len(op.operands), constant, *known_rule)
        if key not in known:
            known[key] = signature_of(instance(graph, op))
        signatures[op.name] = known[key]
    return signatures


def signature_of(bound: Instance) -> Signature:
    """Signature of a bound rule: the dims that hold each of its factors."""
    holding: dict[str, list[tuple[int, int, int, int]]] = {factor: [] for factor in bound.assignable}
    receiving: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for slot, term in enumerate((*bound.rule.operands, *bound.rule.results)):
        for index, dim in enumerate(term.dims if term else ()):
            for factor in dim.factors:
                _, pre, post = dim_cut(part_sizes(bound, dim), dim.parts.index(factor), (1, 1, 1))
                assert isinstance(post, int)
                holding.setdefault(factor, []).append((slot, index, pre, post))
                if factor in bound.assignable and factor not in bound.rule.plain:
                    receiving.setdefault((slot, index), []).append((factor, pre, post))
    return Signature(bound, holding, receiving)


def _spread(op: Op, signature: Signature, factor: str, refinement: tuple[int, int]) -> Iterator[_Proposal]:
    """Proposals for every dim that holds the factor, from a refinement of it."""
    for slot, dim, pre, post in signature.holding[factor]:
        blocks, unit = pre * refinement[0], refinement[1] * post
        name = op.operands[slot] if slot < len(op.operands) else op.results[slot - len(op.operands)]
        if (blocks, unit) != PLAIN and name is not None:
            yield name, dim, blocks, unit


def _differs(
    size: int, refinement: tuple[int, int], others: tuple[tuple[int, int], ...], axes: tuple[int, ...]
) -> bool:
    """True if the refinement is possible and holds other indices than each of the others, for some axes of the mesh."""
    holdings = _holdings(size, refinement, axes)
    return any(holdings) and all(holdings != _holdings(size, other, axes) for other in others)


@lru_cache(maxsize=65536)
def _holdings(size: int, refinement: tuple[int, int], axes: tuple[int, ...]) -> tuple[bytes | None, ...]:
    """Indices that the devices hold, for every set of axes in mesh order; None if the cut can't be."""
    blocks, unit = refinement
    subsets = sorted({subset for count in range(1, len(axes) + 1) for subset in combinations(axes, count)})
    cuts = [tuple((parts, blocks, unit) for parts in subset) for subset in subsets]
    return tuple(runs(size, cut).key if not factor_problem(size, cut, False) else None for cut in cuts)
