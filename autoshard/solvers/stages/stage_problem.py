"""The stage problem: a line of blocks, the front of each, a schedule; what a plan takes by its closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats


@dataclass(frozen=True, eq=False)
class Front:
    """The ways to run one block, an entry of each array a point, for one micro-batch.

    `tail_seconds` come once a step, after the last backward. `saved_bytes` are held from a micro-batch's forward to its
    backward, `static_bytes` always; `working_bytes` while the block runs, of one block of a stage at a time.
    `first_seconds` are what the first forward of a step takes more, at any point; `late_seconds` collectives that run
    once a step, as the block's last backward ends (bounds alone count them).
    """

    forward_seconds: Floats
    backward_seconds: Floats
    saved_bytes: Floats
    static_bytes: Floats
    tail_seconds: Floats
    working_bytes: Floats
    first_seconds: float = 0.0
    late_seconds: float = 0.0

    @property
    def points(self) -> int:
        return len(self.forward_seconds)

    @property
    def seconds(self) -> Floats:
        total: Floats = self.forward_seconds + self.backward_seconds
        return total


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Block k of the line is of kind `line[k]`, an index into `fronts`.

    Part `chunk * stages + stage` of the line is chunk `chunk` of its stage. `live[s]`: micro-batches whose kept bytes
    stage s holds at most, a chunk counted as 1/chunks. `send_seconds`: of one slot, to the next part; the giver is busy
    until it is sent. `allowed[s, k]`: may block k be on stage s; with one chunk only.

    `chunk_live[s, c]`: micro-batches that hold what a point of chunk c keeps more than the leanest of its kind; where
    it is None, as many as `live`. A stage that holds more micro-batches than its schedule has, in another order, has
    `handed_bytes[s]` less for each, and `of_order_bytes[s]` more.

    `late_beside`: of a block's `late_seconds`, as far as hidden, what the backward that hides them takes longer.

    `stage_fronts[s]`: the fronts of stage s, where stages are of several kinds of devices; with one chunk only. Then
    `fronts` have of every point the least that any stage has.
    """

    fronts: tuple[Front, ...]
    line: tuple[int, ...]
    stages: int
    micro_batches: int
    live: Floats
    capacity_bytes: Floats
    chunks: int = 1
    send_seconds: float = 0.0
    allowed: NDArray[np.bool_] | None = None
    chunk_live: Floats | None = None
    handed_bytes: Floats | float = 0.0
    of_order_bytes: Floats | float = 0.0
    late_beside: float = 0.0
    stage_fronts: tuple[tuple[Front, ...], ...] = ()

    def __post_init__(self) -> None:
        ranged = self.allowed is not None or bool(self.stage_fronts)
        assert not ranged or self.chunks == 1, "ranges of the line are no stages where chunks take turns"

    def of_stage(self, stage: int) -> tuple[Front, ...]:
        """Fronts of a stage by kind of block."""
        return self.stage_fronts[stage] if self.stage_fronts else self.fronts

    @property
    def every_front(self) -> tuple[tuple[Front, ...], ...]:
        """Fronts by kind of device, then of block."""
        return tuple(dict.fromkeys(self.stage_fronts)) or (self.fronts,)

    @property
    def run(self) -> tuple[int, int]:
        """Longest run of equal blocks, [start, stop): with several chunks, these are distributed over them."""
        edges = [0, *(k for k in range(1, len(self.line)) if self.line[k] != self.line[k - 1]), len(self.line)]
        return max(pairwise(edges), key=lambda span: (span[1] - span[0], -span[0]))

    @property
    def first_seconds(self) -> Floats:
        """[k]: of the line's blocks before k."""
        seconds: Floats = np.cumsum([0.0, *(self.fronts[kind].first_seconds for kind in self.line)])
        return seconds

    def point_bytes(self, stage: int) -> list[Floats]:
        """Bytes by kind of each point, with all that the stage's live micro-batches keep. With `chunk_live`, what a
        point keeps more counts as in the chunk that has least of it."""
        live = float(self.live[stage])
        more = live if self.chunk_live is None else float(self.chunk_live[stage].min())
        return [point_bytes(front, live, more) for front in self.of_stage(stage)]

    def chunk_ratios(self, stage: int) -> Floats | None:
        """Ratio for each chunk: what a point's bytes are beyond the leanest's in place of those of `point_bytes`."""
        if self.chunk_live is None or self.chunk_live[stage].min() <= 0:
            return None
        ratios: Floats = self.chunk_live[stage] / self.chunk_live[stage].min()
        return ratios

    def held_room(self, stage: int, held: int) -> float:
        """Free bytes of a stage that holds `held` micro-batches, at least as many as its schedule has live. One chunk
        only."""
        more = held - float(self.live[stage])
        handed, of_order = (np.broadcast_to(sizes, self.stages) for sizes in (self.handed_bytes, self.of_order_bytes))
        return float(self.capacity_bytes[stage] + (of_order[stage] if more > 0 else 0.0) - more * handed[stage])

    def sends(self, stage: int) -> tuple[int, int]:
        """Number of times that a stage hands a micro-batch on, forward and backward: the last part has nobody after it,
        the first nobody before."""
        if self.stages == 1:
            return 0, 0
        return self.chunks - (stage == self.stages - 1), self.chunks - (stage == 0)


