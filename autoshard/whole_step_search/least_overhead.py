"""Level 0 of whole steps: the plan that communicates and does again least, of equal ones the fastest found.

Outer choices best first by a bound; the rest of a plan is a sum over blocks and cuts, so that its least within the
memory of stages is found exactly, of plans that surely fit and of all that may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.search.objectives import RATIO
from autoshard.simulation.step_timeline import simulate_step
from autoshard.solvers.common.effort import ROUNDS
from autoshard.solvers.stages.stage_partition import StageSolution, solve_stages
from autoshard.solvers.stages.stage_problem import Front, Part, StagePlan, closed_form
from autoshard.solvers.stages.stage_values import solve_sum
from autoshard.units import ROUNDING, format_seconds
from autoshard.whole_step_search.blocks.block_line import BlockLine
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.config_space import RejectedConfigs
from autoshard.whole_step_search.solved_steps import JointResult, SolvedStep, best_of_each, least_points, none_fits
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_local_search import StepLocalSearch
from autoshard.whole_step_search.step_overhead import mean_seconds, overhead_fronts, overhead_of, with_overhead


def least_overhead_of(
    problems: Iterable[tuple[StepProblem, BlockSplit | None]],
    line: BlockLine,
    log: RejectedConfigs,
    count: int,
    fronts: int,
    tell: Callable[[str], None],
) -> JointResult:
    """InfeasibleError where none fits."""
    every = list(problems)
    heap = [(_fastest(problem), number, False) for number, (problem, _) in enumerate(every)]
    heapify(heap)
    found: list[SolvedStep] = []
    least, bound, solved = np.inf, np.inf, 0
    while heap and heap[0][0] <= least * (1 + ROUNDING):
        own, number, exact = heappop(heap)
        problem, split = every[number]
        if not exact:
            heappush(heap, (max(own, overhead_bound(problem)), number, True))
            continue
        if own == np.inf:
            break
        solved += 1
        bound = min(bound, own)
        made = least_overhead(problem, split)
        if made is not None:
            found.append(made)
            least = min(least, made.rest_seconds)
            tell(f"{problem.choice}: {format_seconds(made.rest_seconds)}")
    if not found:
        raise none_fits([problem for problem, _ in every])
    ranked = best_of_each(found, lambda own: (own.rest_seconds, own.seconds))
    return JointResult(
        ranked[0], tuple(ranked[1 : count + 1]), line, 0.0, ranked[0].plan.seconds, 0.0, len(every), solved,
        len(found), fronts, tuple(log.reasons.items()), RATIO, 0.0, float(min(bound, ranked[0].rest_seconds)),
    )  # fmt: skip


def _fastest(problem: StepProblem) -> float:
    """Below the rest of every plan, whatever memory there is."""
    owns, count = overhead_fronts(problem), problem.choice.micro_batches
    least = [float((front.seconds + front.tail_seconds / count).min()) for front in owns]
    counted = problem.stage_problem
    sent = sum(sum(counted.sends(stage)) for stage in range(counted.stages)) * counted.send_seconds
    return mean_seconds(problem, sum(least[kind] for kind in problem.kinds) + sent) * (1 - ROUNDING)


def overhead_bound(problem: StepProblem) -> float:
    """Below the rest of every plan that fits as it is simulated; infinite where none does."""
    roomy = replace(problem, capacity_bytes=problem.capacity_bytes * (1 + ROUNDING))
    own = solve_sum(with_overhead(roomy, roomy.bounding), _entering(problem))
    if own is None:
        return np.inf
    points = least_points(roomy, overhead_fronts(roomy))
    exact = overhead_of(roomy, _one_stage(roomy, points)) if points else 0.0
    return max(mean_seconds(problem, own[0]), exact) * (1 - ROUNDING)


def least_overhead(problem: StepProblem, split: BlockSplit | None) -> SolvedStep | None:
    """The least of an outer choice that fits as it is simulated, of those that its count of memory finds, and of plans
    near it that have as little the fastest. Where a stage holds more than there is, as much less room is taken to be
    there."""
    own, found = problem, list[SolvedStep]()
    for attempt in range(ROUNDS):
        plans = _plans(own)
        made = [_made(problem, split, plan) for plan in plans]
        found += [step for step in made if step.peak_bytes <= problem.capacity_bytes]
        if found or not made:
            break
        over = np.maximum(np.array(made[0].timeline.peak_bytes) - problem.capacity_bytes, 0.0)
        own = replace(own, withheld_bytes=own.withheld_bytes + over * 2**attempt)
    if not found:
        return None
    least = min(step.rest_seconds for step in found) * (1 + ROUNDING)
    first = min((step for step in found if step.rest_seconds <= least), key=lambda step: step.seconds)
    return StepLocalSearch(lambda own, plan: overhead_of(own, plan) <= least).fastest(first)


def _plans(problem: StepProblem) -> list[StagePlan]:
    """Plans of the least overhead: on one stage by what it holds exactly; else of all that may fit, and of those that
    do by the count of `stage_problem`."""
    points = least_points(problem, overhead_fronts(problem))
    if points is not None:
        return [_one_stage(problem, points)]
    solved = (
        solve_sum(with_overhead(problem, own), _entering(problem)) for own in (problem.stage_problem, problem.bounding)
    )
    return list(dict.fromkeys([*(own[1] for own in solved if own), *_fastest_of_least(problem)]))


def _fastest_of_least(problem: StepProblem) -> list[StagePlan]:
    """The fastest cut of blocks that all have the least rest that they may, where that fits."""
    counted, least = problem.stage_problem, []
    for own, front in zip(overhead_fronts(problem), counted.fronts, strict=True):
        rest = own.seconds + own.tail_seconds / counted.micro_batches
        least.append(int(np.lexsort((front.seconds, rest))[0]))
    fronts = tuple(_only(front, point) for front, point in zip(counted.fronts, least, strict=True))
    found = solve_stages(replace(counted, fronts=fronts))
    return [replace(plan, points=tuple(least[kind] for kind in problem.kinds)) for plan in found.plans] if found else []


def _only(front: Front, point: int) -> Front:
    """With one of its points alone."""
    arrays: dict[str, Any] = {name: own[[point]] for name, own in vars(front).items() if isinstance(own, np.ndarray)}
    return replace(front, **arrays)


def _entering(problem: StepProblem) -> Floats:
    """Seconds of what is sent before each block, its gradient back with it."""
    return np.array([2 * problem.received_seconds(block) for block in range(len(problem.kinds))])


def _one_stage(problem: StepProblem, points: tuple[int, ...]) -> StagePlan:
    parts = (Part(0, 0, 0, len(problem.kinds)),)
    return StagePlan(parts, points, closed_form(problem.stage_problem, parts, points))


def _made(problem: StepProblem, split: BlockSplit | None, plan: StagePlan) -> SolvedStep:
    timed = replace(plan, seconds=closed_form(problem.stage_problem, plan.parts, plan.points))
    solution = StageSolution(problem.stage_problem, (timed,), 0.0)
    return SolvedStep(problem, split, timed, solution, simulate_step(problem.step_costs(timed)))
