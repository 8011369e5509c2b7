"""Arc consistency over forbidden pairs, kept while choices are made: no choice is left without a finite partner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Integers, Problem, Value
from autoshard.solvers.common import clock

Flags = NDArray[np.bool_]


class Fences:
    """Choices s of node n that are still possible: `flags[n][s]`. Only values with infinite entries are considered."""

    def __init__(self, problem: Problem, allowed: Sequence[Integers] | None = None) -> None:
        self.problem = problem
        self.flags: list[Flags] = [np.isfinite(node.seconds) for node in problem.nodes]
        if allowed is not None:
            for flag, some in zip(self.flags, allowed, strict=True):
                inside = np.zeros(len(flag), bool)
                inside[some] = True
                flag &= inside
        self.of: list[list[int]] = [[] for _ in problem.nodes]
        forbids = {id(value.seconds): bool(np.isinf(value.seconds).any()) for value in problem.values}
        fenced = [v for v, value in enumerate(problem.values) if forbids[id(value.seconds)]]
        for v in fenced:
            for n in (problem.values[v].producer, *problem.values[v].consumers):
                self.of[n].append(v)
        self._settle(fenced)
        for node, flag in zip(problem.nodes, self.flags, strict=True):
            if not flag.any():
                raise InfeasibleError(
                    f"{node.name}: none of its {len(flag)} strategies is allowed together with the rest"
                )

    def fix(self, n: int, s: int) -> None:
        """Node n takes choice s. A node may be left without any: then earlier choices exclude each other."""
        self.flags[n] = np.arange(len(self.flags[n])) == s
        self._settle(self.of[n])

    def _settle(self, values: Iterable[int]) -> None:
        waiting = dict.fromkeys(values)
        while waiting:
            clock.check()
            v, _ = waiting.popitem()
            for n in _narrow(self.problem.values[v], self.flags):
                waiting.update(dict.fromkeys(self.of[n]))


def _narrow(value: Value, flags: list[Flags]) -> list[int]:
    """Clears the strategies without a finite partner over one value; returns the nodes that lost some."""
    possible = np.isfinite(value.seconds)
    lost: list[int] = []

    def keep(node: int, wanted: Flags) -> None:
        if (flags[node] & ~wanted).any():
            flags[node] = flags[node] & wanted
            lost.append(node)

    for c, targets in zip(value.consumers, value.targets, strict=True):
        reached = np.flatnonzero(possible[:, np.unique(targets[flags[c]])].any(axis=1))
        keep(value.producer, np.isin(value.source, reached))
    for c, targets in zip(value.consumers, value.targets, strict=True):
        offered = np.flatnonzero(possible[np.unique(value.source[flags[value.producer]])].any(axis=0))
        keep(c, np.isin(targets, offered))
    return lost
