"""Objectives of the levels of a whole step, and how an outer choice's best step is found: a row of OBJECTIVES each.

0 `ratio`   what devices communicate and recompute: a sum over blocks and stage boundaries, so that its least within the
            memory of stages is found exactly (step_overhead.py)
1 `memory`  what the fullest device holds: the fastest plan that holds no more than the least of its outer choice
2 `speed`   the simulated step: stages by their closed form, exactly
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.search.objectives import MEMORY, RATIO, SPEED
from autoshard.solvers.stages.least_held import least_bytes
from autoshard.solvers.stages.room_bound import RoomBound
from autoshard.solvers.stages.stage_partition import certificate
from autoshard.solvers.stages.stage_problem import StagePlan, StageProblem, closed_form
from autoshard.solvers.stages.stage_values import solve_sum
from autoshard.units import ROUNDING, format_bytes, format_seconds
from autoshard.whole_step_search.best_first import Bound, Objective, OuterChoice
from autoshard.whole_step_search.fitting_steps import (
    best_stages,
    fitting_step,
    least_points,
    one_stage,
    one_stage_bytes,
)
from autoshard.whole_step_search.point_reassignment import reassigned_points
from autoshard.whole_step_search.solved_steps import SolvedStep
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_overhead import mean_seconds, overhead_fronts, overhead_of, with_overhead

FAR = 0.9  # the closed form is at most this much above the simulated step


# --- level 2 ---


def _any_order(choice: OuterChoice) -> float:
    """Lower bound on every step, whatever memory there is."""
    return choice.problem.any_order_least


def _room(choice: OuterChoice) -> RoomBound:
    """Bound on every plan that fits as it is simulated."""
    return RoomBound(choice.problem.bounding)


def _roomed(choice: OuterChoice) -> float:
    """Lower bound on every step that fits."""
    return choice.once(_room).step_seconds


def _form(choice: OuterChoice) -> float:
    """Lower bound on steps of plans that fit by `best_stages`' count of memory, with slack for its closed form."""
    room = choice.once(_room)
    counted = room if choice.problem.choice.stages == 1 else RoomBound(choice.problem.stage_problem)
    form = counted if np.isfinite(counted.slowest_seconds) else room
    return max(room.step_seconds, form.form_seconds * FAR)


def _fastest(choice: OuterChoice, best: float) -> SolvedStep | None:
    def plans(problem: StepProblem) -> Iterator[StagePlan | None]:
        plan = best_stages(problem)
        if plan is not None and plan.seconds * FAR < best:
            yield from (plan, reassigned_points(problem, plan))

    return fitting_step(choice.problem, choice.split, plans, SPEED)


def _in_any_order(best: float) -> Sequence[Bound]:
    return _any_order, _roomed, lambda choice: certificate(choice.problem.bounding, best)


# --- level 1 ---


def _shared_bytes(choice: OuterChoice) -> float:
    """Lower bound on what the fullest stage holds: an equal share of the leanest blocks."""
    problem = choice.problem.bounding
    sizes = [[float(points.min()) for points in problem.point_bytes(stage)] for stage in range(problem.stages)]
    each: Floats = np.min(sizes, axis=0)
    share = sum(float(each[kind]) for kind in problem.line) / problem.stages
    return _within(choice.problem, share + float(_beside(choice.problem, problem).min()))


def _held_bytes(choice: OuterChoice) -> float:
    """Lower bound on what the fullest stage holds, exactly by what each stage surely holds: with several chunks only
    blocks of the run that is split over stages count what they keep."""
    problem = choice.problem
    held = least_bytes(problem.bounding, _beside(problem, problem.bounding))
    return _within(problem, max(held, problem.one_stage_least_bytes))


def _within(problem: StepProblem, size: float) -> float:
    return size if size <= problem.capacity_bytes * (1 + ROUNDING) else np.inf


def _beside(problem: StepProblem, counted: StageProblem) -> Floats:
    """Bytes that a stage holds in addition to its blocks."""
    return problem.capacity_bytes - counted.capacity_bytes


