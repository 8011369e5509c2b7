"""Level 2: plans by what a step takes, and a bound below the simulated step of every plan.

The bound is the largest, over weights of the resources of a step, of the least that a plan occupies in the weighted
mean (`formulation/step_resources`). The plans are the least ones of a few means of what a step takes roughly. Between
weights only prices change; shares of readers and plans are kept (`solvers/relax/reader_shares`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InfeasibleError
from autoshard.formulation.formulate import Formulation
from autoshard.formulation.host_lead import with_leads
from autoshard.formulation.step_resources import StepResources, follows, in_a_row, pair_seconds, step_resources
from autoshard.ir.problem import Floats, Problem, objective
from autoshard.solvers import solve
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.effort import FIRST, ROUGHLY, ROUNDS, SOON_ENTRIES
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.local_search import Choice, mixtures
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimum_within, out_of_reach
from autoshard.solvers.relax import hub_relaxation
from autoshard.solvers.relax.limited_search import CUTS
from autoshard.solvers.relax.reader_shares import FORESEEN, ReaderShares
from autoshard.solvers.relax.restricted_master import mixture
from autoshard.solvers.relax.restricted_start import MUCH_WORK, Near, exact_work, solve_top_k

# Contenders under a limit, weights of what plans occupy most, rounds for each, plans whose turns of the host count,
# plans of the bound.
EACH = 2
_FAR = 0.75  # of the way to what the plans so far occupy most
_ADDED = (0.3, 0.6)  # the part of all costs in what is weighted, and in what is in a row
_HOPEFUL = 1.05  # times the best estimate: a plan that is worth simulating
_LIKELY = _HOPEFUL  # the same of the middle between what is occupied most and all costs together
MOST_LIKELY = 3  # plans by that; without them Llama-8B on 4x8x8 takes 1.68 times as long


@dataclass(frozen=True, eq=False)
class StepBound:
    """No plan's step is below `seconds`, as the mean by `weights` of what each resource is occupied shows. `tried`: all
    weights, each with its least choice."""

    seconds: float
    weights: Floats
    tried: tuple[tuple[Floats, Choice], ...]


def step_bound(
    resources: StepResources, known: Sequence[Choice], near: Floats | None = None, cut: Collection[int] = ()
) -> StepBound:
    """Bound on the step, from the weights for which the plans `known` occupy most, a part of the way to the weights
    `near`, which found plans. 0 seconds if tables are too large, or time is over, before one is proved. `cut`: values
    that are cut off, too, if tables are too large with them."""
    least = _Least(resources, cut)
    used = [resources.least_used(choice) for choice in known]
    start = heaviest(used, follows(resources.names))[0]
    start = (
        start if near is None else start + (1 - _FAR) * (near - start)
    )  # at the edge most choices are free, and tables large
    if exact_work(resources.problem) <= MUCH_WORK:
        return _climbed(resources, least.of, used, start)
    likely = _climbed(resources, least.roughly, used, start)
    hoped = likely.seconds if likely.tried else math.inf
    proved = _climbed(resources, least.of, used, likely.weights, hoped)
    return replace(proved, tried=(*likely.tried, *proved.tried))


def _climbed(
    resources: StepResources,
    least: Callable[[Floats], Near | None],
    used: list[Floats],
    weights: Floats,
    hoped: float = math.inf,
) -> StepBound:
    """Climb from these weights towards those for which the plans so far occupy most, as far as it goes up, or almost to
    what is `hoped` for. `used`: of the plans so far, to which it adds those that it finds."""
    allowed, best_weights, best = follows(resources.names), weights, 0.0
    tried: list[tuple[Floats, Choice]] = []
    for _ in range(ROUNDS):
        near = least(weights)
        if near is None:
            break
        tried.append((weights, near.choice))
        bound = near.value + float(weights @ resources.constants)
        if bound > best:
            best, best_weights = bound, weights
        used.append(resources.least_used(near.choice))
        far, most = heaviest(used, allowed)
        if most <= best * (1 + ROUGHLY) or best >= hoped * (1 - ROUGHLY):
            break
        weights = (best_weights + far) / 2  # half of the way: the plans known so far say little far from their weights
    return StepBound(best, best_weights, tuple(tried))


class _Least:
    """The least by weights. What turns out too large for one is not tried for the next: tables differ in prices."""

    def __init__(self, resources: StepResources, cut: Collection[int]) -> None:
        self.resources, self.contents = resources, Contents(resources.problem)
        coarser = resources.cut_off(cut)
        self.forms = [resources] if coarser is resources else [resources, coarser]  # those whose tables may fit
        self.likely = False  # whether that was asked of the first of two

    def of(self, weights: Floats) -> Near | None:
        """The minimum, as long as its tables take no more than messages would; else a bound by these, with a plan near;
        None where time is over."""
        minimum = self._minimum(weights)
        return None if minimum is None else Near(minimum.bound, minimum.choice)

    def _minimum(self, weights: Floats) -> Minimum | None:
        while (problem := self.form(weights)) is not None:
            self.contents.also(problem)
            budget = hub_relaxation.as_messages(problem, SOON_ENTRIES)
            minimum = attempt(minimum_within, problem, self.contents, budget_entries=budget)
            if minimum is not None:
                return minimum
            del self.forms[0]
        problem = self.resources.bounding(weights)
        return attempt(hub_relaxation.bounded, Incumbent(problem), Clock())

    def form(self, weights: Floats) -> Problem | None:
        """Problem of the first form whose tables may fit, estimated before choices are left out: that takes a while,
        and does not help where tables are far too large."""
        while self.forms:
            problem = self.forms[0].bounding(weights)
            if len(self.forms) == 1 or self.likely:
                return problem
            self.contents.also(problem)
            budget = FORESEEN * hub_relaxation.as_messages(problem, SOON_ENTRIES)
            self.likely = not attempt(out_of_reach, problem, self.contents, budget)
            if self.likely:
                return problem
            del self.forms[0]
        return None

    def roughly(self, weights: Floats) -> Near | None:
        """A plan near the least, no bound; None where nothing repeats, or time is over."""
        problem = self.form(weights)
        return None if problem is None else attempt(solve_top_k, problem, SOON_ENTRIES)


def heaviest(used: Sequence[Floats], allowed: NDArray[np.bool_]) -> tuple[Floats, float]:
    """The weights, 1 together in each phase, for which the least mean of these plans is largest, and that mean.

    `used`: of each plan the seconds of the resources of the forward, then those of the backward. `allowed`: the pairs
    of them that may have weight.
    """
    sums = pair_seconds(np.array(used))[:, allowed].T  # (a resource of each phase, plans)
    scale = float(sums.max()) or 1.0
    prices, _, value = mixture(np.zeros(len(used)), sums / scale, np.zeros(len(sums)), 1.0)
    total = float(prices.sum())
    pairs = np.zeros(allowed.shape)
    pairs[allowed] = prices / total if total > 0 else 1 / len(sums)
    return np.concatenate([pairs.sum(axis=1), pairs.sum(axis=0)]), value * scale


class StepSearch:
    """Plans and the bound of one formulation, whatever memory they need. `plans`: those so far, (name, choice).

    `used`: of each what it roughly occupies."""

    def __init__(self, formulation: Formulation, clock: Clock | None = None, *, fused: bool = False) -> None:
        self.clock = clock or Clock()
        free = replace(formulation, problem=replace(formulation.problem, capacity_bytes=float("inf")))
        self.formulation, self.problem = free, free.problem
        self.resources = step_resources(free, fused=fused)
        self.shares = ReaderShares(self.problem)
        self.sketched = exact_work(self.problem) > MUCH_WORK
        self.by_shares = True  # until their tables turn out too large, whatever the prices
        self.weights = in_a_row(self.resources)
        self.plans: list[tuple[str, Choice]] = []
        self.used: list[Floats] = []
        self.bounded: StepBound | None = None
        self.leading = self.resources  # what the bound is made of

    def first(self) -> Choice | None:
        """The plan that takes least by the estimate, of what is in a row and of what the plans so far occupy most; None
        where tables are too large, or there is no time for them."""
        if self._next("shortest critical path", FIRST) is None:
            return None
        for _ in range(EACH):
            far = heaviest(self.used, follows(self.resources.names))[0]
            self.weights = self.weights + _FAR * (far - self.weights)
            if attempt(self._next, self._name(), EACH) is None:
                break
        return self.plans[self._ranked()[0]][1]

    def others(self) -> Iterator[tuple[str, Choice]]:
        """(name, choice): the others so far that seem near the best, the least sum of costs and of a part of them, the
        best between two, and the least of the bound's weights."""
        self._solved("minimum sum of costs", self.problem, EACH)
        between = self._between()
        if between is not None:
            self._take("between two of them", between)
        weights = self.weights, in_a_row(self.resources)
        for name, weighting, added in zip(
            ("least use of bottlenecks, and costs", "critical path, and costs"), weights, _ADDED, strict=True
        ):
            self._solved(name, self.resources.likely(weighting, added), EACH)
        yield from self._hopeful()
        yield from self._of_bound()

    def _hopeful(self) -> list[tuple[str, Choice]]:
        """Plans worth simulating: the shortest by the estimate first, then by the middle between the estimate and the
        sum of costs. A step lies between these; with many axes, little of what may overlap does."""
        longest = [self.resources.longest(used) for used in self.used]
        middle = [step + objective(self.problem, choice) for step, (_, choice) in zip(longest, self.plans, strict=True)]
        hopeful = [i for i in self._ranked() if longest[i] <= _HOPEFUL * min(longest)]
        distinct = {self.plans[i][1]: i for i in sorted(range(len(middle)), key=lambda i: -middle[i])}
        likely = [i for i in reversed(distinct.values()) if middle[i] <= _LIKELY * min(middle)]
        return [self.plans[i] for i in dict.fromkeys([*hopeful, *likely[:MOST_LIKELY]])]

    def _ranked(self) -> list[int]:
        """Indices into `plans`, the shortest by the estimate first."""
        return sorted(range(len(self.plans)), key=lambda i: self.resources.longest(self.used[i]))

    def bound(self, known: Sequence[Choice]) -> StepBound:
        """Begun with the resources that the plans `known` occupy most."""
        if self.bounded is None:
            self.leading = self._leading(known)
            count, more = len(self.resources.names), len(self.leading.names) - len(self.resources.names)
            near = np.concatenate([np.append(part, np.zeros(more)) for part in np.split(self.weights, [count])])
            self.bounded = step_bound(self.leading, known, near, self.shares.cut)
        return self.bounded

    def _leading(self, known: Sequence[Choice]) -> StepResources:
        """Resources with the turns from the host to the device of the shortest plans `known`."""
        order = sorted(known, key=lambda choice: self.resources.longest(self.resources.roughly_used(choice)))
        return with_leads(self.resources, self.formulation, order[:EACH])

    def _of_bound(self) -> Iterator[tuple[str, Choice]]:
        """The least plans of the bound's weights, those that are near the best so far by the estimate."""
        longest = min(map(self.resources.longest, self.used), default=math.inf)
        tried = dict.fromkeys(tuple(choice) for _, choice in self.bound([c for _, c in self.plans]).tried)
        used = {choice: self.resources.longest(self.resources.roughly_used(choice)) for choice in tried}
        near = sorted((seconds, choice) for choice, seconds in used.items() if seconds <= _HOPEFUL * longest)
        for _, choice in near[:EACH]:
            self._take("least of the bound's weights", choice)
            yield self.plans[-1]

    def _next(self, name: str, rounds: int) -> Choice | None:
        return self._solved(name, self.resources.likely(self.weights), rounds)

    def _solved(self, name: str, problem: Problem, rounds: int) -> Choice | None:
        state = Incumbent(problem)
        try:
            self.by_shares = self.by_shares and self.shares.search(state, rounds, ROUGHLY, sketched=self.sketched)
            if not self.by_shares:
                if self.clock.over:
                    return None
                state.offer(solve(problem, "auto", Options(self.clock, rough=True)).choice)
        except InfeasibleError as error:
            if not error.proven:
                return None
            raise
        if state.choice is None:
            return None
        self._take(name, state.choice)
        return state.choice

    def _take(self, name: str, choice: Choice) -> None:
        self.plans.append((name, choice))
        self.used.append(self.resources.roughly_used(choice))

    def _name(self) -> str:
        """`least use of bottlenecks, mostly host forward, computation backward`, by phase."""
        count = len(self.resources.names)
        forward, backward = (
            self.resources.names[int(part.argmax())] for part in (self.weights[:count], self.weights[count:])
        )
        most = forward if backward == forward else f"{forward} forward, {backward} backward"
        return f"least use of bottlenecks, mostly {most}"

    def _between(self) -> Choice | None:
        """The best by the estimate of those that follow one plan up to a place and another after it."""
        ranked = self._ranked()[:2]
        if len(ranked) < 2:
            return None
        first, second = (self.plans[i][1] for i in ranked)
        mixed = [
            (self.resources.longest(self.resources.roughly_used(choice)), choice)
            for _, choice in mixtures(self.problem, first, second, CUTS)
        ]
        best = min(mixed, default=None)
        return best[1] if best is not None and best[0] < self.resources.longest(self.used[ranked[0]]) else None
