"""The strategy-selection problem as arrays. numpy only: no torch, no operator names.

A node chooses one of its strategies. A value goes from one producer node to its consumer nodes; each choice of the
producer leaves it in a source layout, each choice of a consumer needs it in a target layout. It is redistributed once
for every *distinct* target layout that its consumers need (made once, paid once), which is what `Value` states.

objective(choice) = sum over nodes of seconds[choice]
                  + sum over values, over distinct needed targets t, of seconds[source, t]
memory(choice, time) = the same sums over bytes, of what is alive at that time; at every time at most capacity_bytes.
A target that several consumers need is alive over the union span (earliest start to latest stop) of those consumers.
An infinite entry forbids the choice or the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MANY = 4  # readers: a value with more is a hub, and cut off: each reader pays its share from the cheapest source
SLAB = 1 << 16  # entries that are looked at together: half a megabyte stays in the cache
Own = TypeVar("Own", "Node", "Value")


@dataclass(frozen=True, eq=False)
class Node:
    """`seconds[s]` and `bytes[s]` of strategy s; the bytes are alive at times start <= t < stop."""

    name: str
    seconds: Floats
    bytes: Floats
    interval: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Value:
    """A value with one producer and one or more consumers (node indices; a consumer may appear once only).

    `source[s]`: the layout index that producer strategy s leaves it in. `targets[c][s]`: the layout index that
    strategy s of consumer c needs. `seconds[source, target]`: redistribution, forward and backward. `bytes[target]`:
    size of the value kept in that layout. `intervals[c]`: when consumer c keeps it alive, (0, 0) where it does not.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    source: Integers
    targets: tuple[Integers, ...]
    seconds: Floats
    bytes: Floats
    intervals: tuple[tuple[int, int], ...]


def changed(original: Own, **parts: object) -> Own:
    """`dataclasses.replace` of a node or value, without checks of each field: a search makes tens of thousands."""
    copy: Own = object.__new__(type(original))
    vars(copy).update(vars(original), **parts)
    return copy


@dataclass(frozen=True, eq=False)
class Problem:
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    capacity_bytes: float = float("inf")
    horizon: int = 1  # times are 0 <= t < horizon


def objective(problem: Problem, choice: Sequence[int]) -> float:
    """Seconds of a step under `choice`; inf where a forbidden entry is used."""
    total = sum(node.seconds.item(s) for node, s in zip(problem.nodes, choice, strict=True))
    for value in problem.values:  # `item` reads a number at a third of what indexing takes
        source = value.source.item(choice[value.producer])
        if len(value.consumers) == 1:
            total += value.seconds.item(source, value.targets[0].item(choice[value.consumers[0]]))
            continue
        needed = {target.item(choice[c]) for c, target in zip(value.consumers, value.targets, strict=True)}
        total += sum(value.seconds.item(source, target) for target in sorted(needed))
    return total


def memory(problem: Problem, choice: Sequence[int]) -> Floats:
    """Bytes alive at each time, shape (horizon,)."""
    edges = [edge for node in problem.nodes for edge in node.interval]
    sizes = [node.bytes.item(s) for node, s in zip(problem.nodes, choice, strict=True)]
    for value in problem.values:
        if len(value.consumers) == 1:
            edges += value.intervals[0]
            sizes.append(value.bytes.item(value.targets[0].item(choice[value.consumers[0]])))
            continue
        for target, interval in target_spans(value, choice).items():
            edges += interval
            sizes.append(value.bytes[target])
    delta = np.zeros(problem.horizon + 1)
    spans, size = np.array(edges, dtype=np.int64).reshape(-1, 2), np.array(sizes, dtype=float)
    alive = spans[:, 0] < spans[:, 1]
    np.add.at(delta, spans[alive, 0], size[alive])
    np.subtract.at(delta, spans[alive, 1], size[alive])
    result: Floats = np.cumsum(delta)[:-1]
    return result


def target_spans(value: Value, choice: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Target layout -> the span over which the value is kept in it, under `choice`."""
    spans: dict[int, tuple[int, int]] = {}
    for consumer, targets, (start, stop) in zip(value.consumers, value.targets, value.intervals, strict=True):
        if start < stop:
            target = int(targets[choice[consumer]])
            low, high = spans.get(target, (start, stop))
            spans[target] = (min(low, start), max(high, stop))
    return spans
