"""Every operator of a whole step: what a device of each stage does in each slot of its schedule, and once a step.

Slots of one kind of a part do the same, as the part was simulated: they share a segment, of which a step is made at
their times. The account of a step adds up these segments, too (see step_account.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from autoshard.program.schedules.pipeline_schedule import Placed
from autoshard.redistribute import CARRIED
from autoshard.simulation.step_account import (
    BUBBLE,
    Seconds,
    StageAccount,
    added,
    split,
    stage_account,
)
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.simulation.timeline import COMPUTE, Event, Phase
from autoshard.units import ROUNDING

# Of all stages on a page, in a trace a quarter, at 340 bytes each: more micro-batches are drawn by slot.
MOST_EVENTS = 50_000
_PHASES: dict[str, Phase] = {"F": "forward", "B": "backward"}


@dataclass(frozen=True)
class Segment:
    """`events` in seconds from its start, of which a message may end after it; `waits` are places in them."""

    events: tuple[Event, ...]
    seconds: float

    @cached_property
    def split(self) -> Seconds:
        """Seconds of the segment by kind."""
        return split(self.events, 0.0, self.seconds)


def window(events: Sequence[Event], start: float, end: float) -> Segment:
    """Segment of the events in [start, end]; those that began before or end after are clipped."""
    least = (end - start) * ROUNDING
    inside = [
        n for n, event in enumerate(events) if event.end_seconds > start + least and event.start_seconds < end - least
    ]
    place = {n: index for index, n in enumerate(inside)}
    clipped = []
    for event in map(events.__getitem__, inside):
        begin, until = max(start, event.start_seconds), min(end, event.end_seconds)
        waits = tuple(place[n] for n in event.waits if n in place)
        clipped.append(event._replace(start_seconds=begin - start, duration_seconds=until - begin, waits=waits))
    return Segment(tuple(clipped), end - start)


def with_gaps(segment: Segment, gaps: Sequence[tuple[float, Segment]]) -> Segment:
    """At each time, in order, another segment runs alone; what it interrupts goes on after it."""
    times = [at for at, _ in gaps]
    later = [0.0, *accumulate(other.seconds for _, other in gaps)]
    events, resumed = list[Event](), list[Event]()
    for event in segment.events:
        first = bisect_right(times, event.start_seconds)
        cuts = [event.start_seconds, *times[first : bisect_left(times, event.end_seconds)], event.end_seconds]
        pieces = [
            event._replace(start_seconds=start + later[first + n], duration_seconds=end - start)
            for n, (start, end) in enumerate(pairwise(cuts))
        ]
        events.append(pieces[0])
        resumed += pieces[1:]
    events += resumed
    for (at, other), before in zip(gaps, later, strict=False):
        events += _moved(other.events, at + before, len(events))
    return Segment(tuple(events), segment.seconds + later[-1])


def _moved(events: Iterable[Event], seconds: float, places: int) -> Iterator[Event]:
    for event in events:
        waits = tuple(place + places for place in event.waits)
        yield event._replace(start_seconds=event.start_seconds + seconds, waits=waits)


def one_after_another(segments: Iterable[Segment]) -> Segment:
    events, seconds = list[Event](), 0.0
    for segment in segments:
        events += _moved(segment.events, seconds, len(events))
        seconds += segment.seconds
    return Segment(tuple(events), seconds)


def single(name: str, seconds: float, phase: Phase, collective: str = "", axes: tuple[str, ...] = ()) -> Segment:
    """Segment of one event that is no operator of the program."""
    stream = CARRIED[collective].lane if collective else COMPUTE
    event = Event(name, stream, 0.0, seconds, phase, 0.0, "", "", None, (), collective, axes)
    return Segment((event,) if seconds > 0 else (), seconds)


@dataclass(frozen=True)
class PartOperators:
    """Operators of a part in a slot; `first` and `last` include those run once a step: gathers in its first forward,
    and gradients reduced during and after its last backward. `update`: gradients between stages, optimizer."""

    forward: Segment
    backward: Segment
    first: Segment
    last: Segment
    update: Segment


class Laid(NamedTuple):
    """A segment in its place."""

    start_seconds: float
    segment: int
    micro_batch: int


@dataclass(frozen=True, eq=False)
class StepOperators:
    """`stages`: of each its segments in order, by number."""

    timeline: StepTimeline
    segments: tuple[Segment, ...]
    stages: tuple[tuple[Laid, ...], ...]

    def events_of(self, laid: Iterable[Laid]) -> tuple[Event, ...]:
        """At their times in the step."""
        events: list[Event] = []
        for entry in laid:
            events += _moved(self.segments[entry.segment].events, entry.start_seconds, len(events))
        return tuple(events)

    def account(self, stage: int) -> StageAccount:
        """Account of a stage; what its slots and tail leave of the step is its bubble."""
        seconds = added(self.segments[entry.segment].split for entry in self.stages[stage])
        return stage_account(self.timeline.step_seconds, seconds, self.timeline.peak_bytes[stage], BUBBLE)

    def lanes(self) -> tuple[str, ...]:
        """Lanes of all stages: computation, then communication by what it does."""
        lanes = {lane for segment in self.segments for event in segment.events for lane in event.streams} - {COMPUTE}
        return (COMPUTE, *sorted(lanes))

    def slots(self, stage: int, lane: str) -> Iterator[Event]:
        """The slots of a stage and what follows once a step, each as one event."""
        timeline, chunks = self.timeline, self.timeline.costs.chunks
        for placed in timeline.by_stage[stage]:
            kind, batch, chunk = placed.slot
            name = f"{_PHASES[kind]} {batch}" + (f".{chunk}" if chunks > 1 else "")
            yield Event(name, lane, placed.start_seconds, placed.duration_seconds, _PHASES[kind], 0.0, "", "")
        at = timeline.stage_seconds[stage] - timeline.costs.stages[stage].tail_seconds
        for name, seconds in timeline.costs.stages[stage].tail:
            if seconds:
                yield Event(name, lane, at, seconds, "optimizer", 0.0, "", "once a step")
            at += seconds

    def within(self, most: int) -> StepOperators:
        """Operators with `most` events or few more: of micro-batches in the middle each slot is one event."""
        batches = self.timeline.costs.micro_batches
        count = [0] * batches
        for entry in (entry for stage in self.stages for entry in stage):
            count[entry.micro_batch] += len(self.segments[entry.segment].events)
        totals = [count[-1] + total for total in accumulate(count[:-1])]
        whole = max(1, bisect_right(totals, most))
        if whole >= batches - 1:
            return self
        first = len(self.segments)
        joined = tuple(_joined(segment) for segment in self.segments)
        stages = tuple(
            tuple(
                entry._replace(segment=entry.segment + first * (whole <= entry.micro_batch < batches - 1))
                for entry in stage
            )
            for stage in self.stages
        )
        return StepOperators(self.timeline, self.segments + joined, stages)


def _joined(segment: Segment) -> Segment:
    phase = segment.events[0].phase if segment.events else "forward"
    return single(f"{len(segment.events)} events, as in the first micro-batch", segment.seconds, phase)


def step_operators(timeline: StepTimeline, parts: Sequence[PartOperators]) -> StepOperators:
    """`parts` in the order of the model, with what `timeline` gives their slots."""
    segments, number_of, stages = list[Segment](), dict[tuple[object, ...], int](), list[tuple[Laid, ...]]()
    for stage, slots in enumerate(timeline.by_stage):
        entries = list[Laid]()
        for place, placed in enumerate(slots):
            ends = place == len(slots) - 1
            number = timeline.costs.number(stage, placed.slot.chunk)
            key = (number, placed.slot.kind, round(placed.duration_seconds, 12), ends)
            if key not in number_of:
                number_of[key] = len(segments)
                segment = _slot(timeline, placed, parts, ends)
                segments.append(Segment(tuple(map(_in_lanes, segment.events)), segment.seconds))
            entries.append(Laid(placed.start_seconds, number_of[key], placed.slot.micro_batch))
        stages.append(tuple(entries))
    return StepOperators(timeline, tuple(segments), tuple(stages))


def _slot(timeline: StepTimeline, placed: Placed, parts: Sequence[PartOperators], ends: bool) -> Segment:
    """Segment of a slot; if it `ends` its stage's part of the step, with the tail that follows."""
    costs, stage, chunk = timeline.costs, placed.stage, placed.slot.chunk
    number = costs.number(stage, chunk)
    part, cost, several = parts[number], costs.parts[number], timeline.stages
    if placed.slot.kind == "F":
        sent = costs.sent_seconds(number)
        once = placed.duration_seconds - cost.forward_seconds - sent
        send = single(f"send output to {costs.word} {(stage + 1) % several}", sent, "forward", "send_receive")
        segment = one_after_another([_forward(part, once, cost.once_copy_seconds, placed), send])
        return _with_messages(segment, timeline, placed)
    sent = costs.returned_seconds(number)
    send = single(f"send gradient to {costs.word} {(stage - 1) % several}", sent, "backward", "send_receive")
    if not ends:
        return _with_messages(one_after_another([part.backward, send]), timeline, placed)
    late = next((seconds for _, seconds in costs.stages[stage].tail), 0.0)
    more = part.last.seconds - part.backward.seconds
    if chunk == 0 and abs(more - late) <= ROUNDING * part.last.seconds:
        segment = with_gaps(part.last, [(part.backward.seconds, send)] * (sent > 0))
    else:
        after = single("gradients between replicas", late, "backward", "all_reduce")
        segment = one_after_another([part.backward, send, after])
    updates = (parts[costs.number(stage, n)].update for n in range(costs.chunks_of(stage)))
    return one_after_another([_with_messages(segment, timeline, placed), *updates])


