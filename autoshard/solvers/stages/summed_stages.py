"""The least sum over all stages, whatever the slowest takes: each block at one point, within the stages' memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.solvers.stages.range_costs import RangeCosts
from autoshard.solvers.stages.stage_partition import is_possible, least_sum, plan_of_cuts
from autoshard.solvers.stages.stage_problem import StagePlan, StageProblem

_INF = float("inf")


def solve_sum(problem: StageProblem, entering: Floats) -> tuple[float, StagePlan] | None:
    """(seconds of a micro-batch on all stages together, its part of their tails and all sends with them; the plan).
    `entering[k]`: of what is sent before block k, where a stage begins there; with several chunks each send takes the
    `send_seconds` of the problem. Exact; None where nothing fits."""
    if not is_possible(problem):
        return None
    one = problem.chunks == 1
    costs = RangeCosts(replace(problem, send_seconds=0.0) if one else problem, 1.0, 1 / problem.micro_batches)
    table = costs.table(_INF)
    if one:
        end, length = np.indices(table[0].shape)
        sent = np.append(entering, 0.0)[np.array(costs.places)[np.maximum(end - length, 0)]]
        table = [table[0], *(own + sent for own in table[1:])]
    found = least_sum(table, _INF)
    return None if found is None else (found[0], plan_of_cuts(problem, costs, found[1]))