def _leanest(choice: OuterChoice, best: float) -> SolvedStep | None:
    return fitting_step(choice.problem, choice.split, _leanest_plans, MEMORY)


def _leanest_plans(problem: StepProblem) -> list[StagePlan | None]:
    """The fastest plan that holds no more than the least possible, or than the capacity if that is lower."""
    room = one_stage_bytes(problem)
    if not np.isfinite(room):
        room = least_bytes(problem.stage_problem, _beside(problem, problem.stage_problem))
    leaner = replace(problem, capacity_bytes=min(room * (1 + ROUNDING), problem.capacity_bytes))
    return [best_stages(leaner) or best_stages(problem)]


# --- level 0 ---


def _overhead_bound(choice: OuterChoice) -> float:
    """Lower bound on the overhead of every plan, whatever memory there is."""
    problem = choice.problem
    owns, count = problem.once(overhead_fronts), problem.choice.micro_batches
    least = [float((front.seconds + front.tail_seconds / count).min()) for front in owns]
    counted = problem.stage_problem
    sent = sum(sum(counted.sends(stage)) for stage in range(counted.stages)) * counted.send_seconds
    return mean_seconds(problem, sum(least[kind] for kind in problem.kinds) + sent) * (1 - ROUNDING)


def _fitting_overhead(choice: OuterChoice) -> float:
    """Lower bound on the overhead of every plan that fits as it is simulated."""
    problem = choice.problem
    roomy = replace(problem, capacity_bytes=problem.capacity_bytes * (1 + ROUNDING))
    solution = solve_sum(with_overhead(roomy, roomy.bounding), _entering(problem))
    if solution is None:
        return np.inf
    points = least_points(roomy, roomy.once(overhead_fronts))
    exact = overhead_of(roomy, one_stage(roomy, points)) if points else 0.0
    return max(mean_seconds(problem, solution[0]), exact) * (1 - ROUNDING)


def _least_overhead(choice: OuterChoice, best: float) -> SolvedStep | None:
    return fitting_step(choice.problem, choice.split, _least_plans, RATIO)


def _least_plans(problem: StepProblem) -> list[StagePlan | None]:
    """Plans of the least overhead: on one stage by what it holds exactly; else of those that fit by the count of
    `stage_problem`, and of all that may fit; if none may, the fastest."""
    points = least_points(problem, problem.once(overhead_fronts))
    if points is not None:
        return [one_stage(problem, points)]
    each = (problem.stage_problem, problem.bounding)
    solved = (solve_sum(with_overhead(problem, counted), _entering(problem)) for counted in each)
    return [_timed(problem, solution[1]) for solution in solved if solution] or [best_stages(problem)]


def _timed(problem: StepProblem, plan: StagePlan) -> StagePlan:
    return replace(plan, seconds=closed_form(problem.stage_problem, plan.parts, plan.points))


def _entering(problem: StepProblem) -> Floats:
    """Seconds to send what enters each block, and its gradient back."""
    return np.array([2 * problem.received_seconds(block) for block in range(len(problem.kinds))])


OBJECTIVES: Sequence[Objective] = (  # by level
    Objective(
        level=RATIO,
        known=lambda problem, plan, costs: overhead_of(problem, plan),
        bounds=(_overhead_bound, _fitting_overhead),
        proofs=lambda best: (_overhead_bound, _fitting_overhead),
        solved=_least_overhead,
        text=format_seconds,
    ),
    Objective(
        level=MEMORY,
        known=lambda problem, plan, costs: problem.fullest_bytes(costs.peak_bytes),
        bounds=(_shared_bytes, _held_bytes),
        proofs=lambda best: (_shared_bytes, _held_bytes),
        solved=_leanest,
        text=format_bytes,
    ),
    Objective(
        level=SPEED,
        known=lambda problem, plan, costs: 0.0,
        bounds=(_any_order, _form),
        proofs=_in_any_order,
        solved=_fastest,
        text=format_seconds,
    ),
)
