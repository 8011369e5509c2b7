"""What a stage of several chunks surely holds, however unequal these are.

As the last forward runs, which is the last chunk's, n_c micro-batches of each chunk c are in flight. Its blocks are as
many of each chunk, so of what all of them keep at their leanest the mean of n_c counts; what some keep more may be in
the chunk of which fewest are in flight. Blocks before and after those that are dealt out are in the first and the last
chunk. One block of the last chunk works meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.solvers.stages.stage_problem import Front, StageProblem


class Live(Protocol):
    @property
    def live(self) -> tuple[int, ...]: ...


def least_held(problem: StageProblem, values: Sequence[Live], working: Floats) -> StageProblem:
    """`problem` of several chunks with bytes that no plan has less of, on any stage. Of each stage, as its last forward
    runs: its `values`, and bytes that its block works with beside all that is kept."""
    start, stop = problem.run
    run = problem.line[start]
    chunk_live = np.array([own.live for own in values], float)
    mean = chunk_live.mean(axis=1)
    if run in problem.line[:start] or run in problem.line[stop:]:
        mean = chunk_live.min(axis=1)
        chunk_live = mean[:, None]
    fronts = []
    for kind, front in enumerate(problem.fronts):
        if kind == run:
            assert np.ptp(front.static_bytes) == 0, "points differ in what they keep alone"
            fronts.append(replace(front, working_bytes=np.zeros(front.points)))
            continue
        early, late = kind in problem.line[:start], kind in problem.line[stop:]
        live = min([values[0].live[0]] * early + [values[-1].live[-1]] * late, default=0)
        fronts.append(_always(front, live))
    room = problem.capacity_bytes - working
    return replace(problem, fronts=tuple(fronts), live=mean, chunk_live=chunk_live, capacity_bytes=room)


def _always(front: Front, live: int) -> Front:
    """Of a block whose chunk is known: what `live` micro-batches keep is there."""
    nothing = np.zeros(front.points)
    return replace(
        front,
        static_bytes=front.static_bytes + live * front.kept_bytes,
        kept_bytes=nothing,
        working_bytes=nothing,
    )
