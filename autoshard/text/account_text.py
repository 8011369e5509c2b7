"""Text on where a step goes: its parts, which add up to it, and its critical path, one task after another."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.costs.bands import COUNTS
from autoshard.errors import NAMED
from autoshard.ir.plan import Plan
from autoshard.redistribute import CARRIED
from autoshard.simulation.step_account import BUBBLE, COMPUTED, OPTIMIZER, OTHER, StageAccount, StepAccount
from autoshard.simulation.timeline import COMPUTE, HOST_LINK, HOST_MEMORY, Event, Timeline
from autoshard.text.answer_labels import STEP, gap
from autoshard.units import format_bytes, format_seconds

EXPOSED = "exposed communication"
WORDS = {OTHER: "waiting for the host"}


def kind_words(kind: str) -> str:
    plain = (*COMPUTED, BUBBLE, OPTIMIZER)
    return WORDS.get(kind, kind if kind in plain else f"exposed {kind}")


def parts(account: StepAccount) -> list[tuple[str, float]]:
    """(part of the step, seconds) of the mean stage."""
    return [(kind_words(kind), seconds) for kind, seconds in account.mean.parts]


def breakdown(account: StepAccount) -> list[tuple[str, str, str]]:
    """(part of the step, seconds, share), of the mean stage where there are several; they add up to the last, the
    step."""
    step = account.step_seconds
    rows = [*parts(account), (STEP, step)]
    return [(what, format_seconds(seconds), f"{seconds / step:.1%}" if step else "") for what, seconds in rows]


def stage_breakdown(account: StepAccount, word: str) -> list[tuple[str, ...]]:
    """A row a stage, as `word` has it: computation, exposed communication, bubble, optimizer, host, and peak memory."""
    columns = [*COMPUTED, EXPOSED, BUBBLE, OPTIMIZER, OTHER]
    columns = [name for name in columns if any(_seconds(stage, name) for stage in account.stages)]
    named = [{EXPOSED: "exposed", OTHER: "host"}.get(name, name) for name in columns]
    rows: list[tuple[str, ...]] = [(word, *named, "memory")]
    for number, stage in enumerate(account.stages):
        rows.append((str(number), *_cells(stage, columns), format_bytes(stage.peak_bytes)))
    rows.append(("mean", *_cells(account.mean, columns), ""))
    return rows


def _cells(stage: StageAccount, columns: Sequence[str]) -> list[str]:
    return [format_seconds(_seconds(stage, name), 3) for name in columns]


def _seconds(stage: StageAccount, name: str) -> float:
    return stage.exposed_seconds if name == EXPOSED else stage.seconds(name)


HOST = "the host"
_STREAMS = {COMPUTE: "computing", HOST_MEMORY: "look-ups on the host", HOST_LINK: "the link to the host"}


def critical_seconds(timeline: Timeline) -> dict[str, float]:
    """Critical path of the step: what -> seconds, the longest first; together they are the step.

    Followed back from the event that ends last: each began when what it waited for had ended, or its stream was free;
    else when the host had issued it, busy without a pause since a look-up held it up, or the step began.
    """
    ended: dict[float, list[int]] = {}
    for n, candidate in enumerate(timeline.events):
        ended.setdefault(candidate.end_seconds, []).append(n)
    totals: dict[str, float] = {}
    every = range(len(timeline.events))
    place: int | None = max(every, key=lambda n: timeline.events[n].end_seconds) if every else None
    while place is not None:
        event = timeline.events[place]
        totals[_what(event)] = totals.get(_what(event), 0.0) + event.duration_seconds
        place = _before(timeline, place, ended)
        if place is None or timeline.events[place].end_seconds < event.start_seconds:
            until = 0.0 if place is None else timeline.events[place].end_seconds
            totals[HOST] = totals.get(HOST, 0.0) + event.start_seconds - until
    longest = sorted(totals.items(), key=lambda row: (-row[1], row[0]))
    return {what: seconds for what, seconds in longest if seconds > 0}


def _before(timeline: Timeline, place: int, ended: dict[float, list[int]]) -> int | None:
    """The event for which this one began no sooner: None for the host alone."""
    event = timeline.events[place]
    there = [n for n in ended.get(event.start_seconds, ()) if n < place]
    waited = [n for n in there if n in event.waits] or there
    if waited or event.start_seconds == 0:
        return waited[-1] if waited else None
    held = [n for n, earlier in enumerate(timeline.events[:place]) if earlier.stream == HOST_MEMORY]
    return held[-1] if held and timeline.events[held[-1]].end_seconds < event.start_seconds else None


def _what(event: Event) -> str:
    if event.collective:
        return f"{CARRIED[event.collective].words} over {'+'.join(event.axes)}"
    return _STREAMS.get(event.stream, event.stream)


def waits(timeline: Timeline) -> str:
    """`computing 4.6 ms, the host 3.8 ms and 2 more`: together the step."""
    parts = [f"{what} {format_seconds(seconds, 3)}" for what, seconds in critical_seconds(timeline).items()]
    more = len(parts) - NAMED
    named = [*parts[:NAMED], *([f"{more} more"] if more > 0 else [])]
    return ", ".join(named[:-1]) + f" and {named[-1]}" if len(named) > 1 else "".join(named)


def left_open(plan: Plan, timeline: Timeline) -> str:
    """Critical path behind a large gap of the step, as text; "" if there is none.

    `critical path of the step: computing 4.6 ms, the host 3.8 ms, …; the bound …`
    """
    share = gap(plan)
    if plan.search.level != 2 or plan.step.micro_batches > 1 or share is None or share < COUNTS:
        return ""
    return (
        f"critical path of the step: {waits(timeline)}; the bound considers one bottleneck at a time in forward and in "
        "backward (host, longest dependency path, or one link), the step meets several"
    )
