"""Level 1 of whole steps: the plan whose fullest device holds least, of equal ones the fastest found.

Outer choices best first by what their fullest stage must hold: with several chunks only blocks of the run that is dealt
out count what they keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.search.objectives import MEMORY
from autoshard.simulation.step_timeline import simulate_step
from autoshard.solvers.common.effort import ROUNDS
from autoshard.solvers.common.result import fits
from autoshard.solvers.stages.least_held import least_bytes
from autoshard.solvers.stages.stage_problem import StageProblem
from autoshard.units import ROUNDING, format_bytes
from autoshard.whole_step_search.blocks.block_line import BlockLine
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.config_space import RejectedConfigs
from autoshard.whole_step_search.fitting_steps import fastest_step
from autoshard.whole_step_search.solved_steps import (
    JointResult,
    SolvedStep,
    best_of_each,
    best_stages,
    none_fits,
    one_stage_bytes,
)
from autoshard.whole_step_search.step_costs import StepProblem


def leanest_of(
    problems: Iterable[tuple[StepProblem, BlockSplit | None]],
    line: BlockLine,
    log: RejectedConfigs,
    count: int,
    fronts: int,
    tell: Callable[[str], None],
) -> JointResult:
    """InfeasibleError where none fits."""
    every = list(problems)
    heap = [(_share(problem), number, False) for number, (problem, _) in enumerate(every)]
    heapify(heap)
    found: list[SolvedStep] = []
    least, bound, solved = np.inf, np.inf, 0
    while heap and heap[0][0] <= min(least, every[heap[0][1]][0].capacity_bytes) * (1 + ROUNDING):
        own, number, exact = heappop(heap)
        problem, split = every[number]
        if not exact:
            least_held = least_bytes(problem.bounding, _beside(problem, problem.bounding))
            heappush(heap, (max(least_held, problem.one_stage_least_bytes), number, True))
            continue
        solved += 1
        bound = min(bound, own)
        made = _leanest(problem, split) or fastest_step(problem, split, best_stages(problem), np.inf)
        if made is not None:
            found.append(made)
            least = min(least, made.peak_bytes)
            tell(f"{problem.choice}: {format_bytes(made.peak_bytes)}")
    if not found:
        raise none_fits([problem for problem, _ in every])
    ranked = best_of_each(found, lambda own: (own.peak_bytes, own.seconds))
    return JointResult(
        ranked[0], tuple(ranked[1 : count + 1]), line, 0.0, ranked[0].plan.seconds, 0.0, len(every), solved,
        len(found), fronts, tuple(log.reasons.items()), MEMORY, float(min(bound, ranked[0].peak_bytes)),
    )  # fmt: skip


def _leanest(problem: StepProblem, split: BlockSplit | None) -> SolvedStep | None:
    """The fastest plan that holds no more than the least of its outer choice. Where a stage holds more as it is
    simulated than there is, as much less room is taken to be there."""
    own = problem
    for attempt in range(ROUNDS):
        room = one_stage_bytes(own)
        if not np.isfinite(room):
            room = least_bytes(own.stage_problem, _beside(own, own.stage_problem))
        if room > own.capacity_bytes * (1 + ROUNDING):
            return None
        leaner = replace(own, capacity_bytes=room * (1 + ROUNDING))
        solution = best_stages(leaner)
        if solution is None:
            return None
        steps = [simulate_step(problem.step_costs(plan)) for plan in solution.plans]
        pairs = zip(solution.plans, steps, strict=True)
        made = [SolvedStep(problem, split, plan, solution, step) for plan, step in pairs]
        fitting = [step for step in made if fits(step.peak_bytes, problem.capacity_bytes)]
        if fitting:
            return min(fitting, key=lambda step: (step.peak_bytes, step.seconds))
        over = np.maximum(np.array(steps[0].peak_bytes) - problem.capacity_bytes, 0.0)
        own = replace(own, withheld_bytes=own.withheld_bytes + over * 2**attempt)
    return None


def _beside(problem: StepProblem, counted: StageProblem) -> Floats:
    """What a stage holds beside its blocks."""
    return problem.capacity_bytes - counted.capacity_bytes


def _share(problem: StepProblem) -> float:
    """Below what the fullest stage holds: an equal share of the leanest."""
    own = problem.bounding
    sizes = [[float(points.min()) for points in own.point_bytes(stage)] for stage in range(own.stages)]
    each: Floats = np.min(sizes, axis=0)
    return sum(float(each[kind]) for kind in own.line) / own.stages + float(_beside(problem, own).min())
