"""Strategies that hold at every dynamic size: those that the rules offer at sizes that stand for all.

Two sizes stand for all of `divisor * n + remainder`: one with a prime n that no axis has devices for, which only a
divisor of all of them divides, and the least, for operators that need some length. A strategy must shard there as it
does at the planned size, and evenly if the length is dynamic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoshard.graph_capture.dynamic_sizes.graph_numbers import at_sizes, numbers_of
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.strategy import Strategy

Offered = dict[str, Strategy]


@dataclass(frozen=True)
class Probes:
    """`graph` at the sizes that stand for all, the one of primes first."""

    graphs: tuple[Graph, ...] = ()
    legal: dict[object, tuple[Strategy, ...]] = field(default_factory=dict)


def probes(graph: Graph) -> Probes:
    """Probes of the graph, made once; none without dynamic sizes."""
    return graph.once(_probes)


def _probes(graph: Graph) -> Probes:
    if not graph.dynamic:
        return Probes()
    prime = {
        size.name: size.divisor * n + size.remainder for size, n in zip(graph.dynamic, _primes(graph), strict=False)
    }
    least = {size.name: max(size.least, size.divisor + size.remainder) for size in graph.dynamic}
    return Probes((at_sizes(graph, prime), at_sizes(graph, least)))


def _primes(graph: Graph) -> Iterator[int]:
    """Primes above every dynamic size, as no axis that shards one has more devices, and no part of any length. Devices
    hold one run per block: large primes, of which images multiply three, take gigabytes."""
    above = max(graph.tensor(tensor).shape[dim] for size in graph.dynamic for tensor, dim in size.dims)
    lengths = {size for tensor in graph.tensors for size in tensor.shape if size}
    prime = (n for n in itertools.count(above + 1) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return (n for n in prime if all(size % n for size in lengths))


def holds(graph: Graph, op: Op, mesh: Mesh, strategy: Strategy, at_probes: list[Offered]) -> bool:
    """True if the strategy holds at all sizes. `at_probes`: by text, what the rules offer at each probe."""
    for offered in at_probes:
        there = offered.get(str(strategy))
        if there is None or (there.operands, there.results) != (strategy.operands, strategy.results):
            return False
    return not any(True for _ in uneven(graph, op, mesh, strategy))


def uneven(graph: Graph, op: Op, mesh: Mesh, strategy: Strategy) -> Iterator[tuple[str, int, int]]:
    """(tensor, dim, shards) of dynamic lengths that the strategy does not always shard evenly."""
    generic = probes(graph).graphs[0]
    layouts: list[Layout | None] = [*strategy.operands, *strategy.results]
    for name, layout in zip((*op.operands, *op.results), layouts, strict=True):
        if name is None or layout is None:
            continue
        shape, there = graph.tensor(name).shape, generic.tensor(name).shape
        for dim, size in enumerate(local_sizes(there, layout, mesh)):
            if shape[dim] != there[dim] and not size.is_even(mesh):
                yield name, dim, math.prod(mesh.axis_size(shard.axis) for shard in size.shards)


def problem(graph: Graph, op: Op, mesh: Mesh, strategy: Strategy) -> str:
    """Reason why a strategy that is offered at the planned sizes is not at all sizes."""
    for name, dim, shards in uneven(graph, op, mesh, strategy):
        return needs_divisor(graph, name, dim, shards)
    return "it does not hold at every dynamic size"


def needs_divisor(graph: Graph, name: str, dim: int, shards: int) -> str:
    """Reason why a dim can't have so many shards; "" if it can, or is not dynamic."""
    if not graph.dynamic or not any(f"{name} {dim}" in entry.places for entry in graph.follows):
        return ""
    what, multiple = known_multiple(graph, name, dim)
    message = f"{what} is only known to be a multiple of {multiple}; {shards} shards need a divisor of {shards}"
    return message if multiple % shards else ""


def known_multiple(graph: Graph, name: str, dim: int) -> tuple[str, int]:
    """Name of a dynamic length, and the largest number that divides it whatever the sizes are."""
    follows = next(entry for entry in graph.follows if f"{name} {dim}" in entry.places)
    powers = [term.powers for term in follows.terms if any(term.powers)]
    names = [size.name for n, size in enumerate(graph.dynamic) if any(power[n] for power in powers)]
    lengths = [numbers_of(probe)[f"{name} {dim}"] for probe in probes(graph).graphs]
    lengths.append(graph.tensor(name).shape[dim])
    plain = len(names) == 1 and len(follows.terms) == 1
    return (names[0] if plain else f"dim {dim} of {name} ({', '.join(names)})"), math.gcd(*lengths)
