"""Choices that are worth keeping under a memory limit: of those that look the same to every value, the Pareto ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem


def undominated(problem: Problem, kept: Sequence[Integers]) -> list[Integers]:
    """Without the choices of which another has the same layouts at every value and no more seconds and bytes."""
    layouts: list[list[Integers]] = [[] for _ in problem.nodes]
    for value in problem.values:
        layouts[value.producer].append(value.source)
        for c, targets in zip(value.consumers, value.targets, strict=True):
            layouts[c].append(targets)
    return [
        _pareto(
            node.seconds, node.bytes if node.interval[0] < node.interval[1] else np.zeros(len(node.bytes)), of, some
        )
        for node, of, some in zip(problem.nodes, layouts, kept, strict=True)
    ]


def _pareto(seconds: Floats, sizes: Floats, layouts: Sequence[Integers], some: Integers) -> Integers:
    groups: dict[bytes, list[int]] = {}
    rows = np.stack([of[some] for of in layouts], axis=1) if layouts else np.zeros((len(some), 0))
    for s, row in zip(some, np.ascontiguousarray(rows), strict=True):
        groups.setdefault(row.tobytes(), []).append(int(s))
    stay: list[int] = []
    for group in groups.values():
        least = np.inf
        for s in sorted(group, key=lambda s: (seconds[s], sizes[s], s)):
            if sizes[s] < least:
                least = sizes[s]
                stay.append(s)
    return np.array(sorted(stay), np.int64)
