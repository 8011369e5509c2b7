"""Local search near a plan, in the same outer choice, by simulated steps: moves a block to the next stage, a block to
another point, or swaps the points of two blocks of a stage.

Stages are split by a closed form, which is exact only for equal stages, and by a count of memory that is never too low:
with few micro-batches, few blocks on a stage or a nearly full device another split may be faster by a fifth, or the
only one that fits.
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
    """Rank of a step, less is better, compared in order: bytes above the limit, of all stages; the objective as far as
    it is known before simulation; seconds."""

    over: float
    known: float
    seconds: float

    def may_be_better(self, over: float, known: float) -> bool:
        return over < self.over or (over == self.over and known <= self.known * (1 + ROUNDING))

    def is_better(self, other: StepRank) -> bool:
        """Is `other` better than this one?"""
        if other.over != self.over:
            return other.over < self.over
        return other.known < self.known * (1 - ROUNDING) or other.seconds < self.seconds * (1 - ROUNDING)


class StepLocalSearch:
    """Searches around plans while its effort lasts. `known`: part of the objective known before a step is simulated."""

    def __init__(self, known: Known = lambda problem, plan, costs: 0.0) -> None:
        self.left, self.known = EFFORT, known

    def best(self, step: SolvedStep) -> SolvedStep:
        """Step that fits and is better than `step`, or fits where `step` does not; else `step`."""
        problem, costs = step.problem, step.timeline.costs
        value = StepRank(_over(problem, costs), self.known(problem, step.plan, costs), step.seconds)
        better = True
        while better and self.left > 0:
            better = False
            for plan in _neighbours(problem, step.plan):
                improved = self._better(problem, plan, value)
                if improved is not None:
                    (value, timeline), better = improved, True
                    step = replace(step, plan=plan, timeline=timeline)
                    break
                if self.left <= 0:
                    break
        return step

    def _better(self, problem: StepProblem, plan: StagePlan, value: StepRank) -> tuple[StepRank, StepTimeline] | None:
        """Rank and timeline of `plan` if it is better than `value`; else None."""
        self.left -= _OF_BLOCK * len(problem.kinds)
        costs = problem.step_costs(plan)
        over, known = _over(problem, costs), self.known(problem, plan, costs)
        if not value.may_be_better(over, known):
            return None
        self.left -= len(costs.sequence.slots)
        timeline = simulate_step(costs)
        rank = StepRank(over, min(known, value.known) if over == value.over else known, timeline.step_seconds)
        return (rank, timeline) if value.is_better(rank) else None


def _over(problem: StepProblem, costs: StepCosts) -> float:
    """Bytes above the limit, summed over stages."""
    if fits(problem.fullest_bytes(costs.peak_bytes), problem.capacity_bytes):
        return 0.0
    return float(np.maximum(np.array(costs.peak_bytes) - problem.capacities, 0.0).sum())


def _neighbours(problem: StepProblem, plan: StagePlan) -> Iterator[StagePlan]:
    for parts in _other_cuts(problem, plan):
        yield from _dealt(problem, replace(plan, parts=parts))
    run = problem.kinds[problem.stage_problem.run[0]]
    for block, points in _other_points(problem, plan):
        neighbour = _of(problem, plan.parts, points)
        yield neighbour
        if problem.kinds[block] != run:
            yield from _dealt(problem, neighbour)


def _of(problem: StepProblem, parts: tuple[Part, ...], points: tuple[int, ...]) -> StagePlan:
    return StagePlan(parts, points, closed_form(problem.stage_problem, parts, points))


def _dealt(problem: StepProblem, plan: StagePlan) -> list[StagePlan]:
    """Plans for the stage boundaries of `plan`: with its points, and with points chosen for these boundaries."""
    recut = _of(problem, plan.parts, plan.points)
    other = reassigned_points(problem, recut)
    return [recut, other] if other and other != recut else [recut]


def _by_bytes(problem: StepProblem) -> list[list[int]]:
    """Points of each kind that no other point dominates, the leanest first."""
    return [undominated(curve.front.seconds, curve.front.saved_bytes).tolist() for curve in problem.fronts]


def _other_cuts(problem: StepProblem, plan: StagePlan) -> Iterator[tuple[Part, ...]]:
    """Parts with a block of each chunk moved to another stage, and one of each stage between to the next; near stages
    first."""
    counted, stages = problem.stage_problem, problem.choice.stages
    start, stop = counted.run if counted.chunks > 1 else (0, len(counted.line))
    first = [part for part in plan.parts if part.chunk == 0]
    sizes = [min(part.stop, stop) - max(part.first, start) for part in first]
    for apart in range(1, stages):
        for giver, taker in (pair for s in range(stages - apart) for pair in ((s, s + apart), (s + apart, s))):
            other = list(sizes)
            other[giver] -= 1
            other[taker] += 1
            if not other[giver]:
                continue
            cuts = [0, *(start + counted.chunks * np.cumsum(other)[:-1]).tolist(), len(counted.line)]
            parts = parts_of(counted, cuts)
            if counted.allowed is None or all(
                counted.allowed[part.stage, part.first : part.stop].all() for part in parts
            ):
                yield tuple(parts)


def _other_points(problem: StepProblem, plan: StagePlan) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Pairs (block, points): one block at the next point, or two of a kind and stage with their points swapped."""
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


def nearby_steps(steps: list[SolvedStep], level: int, known: Known) -> list[SolvedStep]:
    """Steps that fit: `steps`, each replaced by a better one near it if there is one, or by one that fits if it does
    not. The best are searched first."""
    search, best = StepLocalSearch(known), min((step.value(level) for step in steps if step.fits), default=np.inf)
    nearby = []
    for step in sorted(steps, key=lambda step: step.value(level)):
        looked = search.best(step) if step.value(level) * NEAR < best and search.left > 0 else step
        if looked.fits:
            nearby.append(looked)
            best = min(best, looked.value(level))
    return nearby
