"""Least memory of a stage of several chunks, however unequal these are, and of what blocks of any stage work with in
addition to all that their part keeps.

As the last forward runs, which is the last chunk's, n_c micro-batches of each chunk c are in flight. Its blocks are as
many of each chunk, so of what all of them keep at their leanest the mean of n_c counts; what some keep more may be in
the chunk of which fewest are in flight. Blocks before and after those that are distributed are in the first and the
last chunk. One block of the last chunk works meanwhile.

While a block runs, those after it keep nothing. So a part's last block adds all that it works with to what the part
keeps; one before it adds that less what those after it keep.

The least that the fullest stage can hold: a dynamic program over cuts, each block at its leanest point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats
from autoshard.solvers.stages.range_costs import block_counts, cut_places
from autoshard.solvers.stages.stage_problem import Front, StageProblem

_LOOKED_AT = 3  # blocks of a part, its last ones


class Live(Protocol):
    @property
    def live(self) -> tuple[int, ...]: ...


def least_held(problem: StageProblem, values: Sequence[Live], working: Floats) -> StageProblem:
    """`problem` of several chunks with bytes that no plan has less of, on any stage. Of each stage, as its last forward
    runs: its `values`, and bytes that its block works with in addition to all that is kept."""
    start, stop = problem.run
    run = problem.line[start]
    chunk_live = np.array([value.live for value in values], float)
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
    """The curve of a block whose chunk is known: what `live` micro-batches keep is there."""
    nothing = np.zeros(front.points)
    return replace(
        front,
        static_bytes=front.static_bytes + live * front.saved_bytes,
        saved_bytes=nothing,
        working_bytes=nothing,
    )


def least_working(part: Sequence[int], works: Sequence[Floats], saved: Sequence[Floats]) -> float:
    """Lower bound on the working bytes of a part that ends in these kinds of blocks. `works` and `saved`: bytes of each
    point, by kind."""
    most = after = 0.0
    for kind in reversed(part):
        most = max(most, float(works[kind].min()) - after)
        after += float(saved[kind].max())
    return most


def of_every_part(line: tuple[int, ...], works: Sequence[Floats], saved: Sequence[Floats]) -> list[float]:
    """[kind]: of any part of the line that has a block of the kind."""
    every = _ends(line, len(works))
    return [min((least_working(part, works, saved) for part in parts), default=0.0) for parts in every]


@lru_cache(maxsize=64)
def _ends(line: tuple[int, ...], kinds: int) -> tuple[frozenset[tuple[int, ...]], ...]:
    """[kind]: how parts end that have a block of it; no more of a part than `_LOOKED_AT` blocks."""
    endings: list[set[tuple[int, ...]]] = [set() for _ in range(kinds)]
    last: dict[int, int] = {}
    for end, end_kind in enumerate(line):
        last[end_kind] = end
        for kind, block in last.items():
            endings[kind].add(line[max(block, end + 1 - _LOOKED_AT) : end + 1])
    return tuple(map(frozenset, endings))


def of_dealt(
    line: tuple[int, ...], run: tuple[int, int], stages: int, works: Sequence[Floats], saved: Sequence[Floats]
) -> Floats:
    """[stage]: of the last of several chunks, which ends in a block of the run; of the last stage, in what is after."""
    start, stop = run
    working = np.full(stages, least_working(line[start : start + 1], works, saved))
    working[-1] = least_working(line[stop - 1 :], works, saved)
    return working


_INF = float("inf")


def least_bytes(problem: StageProblem, beside: Floats) -> float:
    """Least bytes of the fullest stage, whatever its capacity; `beside[stage]` is added to its blocks'. Infinite where
    no cut is allowed. Exact for `bytes_of` (stage_problem)."""
    places = cut_places(problem)
    counts = block_counts(problem.line, len(problem.fronts))[places]
    longer = np.arange(len(places))[:, None] > np.arange(len(places))[None, :]
    tops = sorted({float(w) for kind in {*problem.line} for w in problem.fronts[kind].working_bytes})
    fullest = np.where(np.arange(len(places)) == 0, 0.0, _INF)
    for stage in range(problem.stages):
        held = np.full(longer.shape, _INF)
        for top in tops:
            held = np.minimum(held, _held(problem, counts, stage, top))
        held = np.where(longer & _allowed(problem, places, stage), held + beside[stage], _INF)
        fullest = np.maximum(fullest[None, :], held).min(axis=1)
    return float(fullest[-1])


def _held(problem: StageProblem, counts: NDArray[np.int64], stage: int, top: float) -> Floats:
    """[end, begin]: of points that work with at most `top`, and that."""
    sizes = zip(problem.point_bytes(stage), problem.fronts, strict=True)
    least = np.array([point_sizes[front.working_bytes <= top].min(initial=_INF) for point_sizes, front in sizes])
    none = counts @ np.isinf(least)
    totals = counts @ np.where(np.isinf(least), 0.0, least)
    held: Floats = np.where(none[:, None] == none[None, :], totals[:, None] - totals[None, :] + top, _INF)
    return held


def _allowed(problem: StageProblem, places: list[int], stage: int) -> NDArray[np.bool_]:
    if problem.allowed is None:
        return np.ones((len(places),) * 2, bool)
    out = np.concatenate([[0], np.cumsum(~problem.allowed[stage])])[places]
    allowed: NDArray[np.bool_] = out[:, None] == out[None, :]
    return allowed
