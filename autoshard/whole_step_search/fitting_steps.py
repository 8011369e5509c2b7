"""One outer choice: the best plans of its stages, and the best of these that fits as it is simulated.

A stage problem adds a block's working memory to all that is kept, and counts what several chunks keep as their mean.
With one stage the exact plan replaces its plan if it may be better; with several, if a plan holds more than there is,
the room is reduced by as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.simulation.step_timeline import simulate_step
from autoshard.solvers.common.effort import LOOSE, ROUNDS
from autoshard.solvers.common.result import fits
from autoshard.solvers.stages.one_stage import RunningBlock, fastest_points, least_peak
from autoshard.solvers.stages.room_bound import RoomBound
from autoshard.solvers.stages.stage_partition import solve_stages
from autoshard.solvers.stages.stage_problem import Front, Part, StagePlan, closed_form
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.solved_steps import SolvedStep
from autoshard.whole_step_search.step_costs import StepProblem

Plans = Iterable[StagePlan | None]


def fitting_step(
    problem: StepProblem, split: BlockSplit | None, plans_of: Callable[[StepProblem], Plans], level: int
) -> SolvedStep | None:
    """The best plan that fits as it is simulated: of those that `plans_of` makes of the problem, and of it with less
    room, until one of them fits; else the first plan; None without any."""
    tightened, first, fitting = problem, None, list[SolvedStep]()
    for attempt in range(ROUNDS):
        plans = [plan for plan in dict.fromkeys(plans_of(tightened)) if plan is not None]
        costed = [(plan, problem.step_costs(plan)) for plan in plans]
        if not costed:
            break
        for plan, costs in costed:
            if fits(problem.fullest_bytes(costs.peak_bytes), problem.capacity_bytes):
                fitting.append(SolvedStep(problem, split, plan, simulate_step(costs)))
        over = np.maximum(np.array(costed[0][1].peak_bytes) - problem.capacities, 0.0)
        if not over.any():
            break
        first = first or SolvedStep(problem, split, plans[0], simulate_step(costed[0][1]))
        tightened = replace(tightened, withheld_bytes=tightened.withheld_bytes + over * 2**attempt)
    return min(fitting, key=lambda step: (step.value(level), step.seconds), default=first)


def best_stages(problem: StepProblem) -> StagePlan | None:
    """The fastest plan by the closed form; None if there is none. If no plan of several stages fits by the stage
    problem's count, one that fits by what is surely held: the simulated step decides whether it fits."""
    plan = solve_stages(problem.stage_problem, LOOSE)
    if not _is_one(problem):
        return plan or solve_stages(problem.bounding, LOOSE)
    several = problem.choice.micro_batches > 1  # then the form counts no less than is held
    if several and plan and plan.seconds * (1 - LOOSE) <= RoomBound(problem.bounding).form_seconds:
        return plan
    points = least_points(problem, [curve.front for curve in problem.fronts])
    return plan if points is None else one_stage(problem, points)


def one_stage(problem: StepProblem, points: tuple[int, ...]) -> StagePlan:
    parts = (Part(0, 0, 0, len(problem.kinds)),)
    return StagePlan(parts, points, closed_form(problem.stage_problem, parts, points))


def least_points(problem: StepProblem, fronts: Sequence[Front]) -> tuple[int, ...] | None:
    """Points, by kind, of the one-stage plan with the least seconds of these `fronts` that fits as it is simulated;
    None if none fits, too many plans would have to be followed, or there are more stages."""
    if not _is_one(problem):
        return None
    blocks, always = _running(problem, fronts)
    return fastest_points(blocks, problem.capacity_bytes - always)


def one_stage_bytes(problem: StepProblem) -> float:
    """Bytes held by the one-stage plan that holds least, and those withheld; infinite with more stages, or if too many
    plans would have to be followed."""
    if not _is_one(problem):
        return np.inf
    blocks, always = _running(problem, [curve.front for curve in problem.fronts])
    return always + least_peak(blocks)


def _is_one(problem: StepProblem) -> bool:
    everywhere = problem.allowed is None or bool(problem.allowed.all())
    return problem.choice.stages == 1 and float(problem.live[0]) == 1 and everywhere


def _running(problem: StepProblem, fronts: Sequence[Front]) -> tuple[list[RunningBlock], float]:
    """Blocks along the line, with seconds of `fronts` for a micro-batch and a share of the tail's, and the bytes held
    in any case. With a single micro-batch the gradients of a block, and of those after it, are held while it runs."""
    fresh = [problem.fresh_bytes(block) for block in range(len(problem.kinds))]
    grad_bytes, blocks = sum(fresh), []
    for block, kind in enumerate(problem.kinds):
        front = fronts[kind]
        working = np.array([problem.working_bytes(block, point) for point in range(front.points)])
        seconds = front.seconds + front.tail_seconds / problem.choice.micro_batches
        blocks.append(RunningBlock(seconds, front.saved_bytes, working + grad_bytes))
        grad_bytes -= fresh[block]
    always = sum(problem.always_bytes(block) for block in range(len(problem.kinds)))
    return blocks, always + float(np.max(problem.withheld_bytes))
