"""Restriction to pins, before a problem is solved: they hold in every solver because none sees another choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.ir.problem import Integers, Problem, Value


def restricted(problem: Problem, pinned: Mapping[int, int]) -> Problem:
    """The problem with one choice, numbered 0, for each pinned node."""
    if not pinned:
        return problem
    nodes = list(problem.nodes)
    for n, s in pinned.items():
        nodes[n] = replace(nodes[n], seconds=nodes[n].seconds[s : s + 1], bytes=nodes[n].bytes[s : s + 1])
    return replace(problem, nodes=tuple(nodes), values=tuple(_restricted(value, pinned) for value in problem.values))


def original(choice: Sequence[int], pinned: Mapping[int, int]) -> tuple[int, ...]:
    """A choice of the restricted problem in the numbers of the whole one."""
    return tuple(pinned.get(n, s) for n, s in enumerate(choice)) if pinned else tuple(choice)


def _restricted(value: Value, pinned: Mapping[int, int]) -> Value:
    if value.producer not in pinned and not any(c in pinned for c in value.consumers):
        return value

    def cut(n: int, layouts: Integers) -> Integers:
        return np.asarray(layouts[pinned[n] : pinned[n] + 1]) if n in pinned else layouts

    targets = tuple(cut(c, t) for c, t in zip(value.consumers, value.targets, strict=True))
    return replace(value, source=cut(value.producer, value.source), targets=targets)