def _forward(part: PartOperators, once: float, copied: float, placed: Placed) -> Segment:
    """`once`: what it takes more than another one, for weights that are gathered once a step."""
    if once <= ROUNDING * placed.duration_seconds:
        return part.forward
    more = part.first.seconds - part.forward.seconds
    if placed.slot.micro_batch == 0 and abs(more - once) <= ROUNDING * part.first.seconds:
        return part.first
    copies = single("copy weights that were gathered ahead", min(once, copied), "forward")
    axes = next((event.axes for event in part.first.events if event.collective == "all_gather"), ())
    waits = single("gather weights, once a step", once - copies.seconds, "forward", "all_gather", axes)
    return one_after_another([copies, waits, part.forward])


def _with_messages(segment: Segment, timeline: StepTimeline, placed: Placed) -> Segment:
    """Segment with what is sent to other places from the slot's end on, while the next one runs."""
    events = list(segment.events)
    for name, seconds in timeline.sent_after(placed):
        message = single(f"send {name}", seconds, _PHASES[placed.slot.kind], "send_receive")
        events += _moved(message.events, placed.duration_seconds, 0)
    return Segment(tuple(events), segment.seconds)


def _in_lanes(event: Event) -> Event:
    """Gathers, reductions and others apart, of each axis."""
    if not event.collective:
        return event
    lane = CARRIED[event.collective].lane
    return event._replace(lanes=tuple(f"{lane} {axis}" for axis in event.axes) or (lane,))
