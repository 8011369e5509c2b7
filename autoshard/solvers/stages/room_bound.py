"""Lower bound on every plan of a stage problem, before it is solved: how much of the line stages can hold in a time.

The content of a block is its seconds at its fastest point. What a stage holds in t seconds and its room R is at most
the linear program  max sum g x,  sum t_p x <= t,  sum b_p x <= R,  x >= 0  over the points of all blocks; by duality at
most  u t + w R  for every u, w >= 0 with  u t_p + w b_p >= g  of each point. The vertices (u, w) are few and made once.
What stages hold grows concavely with the time, so that tangents come to the least time from below.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.solvers.common.effort import MOST_ROUNDS
from autoshard.solvers.stages.stage_problem import StageProblem
from autoshard.units import ROUNDING

_INF = float("inf")


class RoomBound:
    """Lower bounds, infinite where the stages' memory can't hold the line in any time."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        counts = np.bincount(problem.line, minlength=len(problem.fronts))
        there = np.flatnonzero(counts)
        used = [problem.fronts[kind] for kind in there]
        fastest = [float(front.seconds.min()) for front in used]
        self.whole = float(np.dot(counts[counts > 0], fastest))
        self.shortest = min(fastest)
        content = np.concatenate([np.full(f.points, least) for f, least in zip(used, fastest, strict=True)])
        taking = content > 0
        every = map(problem.of_stage, range(problem.stages))
        seconds = np.array([np.concatenate([fronts[kind].seconds for kind in there])[taking] for fronts in every])
        each = (problem.point_bytes(stage) for stage in range(problem.stages))
        sizes = np.array([np.concatenate([by_kind[kind] for kind in there])[taking] for by_kind in each])
        self.room = problem.capacity_bytes - min(float(front.working_bytes.min()) for front in used)
        self.sent = problem.send_seconds * np.array([sum(problem.sends(s)) for s in range(problem.stages)])
        self.u, w = _vertices(content[taking], seconds, sizes)
        there_is = np.isfinite(w)  # infinite times no room is no number
        self.roomed = np.where(there_is, np.where(there_is, w, 0.0) * self.room[:, None], _INF)

    def held(self, seconds: Floats) -> tuple[Floats, Floats]:
        """(content, its slope) of what each stage holds at most in `seconds`."""
        every = self.u * seconds[:, None] + self.roomed
        least = every.argmin(axis=1)
        rows = np.arange(len(every))
        return every[rows, least], self.u[rows, least]

    @cached_property
    def slowest_seconds(self) -> float:
        """Lower bound on a micro-batch's seconds on the slowest stage, its sends included."""
        if (self.room < 0).any():
            return _INF
        limit = (self.whole + float(self.sent.sum())) / self.problem.stages
        for _ in range(MOST_ROUNDS):
            left = np.maximum(limit - self.sent, 0.0)
            content, slope = self.held(left)
            missing, steep = self.whole - float(content.sum()), float(slope[left > 0].sum())
            if missing <= ROUNDING * self.whole:
                break
            if steep <= 0:
                return _INF
            limit += missing / steep
        return limit * (1 - ROUNDING)

    @property
    def form_seconds(self) -> float:
        """Lower bound on the closed form."""
        chunks = self.problem.chunks
        total = (self.whole + float(self.sent.sum())) * (1 - ROUNDING)
        return total / chunks + (self.problem.micro_batches - 1 / chunks) * self.slowest_seconds

    @cached_property
    def step_seconds(self) -> float:
        """Lower bound on the step in any order of undivided forwards and backwards: a stage has its first input once a
        micro-batch has passed those before it."""
        limit = self.problem.micro_batches * self.slowest_seconds
        for _ in range(MOST_ROUNDS):
            if limit == _INF:
                return _INF
            content, steep = self._held_in(limit)
            missing = self.whole - content
            if missing <= ROUNDING * self.whole:
                break
            limit = limit + missing / steep if steep > 0 else _INF
        return limit * (1 - ROUNDING)

    def _held_in(self, limit: float) -> tuple[float, float]:
        """(content, slope) of all stages in a step."""
        problem = self.problem
        if problem.chunks > 1:  # of each chunk before, a block at least
            before = (self.shortest + problem.send_seconds) * np.arange(problem.stages)
            content, slope = self.held(np.maximum((limit - before) / problem.micro_batches - self.sent, 0.0))
            return float(content.sum()), float(slope.sum()) / problem.micro_batches
        held = grown = sent = 0.0
        for stage in range(problem.stages):
            left = (limit - held - sent) / problem.micro_batches - float(self.sent[stage])
            if left <= 0:
                break
            each = self.u[stage] * left + self.roomed[stage]
            least = int(each.argmin())
            steep = float(self.u[stage, least]) / problem.micro_batches
            held, grown = held + float(each[least]), grown + steep * (1 - grown)
            sent += float(self.sent[stage])
        return held, grown


def _vertices(content: Floats, seconds: Floats, sizes: Floats) -> tuple[Floats, Floats]:
    """(u, w) of each stage, shapes (stages, vertices); w is infinite where one is none. `seconds` and `sizes`:
    (stages, points)."""
    stages = len(sizes)
    if not len(content):
        return np.zeros((stages, 1)), np.full((stages, 1), _INF)
    a, b = np.triu_indices(len(content), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_size = (content / sizes).max(axis=1, keepdims=True)
        by_time = (content / seconds).max(axis=1, keepdims=True)
        across = seconds[:, a] * sizes[:, b] - seconds[:, b] * sizes[:, a]
        u = (content[a] * sizes[:, b] - content[b] * sizes[:, a]) / across
        w = (content[b] * seconds[:, a] - content[a] * seconds[:, b]) / across
    u = np.hstack([by_time, np.zeros((stages, 1)), u])
    w = np.hstack([np.zeros((stages, 1)), by_size, w])
    true = np.isfinite(u) & np.isfinite(w) & (u >= 0) & (w >= 0)
    u, w = np.where(true, u, 0.0), np.where(true, w, 0.0)
    above = u[:, :, None] * seconds[:, None, :] + w[:, :, None] * sizes[:, None, :]
    true &= (above >= content * (1 - 1e-12)).all(axis=2)
    return np.where(true, u, 0.0), np.where(true, w, _INF)