@dataclass(frozen=True)
class Part:
    """Blocks [first, stop) of the line, on a stage."""

    stage: int
    chunk: int
    first: int
    stop: int


@dataclass(frozen=True)
class StagePlan:
    """`parts` in the order of the line; `points[k]` of block k. `seconds` by the closed form."""

    parts: tuple[Part, ...]
    points: tuple[int, ...]
    seconds: float


def point_bytes(front: Front, live: float, more: float | None = None) -> Floats:
    """Bytes of each point, with `live` micro-batches kept; `more` of them hold what it keeps beyond the leanest."""
    if more is None or more == live:
        return front.static_bytes + live * front.saved_bytes
    least = float(front.saved_bytes.min())
    return front.static_bytes + live * least + more * (front.saved_bytes - least)


def stage_seconds(problem: StageProblem, parts: Sequence[Part], points: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """Forward and backward seconds of a micro-batch on each stage, its sends with them, and the seconds of its tail."""
    seconds = np.zeros((3, problem.stages))
    for part in parts:
        for block in range(part.first, part.stop):
            front, point = problem.of_stage(part.stage)[problem.line[block]], points[block]
            seconds[0, part.stage] += front.forward_seconds[point]
            seconds[1, part.stage] += front.backward_seconds[point]
            seconds[2, part.stage] += front.tail_seconds[point]
    for stage in range(problem.stages):
        seconds[:2, stage] += np.array(problem.sends(stage)) * problem.send_seconds
    return seconds[0], seconds[1], seconds[2]


def closed_form(problem: StageProblem, parts: Sequence[Part], points: Sequence[int]) -> float:
    """Seconds of a step where the slowest stage is never waited for but while the pipeline fills and drains; each
    micro-batch carries its part of the tail. Exact for equal stages without a tail."""
    forward, backward, tail = stage_seconds(problem, parts, points)
    each = forward + backward + tail / problem.micro_batches
    return float(each.sum() / problem.chunks + (problem.micro_batches - 1 / problem.chunks) * each.max())


def bytes_of(problem: StageProblem, parts: Sequence[Part], points: Sequence[int]) -> Floats:
    """Bytes of each stage: static, what live micro-batches keep, and the most that one block works with."""
    total, working = np.zeros(problem.stages), np.zeros(problem.stages)
    sizes = [problem.point_bytes(stage) for stage in range(problem.stages)]
    for part in parts:
        for block in range(part.first, part.stop):
            kind, point = problem.line[block], points[block]
            total[part.stage] += sizes[part.stage][kind][point]
            work_bytes = problem.of_stage(part.stage)[kind].working_bytes[point]
            working[part.stage] = max(working[part.stage], work_bytes)
    both: Floats = total + working
    return both
