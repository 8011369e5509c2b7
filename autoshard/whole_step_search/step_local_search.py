"""Plans near one that was found, of the same outer choice, by their simulated steps: a block to the stage beside it, a
block at another point, two blocks of a stage at each other's.

Stages are cut by a closed form, which is exact for equal stages alone, and by a count of memory that is never too
little: with few micro-batches, few blocks on a stage or a nearly full device another cut may be faster by a fifth, or
the only one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from autoshard.simulation.step_timeline import StepCosts, StepTimeline, simulate_step
from autoshard.solvers.stages.counted_points import undominated
from autoshard.solvers.stages.range_costs import parts_of
from autoshard.solvers.stages.stage_partition import StageSolution
from autoshard.solvers.stages.stage_problem import Part, StagePlan, closed_form
from autoshard.units import ROUNDING
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.point_reassignment import reassigned_points
from autoshard.whole_step_search.solved_steps import SolvedStep
from autoshard.whole_step_search.step_costs import StepProblem

NEAR = 0.8  # plans near one that takes so much less than the best are not looked at
EFFORT = 1_500_000  # slots that may be simulated, a block's costs counted as so many:
_OF_BLOCK = 20


def as_solved(problem: StepProblem, split: BlockSplit | None, solution: StageSolution) -> SolvedStep:
    """The best plan of a solution, whether it fits as it is simulated or not."""
    plan = solution.plans[0]
    return SolvedStep(problem, split, plan, solution, simulate_step(problem.step_costs(plan)))


class StepLocalSearch:
    """Looks around plans as long as its effort lasts, at those that are `allowed`."""

    def __init__(self, allowed: Callable[[StepProblem, StagePlan], bool] = lambda problem, plan: True) -> None:
        self.left, self.allowed = EFFORT, allowed

    def fastest(self, found: SolvedStep) -> SolvedStep:
        """A step that fits and is faster than `found`, or fits where that does not; else `found`."""
        problem = found.problem
        own, timeline = found.plan, found.timeline
        value = _value(problem, timeline)
        better = True
        while better and self.left > 0:
            better = False
            for plan in _neighbours(problem, own):
                made = self._simulated(problem, plan, value)
                if made is not None:
                    own, timeline, better = plan, made, True
                    value = _value(problem, made)
                    break
                if self.left <= 0:
                    break
        return replace(found, plan=own, timeline=timeline)

    def _simulated(self, problem: StepProblem, plan: StagePlan, value: tuple[float, float]) -> StepTimeline | None:
        """Where it is better than `value`."""
        self.left -= _OF_BLOCK * len(problem.kinds)
        if not self.allowed(problem, plan):
            return None
        costs = problem.step_costs(plan)
        if _over(problem, costs) > value[0]:
            return None
        self.left -= len(costs.sequence.slots)
        made = simulate_step(costs)
        over, seconds = _value(problem, made)
        return made if over < value[0] or seconds < value[1] * (1 - ROUNDING) else None


def _value(problem: StepProblem, timeline: StepTimeline) -> tuple[float, float]:
    """(bytes that are too many, seconds): the less, the better."""
    return _over(problem, timeline.costs), timeline.step_seconds


def _over(problem: StepProblem, costs: StepCosts) -> float:
    """Bytes of all stages that are too many."""
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
    """Points anew for other cuts; the leanest where none fit."""
    made = reassigned_points(problem, plan)
    if made:
        return made
    leanest = [own[0] for own in _by_bytes(problem)]
    return [_of(problem, plan.parts, tuple(leanest[kind] for kind in problem.kinds))]


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


def nearby_steps(found: list[SolvedStep], unfit: list[SolvedStep]) -> list[SolvedStep]:
    """`found` with faster ones near them in their place, and of `unfit` what fits near them. The fastest are looked at
    first."""
    search, best = StepLocalSearch(), min((own.seconds for own in found), default=np.inf)
    made = []
    for own in sorted([*found, *unfit], key=lambda own: own.seconds):
        looked = search.fastest(own) if own.seconds * NEAR < best and search.left > 0 else own
        if _value(looked.problem, looked.timeline)[0] == 0:
            made.append(looked)
            best = min(best, looked.seconds)
    return made
