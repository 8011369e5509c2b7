"""What a stage of a pipeline holds, of what stages give each other, when it is fullest: counted, not in bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoshard.simulation.pipeline_schedule import in_flight, receive_buffers


class StageValues(NamedTuple):
    """As the last forward of a step runs, before which most is in flight.

    `live[chunk]`: micro-batches whose forward has run and whose backward has not, this forward's with them. `inputs`:
    buffers of inputs beyond those of the micro-batches in flight. `outputs`, of each of which something is handed on;
    `gradients` received. `sent` has what torch holds of sends beside outputs in flight (`StepCosts.sent_bytes`).
    """

    live: tuple[int, ...]
    inputs: int
    outputs: int
    gradients: int
    sent: int

    @property
    def beside(self) -> int:
        """All but what blocks keep, an input of each micro-batch in flight with it."""
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
    posted = np.array([own.inputs for own in count])
    if schedule == "1f1b":  # a gradient while the next is computed, an output of the warm-up
        sent = int(takes[0] and micro_batches > 1) + int(gives[0] and min(micro_batches, stages - stage) > 1)
    else:
        again = takes[chunk] & (micro_batch < micro_batches - posted[chunk])
        sent = int(gives[chunk].sum() + again.sum())
    return StageValues(
        tuple(map(int, live)),
        int((np.maximum(posted - live, 0) * takes).sum()),
        int((live * gives).sum()),
        sum(own.gradients for own in count),
        sent,
    )
