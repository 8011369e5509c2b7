"""Number of values exchanged between stages that a stage of a pipeline holds when it is fullest: a count, not bytes.

The least sum over all stages, whatever the slowest takes: each block at one point, within the stages' memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.program.schedules.pipeline_schedule import in_flight, receive_buffers
from autoshard.solvers.stages.range_costs import RangeCosts
from autoshard.solvers.stages.stage_partition import is_possible, least_sum, plan_of_cuts
from autoshard.solvers.stages.stage_problem import StagePlan, StageProblem


class StageValues(NamedTuple):
    """Values as the last forward of a step runs, before which most is in flight.

    `live[chunk]`: micro-batches whose forward has run and whose backward has not, this forward's with them. `inputs`:
    buffers of inputs beyond those of the micro-batches in flight. `outputs`, of each of which something is handed on;
    `gradients` received. `sent`: what torch holds of sends, without outputs in flight (`StepCosts.sent_bytes`).
    """

    live: tuple[int, ...]
    inputs: int
    outputs: int
    gradients: int
    sent: int

    @property
    def beside(self) -> int:
        """Number of all values but what blocks keep, which includes an input of each micro-batch in flight."""
        return self.inputs + self.outputs + self.gradients + self.sent


@lru_cache(maxsize=256)
def stage_values(schedule: str, stages: int, micro_batches: int, chunks: int) -> tuple[StageValues, ...]:
    """The values of each stage."""
    return tuple(_of_stage(schedule, stage, stages, micro_batches, chunks) for stage in range(stages))


def _of_stage(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int) -> StageValues:
    done = micro_batches * chunks - in_flight(schedule, stage, stages, micro_batches, chunks)  # backwards
    group, turn = np.divmod(np.arange(done), stages * chunks)
    chunk, micro_batch = chunks - 1 - turn // stages, group * stages + turn % stages
    live = micro_batches - np.bincount(chunk, minlength=chunks)
    part = np.arange(chunks) * stages + stage
    gives, takes = part < stages * chunks - 1, part > 0
    count = receive_buffers(schedule, stages, micro_batches, chunks)[stage::stages]
    posted = np.array([buffers.inputs for buffers in count])
    if schedule == "1f1b":  # a gradient while the next is computed, an output of the warm-up
        sent = int(takes[0] and micro_batches > 1) + int(gives[0] and min(micro_batches, stages - stage) > 1)
    else:
        reused = takes[chunk] & (micro_batch < micro_batches - posted[chunk])
        sent = int(gives[chunk].sum() + reused.sum())
    return StageValues(
        tuple(map(int, live)),
        int((np.maximum(posted - live, 0) * takes).sum()),
        int((live * gives).sum()),
        sum(buffers.gradients for buffers in count),
        sent,
    )


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
        table = [table[0], *(stage_table + sent for stage_table in table[1:])]
    solution = least_sum(table, _INF)
    return None if solution is None else (solution[0], plan_of_cuts(problem, costs, solution[1]))
