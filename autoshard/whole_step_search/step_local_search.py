"""Plans near one that was found, of the same outer choice, by their simulated steps: a block to the stage beside it, a
block at another point, two blocks of a stage at each other's.

Stages are cut by a closed form, which is exact for equal stages alone, and by a count of memory that is never too
little: with few micro-batches, few blocks on a stage or a nearly full device another cut may be faster by a fifth, or
the only one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autoshard.simulation.step_timeline import StepCosts, StepTimeline, simulate_step
from autoshard.solvers.common.result import fits
from autoshard.solvers.stages.counted_points import undominated
from autoshard.solvers.stages.range_costs import parts_of
from autoshard.solvers.stages.stage_problem import Part, StagePlan, closed_form
from autoshard.units import ROUNDING
from autoshard.whole_step_search.point_reassignment import reassigned_points
from autoshard.whole_step_search.solved_steps import SolvedStep
from autoshard.whole_step_search.step_costs import StepProblem

NEAR = 0.8  # plans near one that takes so much less than the best are not looked at
EFFORT = 1_500_000  # slots that may be simulated, a block's costs counted as so many:
_OF_BLOCK = 20


Known = Callable[[StepProblem, StagePlan, StepCosts], float]


class StepRank(NamedTuple):
    """Bytes of all stages that are too many; of what is minimised as much as is known before a step is simulated;
    seconds. The less, the better, the first before the others."""

    over: float
    known: float
    seconds: float

    def may_be_better(self, over: float, known: float) -> bool:
        return over < self.over or (over == self.over and known <= self.known * (1 + ROUNDING))

    def is_better(self, other: StepRank) -> bool:
        """`other` than this one."""
        if other.over != self.over:
            return other.over < self.over
        return other.known < self.known * (1 - ROUNDING) or other.seconds < self.seconds * (1 - ROUNDING)


class StepLocalSearch:
    """Looks around plans as long as its effort lasts. `known`: of what is minimised, before a step is simulated."""

    def __init__(self, known: Known = lambda problem, plan, costs: 0.0) -> None:
        self.left, self.known = EFFORT, known

    def best(self, found: SolvedStep) -> SolvedStep:
        """A step that fits and is better than `found`, or fits where that does not; else `found`."""
        problem, costs = found.problem, found.timeline.costs
        value = StepRank(_over(problem, costs), self.known(problem, found.plan, costs), found.seconds)
        better = True
        while better and self.left > 0:
            better = False
            for plan in _neighbours(problem, found.plan):
                made = self._better(problem, plan, value)
                if made is not None:
                    (value, timeline), better = made, True
                    found = replace(found, plan=plan, timeline=timeline)
                    break
                if self.left <= 0:
                    break
        return found

    def _better(self, problem: StepProblem, plan: StagePlan, value: StepRank) -> tuple[StepRank, StepTimeline] | None:
        """Where it is better than `value`."""
        self.left -= _OF_BLOCK * len(problem.kinds)
        costs = problem.step_costs(plan)
        over, known = _over(problem, costs), self.known(problem, plan, costs)
        if not value.may_be_better(over, known):
            return None
        self.left -= len(costs.sequence.slots)
        timeline = simulate_step(costs)
        made = StepRank(over, min(known, value.known) if over == value.over else known, timeline.step_seconds)
        return (made, timeline) if value.is_better(made) else None


def _over(problem: StepProblem, costs: StepCosts) -> float:
    """Bytes of all stages that are too many."""
    if fits(problem.fullest_bytes(costs.peak_bytes), problem.capacity_bytes):
        return 0.0
    return float(np.maximum(np.array(costs.peak_bytes) - problem.capacities, 0.0).sum())


def _neighbours(problem: StepProblem, plan: StagePlan) -> Iterator[StagePlan]:
    for parts in _other_cuts(problem, plan):
        yield from _dealt(problem, replace(plan, parts=parts))
    run = problem.kinds[problem.stage_problem.run[0]]
    for block, points in _other_points(problem, plan):
        made = _of(problem, plan.parts, points)
        yield made
        if problem.kinds[block] != run:
            yield from _dealt(problem, made)


def _of(problem: StepProblem, parts: tuple[Part, ...], points: tuple[int, ...]) -> StagePlan:
    return StagePlan(parts, points, closed_form(problem.stage_problem, parts, points))


def _dealt(problem: StepProblem, plan: StagePlan) -> list[StagePlan]:
    """`plan` of other cuts as it is, and with points chosen for these cuts."""
    own = _of(problem, plan.parts, plan.points)
    other = reassigned_points(problem, own)
    return [own, other] if other and other != own else [own]


def _by_bytes(problem: StepProblem) -> list[list[int]]:
    """By kind: the points of which none is worse than another, the leanest first."""
    return [undominated(own.front.seconds, own.front.kept_bytes).tolist() for own in problem.fronts]


def _other_cuts(problem: StepProblem, plan: StagePlan) -> Iterator[tuple[Part, ...]]:
    """A block of each chunk from one stage to another, and with it one of each stage between to the next; near stages
    first."""
    own, stages = problem.stage_problem, problem.choice.stages
    start, stop = own.run if own.chunks > 1 else (0, len(own.line))
    first = [part for part in plan.parts if part.chunk == 0]
    sizes = [min(part.stop, stop) - max(part.first, start) for part in first]
    for apart in range(1, stages):
        for giver, taker in (pair for s in range(stages - apart) for pair in ((s, s + apart), (s + apart, s))):
            other = list(sizes)
            other[giver] -= 1
            other[taker] += 1
            if not other[giver]:
                continue
            cuts = [0, *(start + own.chunks * np.cumsum(other)[:-1]).tolist(), len(own.line)]
            parts = parts_of(own, cuts)
            if own.allowed is None or all(own.allowed[part.stage, part.first : part.stop].all() for part in parts):
                yield tuple(parts)


def _other_points(problem: StepProblem, plan: StagePlan) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(block, points): one block at the next point, or two of a kind and stage at each other's."""
    points, ranked = list(plan.points), _by_bytes(problem)
    stage_of = [part.stage for part in plan.parts for _ in range(part.first, part.stop)]
    for block, kind in enumerate(problem.kinds):
        place = ranked[kind].index(points[block]) if points[block] in ranked[kind] else 0
        for other in ranked[kind][max(0, place - 1) : place + 2]:
            if other != points[block]:
                yield block, (*points[:block], other, *points[block + 1 :])
    for block, kind in enumerate(problem.kinds):
        for other in range(block + 1, len(points)):
            alike = problem.kinds[other] == kind and stage_of[other] == stage_of[block]
            if alike and points[other] != points[block]:
                points[block], points[other] = points[other], points[block]
                yield block, tuple(points)
                points[block], points[other] = points[other], points[block]


def nearby_steps(found: list[SolvedStep], level: int, known: Known) -> list[SolvedStep]:
    """What fits of `found`, better ones near them in their place, and what fits near the others. The best are looked at
    first."""
    search, best = StepLocalSearch(known), min((own.value(level) for own in found if own.fits), default=np.inf)
    made = []
    for own in sorted(found, key=lambda own: own.value(level)):
        looked = search.best(own) if own.value(level) * NEAR < best and search.left > 0 else own
        if looked.fits:
            made.append(looked)
            best = min(best, looked.value(level))
    return made
