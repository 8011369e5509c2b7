"""Values with several readers, taken apart: each reader pays a share of the layout that it needs, and all terms are
over two nodes. What is left is eliminated exactly, in tables as small as those of a chain.

The shares of a layout add up to 1, so that the minimum is a bound: a plan pays at least as much for the layouts that
its readers need. Where readers agree it is what they pay. After each round shares move to the readers that took a
layout together, which raises the bound; alike values have the same shares, so that layers go on repeating. A value with
many readers is cut off: each pays its share of the layout from the cheapest source; what it is made of is then chosen
for the readers. The best plan is that over the choices of all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, memory, objective
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.effort import CLOSE, PLANS, ROUNDS, SMALL_ENTRIES, SOON_ENTRIES
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.local_search import Choice, links, options, polished, to_readers
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimum_within, out_of_reach
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import hub_relaxation, reader_terms
from autoshard.solvers.relax.restricted_start import Near, kinds, narrowed, solve_top_k

FORESEEN = 4  # times the entries, before any choice is left out: what is above that does not fit after it


class ReaderShares:
    """Problems with the structure of `problem`, whatever their prices: shares and plans are kept between them.

    `hubs`: whether values with many readers are cut off."""

    def __init__(self, problem: Problem, *, hubs: bool = True) -> None:
        self.problem = problem
        self.kind = reader_terms.kinds(problem)
        self.alike = kinds(problem)
        self.shares: dict[int, Floats] = {}
        self.pool: list[Choice] = []
        self.limited: list[Choice] = []  # plans met under memory limits
        self.cut, self.views = reader_terms.many(problem) if hubs else (frozenset(), ())  # values that are cut off
        # Of the tables of a round. Where nothing is cut off exact ones are as small, and better than large shares.
        self.budget = hub_relaxation.as_messages(problem, SOON_ENTRIES) if self.cut else SOON_ENTRIES
        self.heads = _upstream(problem, self.cut, self.views)
        self.in_reach = False  # whether tables turned out to be small enough to begin with: prices change little of it

    def search(self, state: Incumbent, rounds: int = ROUNDS, near: float = CLOSE, *, sketched: bool = False) -> bool:
        """Leaves plans and bounds; False where even this takes tables that are too large, or time is over.

        `near`: the relative gap that is not worth another round. `sketched`: rounds over few choices of each node do,
        which leave plans alone."""
        problem, contents, expected = state.problem, Contents(state.problem), self.in_reach
        low = state.bound  # about the least
        for round_ in range(rounds):
            before, value = low, state.value
            part = self.reached(problem, contents)
            if part is None:
                return False
            solved: Minimum | Near | None = attempt(solve_top_k, part, SOON_ENTRIES) if sketched else None
            solved = solved or attempt(minimum_within, part, contents, budget_entries=self.budget)
            if solved is None and expected and not round_:  # at these prices tables are larger
                self.in_reach = False
                return self.search(state, rounds, near, sketched=sketched)
            if solved is None:
                return round_ > 0
            if isinstance(solved, Minimum):
                state.raise_bound(solved.bound)
            low = max(low, solved.bound if isinstance(solved, Minimum) else solved.value)
            self.take(state, tuple(solved.choice), low)
            if state.value < np.inf and state.value - low <= near * state.value:
                break
            if round_ > 1 and low <= before * (1 + CLOSE) and state.value >= value * (1 - CLOSE):
                break
            self.shift(solved.choice, 1.0 / (round_ + 2))
        if state.value - low > near * state.value:
            state.offer(self.among(problem))
        return True

    def reached(self, problem: Problem, contents: Contents) -> Problem | None:
        """Problem with values apart by reader; None if its tables are too large."""
        part = self.apart(problem)
        contents.also(part)
        if not self.in_reach and out_of_reach(part, contents, FORESEEN * SOON_ENTRIES):
            return None
        self.in_reach = True
        return part

    def take(self, state: Incumbent, choice: Choice, low: float) -> None:
        """`low`: about the least that there is."""
        choice = self.with_best_heads(state.problem, choice)
        value = objective(state.problem, choice)
        if low * (1 + CLOSE) < value < np.inf:
            choice = attempt(polished, state.problem, choice) or choice
        state.offer(choice)
        self.keep(choice)

    def offered(self, state: Incumbent, choice: Choice) -> bool:
        """Leaves a plan, its heads chosen again; True if it is allowed and fits."""
        choice = self.with_best_heads(state.problem, choice)
        self.keep(choice)
        return state.offer(choice)

    def with_best_heads(self, problem: Problem, choice: Choice, multipliers: Floats | None = None) -> Choice:
        """Choice with the makers of values with many readers, and views of them, chosen again for the readers of
        `choice`; at these prices of bytes too."""
        if not self.views:
            return self._heads(problem, choice, multipliers)
        linked = links(problem)
        wanted = _least_of(self.views, choice, lambda n, current: to_readers(problem, linked, current, n))
        wanted = self._heads(problem, wanted, multipliers)
        wanted = _least_of(self.views, wanted, lambda n, current: options(problem, linked, current, n))
        return min(choice, wanted, key=lambda candidate: _priced(problem, candidate, multipliers))

    def _heads(self, problem: Problem, choice: Choice, multipliers: Floats | None) -> Choice:
        if not self.heads:
            return choice
        nodes = enumerate(problem.nodes)
        free = [np.arange(len(node.seconds)) if n in self.heads else np.array([choice[n]]) for n, node in nodes]
        try:
            minimum = attempt(
                minimum_within,
                problem,
                Contents(problem),
                multipliers=multipliers,
                allowed=free,
                budget_entries=SMALL_ENTRIES,
            )
        except InfeasibleError:
            return choice
        return choice if minimum is None else tuple(minimum.choice)

    def keep(self, choice: Choice) -> None:
        if choice in self.pool:
            self.pool.remove(choice)
        self.pool = [choice, *self.pool][:PLANS]

    def remember(self, choice: Choice) -> None:
        """Keep the choice for later limits."""
        if choice not in self.limited:
            self.limited = [*self.limited, choice][-PLANS:]

    def apart(self, problem: Problem, multipliers: Floats | None = None, scale: float = 1.0) -> Problem:
        """The pairs, each with its share of the seconds and, at these prices, of the bytes."""
        return reader_terms.apart(additive(problem, multipliers, scale), self.kind, self.shares, self.cut)

    def shift(self, choice: Sequence[int], step: float) -> None:
        """Shares part of the way to an even split among the readers that took a layout together, in the mean of alike
        values."""
        wanted: dict[int, tuple[Floats, Floats]] = {}
        for v, (value, kind) in enumerate(zip(self.problem.values, self.kind, strict=True)):
            count, layouts = len(value.consumers), value.seconds.shape[1]
            if count == 1 or v in self.cut:
                continue
            if kind not in wanted:
                wanted[kind] = np.zeros((count, layouts)), np.zeros(layouts)
            total, times = wanted[kind]
            taken = np.array([t[choice[c]] for c, t in zip(value.consumers, value.targets, strict=True)])
            for layout in np.unique(taken):
                users = taken == layout
                total[:, layout] += users / users.sum()
                times[layout] += 1
        for kind, (total, times) in wanted.items():
            old = self.shares.get(kind)
            if old is None:
                old = np.full(total.shape, 1.0 / len(total))
            goal = np.where(times > 0, total / np.maximum(times, 1), old)
            self.shares[kind] = old + step * (goal - old)

    def among(self, problem: Problem) -> Choice | None:
        """The best plan over the choices of the plans that are kept, the same ones at nodes that are alike; None where
        tables or time don't suffice."""
        seen: dict[Hashable, set[int]] = {}
        for choice in self.pool:
            for alike, s in zip(self.alike, choice, strict=True):
                seen.setdefault(alike, set()).add(int(s))
        few = {alike: np.array(sorted(choices), np.int64) for alike, choices in seen.items()}
        keep: list[Integers] = [few[alike] for alike in self.alike]
        part = replace(narrowed(problem, keep), capacity_bytes=float("inf"))
        if self.heads:  # layers fold without what all of them read
            part = reader_terms.without_hubs(additive(part), self.cut)
        try:
            minimum = attempt(minimum_within, part, Contents(part), budget_entries=SOON_ENTRIES)
        except InfeasibleError:
            return None
        if minimum is None:
            return None
        best = tuple(int(some[s]) for some, s in zip(keep, minimum.choice, strict=True))
        best = self.with_best_heads(problem, best)
        self.keep(best)
        return best


