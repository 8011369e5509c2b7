"""One more resource of a step: the host, followed from some operator on by the program's serial row.

The device runs nothing before the host has issued it. So up to an operator k of the forward all tasks are issued one
after the other, and the serial tasks from k on run after that: with h_i the seconds in which the host issues what is
before operator i, and r_i those that i and its redistributions take serially,

    sum over i < k of h_i + sum over i >= k of r_i

is a bound on the forward for every k. The same holds for backward, in which the operators come in reverse, after the
host's forward; there with computations slowed by the gradients which a link carries after k, if this is more
(`slowed_rows`). The optimizer, which surely takes time, comes last. A redistribution between operators on both sides of
k counts on neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.formulation.dependency_path import longest
from autoshard.formulation.formulate import Formulation
from autoshard.formulation.slowed_rows import SLOWED
from autoshard.formulation.step_resources import HOST, IN_ROW, LEAD, StepResources
from autoshard.ir.problem import Floats, Integers


@dataclass(frozen=True)
class Turn:
    """The host until operator `forward` of the graph's order, and in backward until all from operator `backward` on are
    issued; from there on the row `late` of the resources."""

    forward: int
    backward: int
    late: int


def with_leads(resources: StepResources, formulation: Formulation, plans: Sequence[Sequence[int]]) -> StepResources:
    """`resources` and one more for each of the `plans`, with the turn that maximises it; unchanged if no optimizer
    surely ends the step."""
    return _Leads(resources, formulation).extended(plans)


class _Leads:
    def __init__(self, resources: StepResources, formulation: Formulation) -> None:
        self.resources, self.formulation = resources, formulation
        graph, self.dispatch_seconds = formulation.graph, formulation.hardware.constant("host.dispatch")
        position = {op.name: i for i, op in enumerate(graph.ops)}
        self.at = [position[site.name] if site.kind == "op" else None for site in formulation.sites]
        path = longest(graph, {})
        self.issued = np.array([op.name in path.needed for op in graph.ops], float)
        self.issued_back = np.array([op.name in path.grows for op in graph.ops], float)
        self.host, self.row = (resources.names.index(name) for name in (HOST, IN_ROW))
        self.count = len(resources.names)
        names = (name == IN_ROW or name.startswith(SLOWED) for name in resources.names)
        self.late = [self.count + row for row, there in enumerate(names) if there]
        self.known: dict[Hashable, Integers] = {}

    def extended(self, plans: Sequence[Sequence[int]]) -> StepResources:
        turns = list(dict.fromkeys(map(self.turn, plans))) if self.updated() else []
        resources = self.resources
        if turns:
            names = (*resources.names, *(LEAD for _ in turns))
            nodes = tuple(self.rows(turns, at, at) for at in self.at)
            readers = tuple(self.rows(turns, *self.ends(r.value, r.position)) for r in resources.readers)
            resources = replace(resources, names=names, constants=self.constants(turns), picked=(nodes, readers))
        return resources

    def updated(self) -> bool:
        """Does some parameter's update surely take time?"""
        pairs = zip(self.formulation.sites, self.resources.problem.nodes, strict=True)
        return self.formulation.graph.loss is not None and any(
            site.kind == "parameter" and bool((node.seconds > 0).all()) for site, node in pairs
        )

    def ends(self, value: int, position: int) -> tuple[int | None, int | None]:
        entry = self.resources.problem.values[value]
        return self.at[entry.producer], self.at[entry.consumers[position]]

    def turn(self, choice: Sequence[int]) -> Turn:
        """Turn that maximises the bound for a plan."""
        length = len(self.issued)
        host, row, host_back = (np.zeros(length) for _ in range(3))
        host += self.dispatch_seconds * self.issued
        host_back += self.dispatch_seconds * self.issued_back
        rows_back = np.zeros((length, len(self.late)))
        parts = [(node[:, s], at, at) for node, s, at in zip(self.resources.nodes, choice, self.at, strict=True)]
        for reader in self.resources.readers:
            value = self.resources.problem.values[reader.value]
            source = value.source[choice[value.producer]]
            target = value.targets[reader.position][choice[value.consumers[reader.position]]]
            parts.append((reader.seconds[:, source, target], *self.ends(reader.value, reader.position)))
        for seconds, first, last in parts:
            if last is not None:
                host[last] += seconds[self.host]
                rows_back[last] += seconds[self.late]
            if first is not None:
                row[first] += seconds[self.row]
                host_back[first] += seconds[self.count + self.host]
        turns = [_most(late, host_back) for late in rows_back.T]
        most = max(range(len(turns)), key=lambda i: turns[i][1])
        return Turn(_most(host, row)[0], turns[most][0], self.late[most])

    def rows(self, turns: Sequence[Turn], first: int | None, last: int | None) -> Integers:
        """All rows, and one for each turn in both phases; equal ones are one object. The seconds come at or after
        operator `first`, and at or before operator `last`; None if there is no such operator."""
        before = tuple(last is not None and last < turn.forward for turn in turns)
        after = tuple(first is not None and first >= turn.forward for turn in turns)
        early = tuple(first is not None and first >= turn.backward for turn in turns)
        late = tuple((first is None and last is None) or (last is not None and last < turn.backward) for turn in turns)
        key = (before, after, early, late)
        if key not in self.known:
            back, every = self.count, range(2 * self.count)
            forward = [self.host if b else self.row if a else -1 for b, a in zip(before, after, strict=True)]
            ways = zip(early, late, turns, strict=True)
            backward = [back + self.host if e else turn.late if x else -1 for e, x, turn in ways]
            self.known[key] = np.array([*every[:back], *forward, *every[back:], *backward])
        return self.known[key]

    def constants(self, turns: Sequence[Turn]) -> Floats:
        old, dispatch = self.resources.constants, self.dispatch_seconds
        forward = [dispatch * self.issued[: turn.forward].sum() for turn in turns]
        backward = [dispatch * self.issued_back[turn.backward :].sum() for turn in turns]
        # On whichever side of the turn the block is; of its tasks only those after an operator count before the turn.
        spared, cast = self.resources.spared, self.resources.spared_cast[self.count + self.host]
        backward = [seconds - spared[turn.late] - cast for seconds, turn in zip(backward, turns, strict=True)]
        return np.concatenate([old[: self.count], forward, old[self.count :], backward])


def _most(before: Floats, after: Floats) -> tuple[int, float]:
    """The k that maximises the sum of `before` up to k and of `after` from k on, and that sum."""
    sums = np.append(0.0, np.cumsum(before)) + np.append(np.cumsum(after[::-1])[::-1], 0.0)
    return int(np.argmax(sums)), float(sums.max())
