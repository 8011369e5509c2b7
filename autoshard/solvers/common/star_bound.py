"""A lower bound in linear time: every value with its ends is a star, solved by itself.

A node's cost is split evenly over the values that it is in. A star's minimum over the source layouts is the sum of its
consumers' own minima, each paying a k-th of what its target layout costs (k consumers share it at the most); the sum of
the stars' minima is below every plan:

    sum_v min_r [ a'_p(r) + sum_i min_t ( a'_i(t) + b_v(r, t) / k ) ],  a' = a node's cost / its values

Implemented in `star_bound._star`. Memory is left out: more constraints only raise the optimum.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem, Value


def star_bound(problem: Problem) -> float:
    """Seconds that no plan is below; inf where a node has no allowed choice."""
    degree = np.zeros(len(problem.nodes), np.int64)
    for value in problem.values:
        degree[[value.producer, *value.consumers]] += 1
    total = sum(float(node.seconds.min()) for node, d in zip(problem.nodes, degree, strict=True) if d == 0)
    known: dict[Hashable, float] = {}
    for value in problem.values:
        ends = (value.producer, *value.consumers)
        nodes = [problem.nodes[n] for n in ends]
        key = (id(value.seconds), id(value.source), *map(id, value.targets), *(id(node.seconds) for node in nodes),
               *(int(degree[n]) for n in ends))  # fmt: skip
        if key not in known:
            known[key] = _star(value, [node.seconds / degree[n] for node, n in zip(nodes, ends, strict=True)])
        total += known[key]
    return total


def _star(value: Value, own: list[Floats]) -> float:
    rows, columns = value.seconds.shape
    total = by_layout(own[0], value.source, rows)
    for targets, seconds in zip(value.targets, own[1:], strict=True):
        pay = value.seconds / len(value.consumers) + by_layout(seconds, targets, columns)
        total = total + pay.min(axis=1)
    return float(total.min())


def by_layout(seconds: Floats, layouts: Integers, count: int) -> Floats:
    """The least of `seconds[s]` over the choices s of each layout; inf where a layout has none."""
    least = np.full(count, np.inf)
    np.minimum.at(least, layouts, seconds)
    return least
