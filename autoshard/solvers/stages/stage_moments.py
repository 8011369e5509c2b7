"""Moments at which a stage may be fullest: how many micro-batches of each chunk it holds then, and which sends."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.program.schedules.pipeline_schedule import order_of, receive_buffers


class Moments(NamedTuple):
    """Slots of a stage, of which every other one holds no more than one of these: [moment, chunk] micro-batches whose
    forward has begun and whose backward has not ended; backwards that have, of micro-batches whose input's buffer
    another one takes (`reused`), and of others (`last`). `chunk[moment]` runs."""

    live: Integers
    reused: Integers
    last: Integers
    chunk: Integers

    def fullest(
        self, saved: Floats, working: Floats, reused: Floats | float = 0.0, last: Floats | float = 0.0
    ) -> Floats:
        """Bytes of the fullest moment. `saved` and `working` by chunk, [..., chunk]; what a backward leaves behind."""
        held = saved @ self.live.T + working[..., self.chunk]
        sent = (self.reused * reused + self.last * last).sum(axis=1)
        fullest: Floats = (held + sent).max(axis=-1)
        return fullest


@lru_cache(maxsize=512)
def fullest_moments(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int) -> Moments:
    order = order_of(schedule, stage, stages, micro_batches, chunks)
    count = receive_buffers(schedule, stages, micro_batches, chunks)[stage::stages]
    until = micro_batches - np.array([buffers.inputs for buffers in count])
    chunk = np.array([slot.chunk for slot in order])
    forward = np.array([slot.kind == "F" for slot in order])
    early = np.array([slot.micro_batch for slot in order]) < until[chunk]
    of_chunk = chunk[:, None] == np.arange(chunks)
    begun = (of_chunk & forward[:, None]).cumsum(axis=0)
    ended = [np.vstack([np.zeros((1, chunks), np.int64), (of_chunk & some[:, None]).cumsum(axis=0)[:-1]])
             for some in (~forward & early, ~forward & ~early)]  # fmt: skip
    live = begun - ended[0] - ended[1]
    rows = np.column_stack([live, *ended])
    pareto = np.concatenate([_undominated(rows, np.flatnonzero(chunk == each), chunks) for each in range(chunks)])
    return Moments(live[pareto], ended[0][pareto], ended[1][pareto], chunk[pareto])


def _undominated(rows: Integers, some: Integers, chunks: int) -> Integers:
    """The undominated ones of `some`, in their order: what is sent only grows, so of equal ones in flight the last is
    enough."""
    backwards = some[::-1]
    _, first = np.unique(rows[backwards, :chunks], axis=0, return_index=True)
    some = backwards[np.sort(first)]
    chosen = rows[some]
    less = np.array([((chosen >= each).all(axis=1) & (chosen > each).any(axis=1)).any() for each in chosen], dtype=bool)
    pareto: Integers = some[~less]
    return pareto
