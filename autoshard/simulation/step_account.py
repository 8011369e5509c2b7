"""Account of a whole step, by stage: computation, exposed communication by kind, bubble, optimizer, and the rest.

Made from the simulated step alone: time in which a device computes counts as computation, whatever else runs;
communication while it computes nothing is exposed; the bubble is what a stage waits for others, `other` what it waits
for its host. The parts of each stage add up to the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autoshard.redistribute import CARRIED
from autoshard.simulation.timeline import COMPUTE, Event, Timeline
from autoshard.units import ROUNDING

COMPUTED = ("forward", "backward", "recompute")
EXPOSED = tuple(collective.words for collective in CARRIED.values())  # and others, after these
BUBBLE, OPTIMIZER, OTHER = "bubble", "optimizer", "other"
LAST = (BUBBLE, OPTIMIZER, OTHER)
Seconds = Mapping[str, float]


@dataclass(frozen=True)
class StageAccount:
    """`parts`: (kind, seconds), in a fixed order, none of 0 seconds; they add up to the step."""

    parts: tuple[tuple[str, float], ...]
    peak_bytes: float

    def seconds(self, kind: str) -> float:
        return dict(self.parts).get(kind, 0.0)

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed communication by kind."""
        return {kind: seconds for kind, seconds in self.parts if kind not in (*COMPUTED, *LAST)}

    @property
    def exposed_seconds(self) -> float:
        return math.fsum(self.exposed.values())


@dataclass(frozen=True)
class StepAccount:
    step_seconds: float
    stages: tuple[StageAccount, ...]

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of the stage that holds most."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def mean(self) -> StageAccount:
        """Mean account of the stages, which have equally many devices: it adds up to the step, too."""
        kinds = dict.fromkeys(kind for stage in self.stages for kind, _ in stage.parts)
        means = {kind: math.fsum(s.seconds(kind) for s in self.stages) / len(self.stages) for kind in kinds}
        return StageAccount(_ordered(means), self.peak_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Dict in SI units."""
        return {
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "mean": _as_dict(self.mean),
            "stages": [_as_dict(stage) | {"peak_bytes": stage.peak_bytes} for stage in self.stages],
        }


def _as_dict(stage: StageAccount) -> dict[str, Any]:
    named = {f"{kind}_seconds": stage.seconds(kind) for kind in (*COMPUTED, *LAST)}
    return named | {"exposed_seconds": stage.exposed}


def stage_account(step_seconds: float, seconds: Seconds, peak_bytes: float, remainder: str) -> StageAccount:
    """Account of a stage that is occupied for `seconds`; the rest of the step is named `remainder`."""
    left = step_seconds - math.fsum(seconds.values())
    return StageAccount(_ordered(added([seconds, {remainder: max(0.0, left)}])), peak_bytes)


def one_stage(timeline: Timeline) -> StepAccount:
    """Account of a step of one micro-batch on one stage."""
    seconds = split(timeline.events, 0.0, timeline.step_seconds)
    account = stage_account(timeline.step_seconds, seconds, timeline.peak_bytes, OTHER)
    return StepAccount(timeline.step_seconds, (account,))


def added(parts: Iterable[Seconds]) -> dict[str, float]:
    by_kind: dict[str, list[float]] = {}
    for part in parts:
        for kind, seconds in part.items():
            by_kind.setdefault(kind, []).append(seconds)
    return {kind: math.fsum(terms) for kind, terms in by_kind.items()}


def _ordered(seconds: Seconds) -> tuple[tuple[str, float], ...]:
    others = sorted(seconds.keys() - {*COMPUTED, *EXPOSED, *LAST})
    order = (*COMPUTED, *EXPOSED, *others, *LAST)
    rounding = ROUNDING * math.fsum(seconds.values())  # what is left of differences of times is no part of a step
    return tuple((kind, seconds[kind]) for kind in order if seconds.get(kind, 0.0) > rounding)


class Busy(NamedTuple):
    start: float
    end: float
    kind: str = ""


def split(events: Sequence[Event], start: float, end: float) -> dict[str, float]:
    """[start, end] by what the device does: it computes, else communicates, else waits for its host."""
    active = [event for event in events if event.end_seconds > start and event.start_seconds < end]
    computed = apart(Busy(e.start_seconds, e.end_seconds, e.phase) for e in active if e.stream == COMPUTE)
    talks = (Busy(e.start_seconds, e.end_seconds, CARRIED[e.collective].words) for e in active if e.collective)
    exposed = without(apart(talks), computed)
    inside = [Busy(max(s.start, start), min(s.end, end), s.kind) for s in (*computed, *exposed)]
    inside = [span for span in inside if span.end > span.start]
    seconds = added({span.kind: span.end - span.start} for span in inside)
    return added([seconds, {OTHER: max(0.0, end - start - math.fsum(seconds.values()))}])


def apart(spans: Iterable[Busy]) -> list[Busy]:
    """Spans in order without overlap: of two at once the one that began first goes on."""
    disjoint: list[Busy] = []
    until = -math.inf
    for span in sorted(spans):
        start = max(until, span.start)
        if span.end > start and disjoint and disjoint[-1].end == start and disjoint[-1].kind == span.kind:
            disjoint[-1] = disjoint[-1]._replace(end=span.end)
        elif span.end > start:
            disjoint.append(Busy(start, span.end, span.kind))
        until = max(until, span.end)
    return disjoint


def without(spans: Sequence[Busy], others: Sequence[Busy]) -> list[Busy]:
    """Parts of `spans` that are in none of `others`; both are as `apart` returns them."""
    left: list[Busy] = []
    first = 0
    for start, end, kind in spans:
        while first < len(others) and others[first].end <= start:
            first += 1
        index = first
        while start < end and index < len(others) and others[index].start < end:
            if others[index].start > start:
                left.append(Busy(start, others[index].start, kind))
            start = max(start, others[index].end)
            index += 1
        if start < end:
            left.append(Busy(start, end, kind))
    return left