def _priced(problem: Problem, choice: Choice, multipliers: Floats | None) -> float:
    seconds = objective(problem, choice)
    return seconds if multipliers is None else seconds + float(multipliers @ memory(problem, choice))


def _least_of(nodes: Sequence[int], choice: Choice, seconds: Callable[[int, Sequence[int]], Floats]) -> Choice:
    """Choice with each of the nodes, the last first, at its strategy of least `seconds`, given the choice so far."""
    current = list(choice)
    for n in reversed(nodes):
        costs = seconds(n, current)
        best = int(np.argmin(costs))
        if costs[best] < costs[current[n]]:
            current[n] = best
    return tuple(current)


def _upstream(problem: Problem, cut: Collection[int], views: Collection[int]) -> frozenset[int]:
    """The nodes that values of `cut` are made of, but `views`; none where that is most of the problem."""
    makers: list[list[int]] = [[] for _ in problem.nodes]
    for value in problem.values:
        for consumer in value.consumers:
            makers[consumer].append(value.producer)
    waiting = [problem.values[v].producer for v in cut]
    upstream: set[int] = set()
    while waiting:
        n = waiting.pop()
        if n not in upstream:
            upstream.add(n)
            waiting += makers[n]
    upstream.difference_update(views)
    return frozenset(upstream) if len(upstream) < len(problem.nodes) / 4 else frozenset()
