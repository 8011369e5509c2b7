"""The fastest plan of a stage problem that fits as it is simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.search.memory_fit import NEAR
from autoshard.simulation.step_timeline import StepCosts, StepTimeline, simulate_step
from autoshard.solvers.common.effort import LOOSE, ROUNDS
from autoshard.solvers.common.result import fits
from autoshard.solvers.stages.stage_partition import StageSolution
from autoshard.solvers.stages.stage_problem import StagePlan
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.point_reassignment import reassigned_points
from autoshard.whole_step_search.solved_steps import SolvedStep, best_stages
from autoshard.whole_step_search.step_costs import StepProblem

FAR = 0.9  # the closed form is at most this much above the simulated step


def fastest_step(
    problem: StepProblem, split: BlockSplit | None, solution: StageSolution | None, best: float
) -> SolvedStep | None:
    """The fastest of its plans that fits as it is simulated. Where none does as fast as it was solved, a stage is given
    as much less room as it needs more: several chunks of a stage keep more than their mean while one of them runs
    ahead. Between what is too little and what is enough the least is then sought."""
    own, found, room = problem, solution, problem.withheld_bytes
    made: SolvedStep | None = None
    for attempt in range(ROUNDS):
        known = min(best, made.seconds) if made else best
        if solution is None or found is None or found.plans[0].seconds * FAR >= known:
            break
        fastest, first = _fastest_fitting(problem, found)
        if fastest is not None and (made is None or fastest[1].step_seconds < made.seconds):
            made = SolvedStep(problem, split, fastest[0], solution, fastest[1])
        over = np.maximum(np.array(first.peak_bytes) - problem.capacities, 0.0)
        solved = found.plans[0].seconds * (1 + LOOSE) if over.any() else np.inf
        if made is not None and fastest is not None and fastest[0].seconds <= solved:
            return made if attempt == 0 else _with_more_room(made, own.withheld_bytes, room, best)
        room = own.withheld_bytes
        own = replace(own, withheld_bytes=own.withheld_bytes + over * 2**attempt)
        found = best_stages(own)
    return made


def _with_more_room(made: SolvedStep, enough: float | Floats, too_little: float | Floats, best: float) -> SolvedStep:
    """`made` or a faster one that fits: bytes withheld of the stages are bisected. What can't be simulated to less than
    `best` is not: it takes more room."""
    while (np.abs(np.asarray(enough) - too_little) > NEAR * made.problem.capacities).any():
        middle = (np.asarray(enough) + too_little) / 2
        own = replace(made.problem, withheld_bytes=middle)
        found = best_stages(own)
        if found is not None and found.plans[0].seconds * FAR >= min(best, made.seconds):
            enough = middle
            continue
        fastest = _fastest_fitting(made.problem, found)[0] if found is not None else None
        if fastest is None:
            too_little = middle
            continue
        enough = middle
        if fastest[1].step_seconds < made.seconds:
            made = replace(made, plan=fastest[0], timeline=fastest[1])
    return made


def _fastest_fitting(
    problem: StepProblem, found: StageSolution
) -> tuple[tuple[StagePlan, StepTimeline] | None, StepCosts]:
    """The fastest of its plans that fits, their points as they are or dealt anew, as they are simulated, and the costs
    of the first as it is."""
    plans = dict.fromkeys(own for plan in found.plans for own in (plan, *reassigned_points(problem, plan)))
    made = [(plan, problem.step_costs(plan)) for plan in plans]
    room = problem.capacity_bytes
    fitting = [(plan, simulate_step(own)) for plan, own in made if fits(problem.fullest_bytes(own.peak_bytes), room)]
    return min(fitting, key=lambda each: each[1].step_seconds, default=None), made[0][1]
