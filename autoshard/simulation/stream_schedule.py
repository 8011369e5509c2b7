"""Places tasks on the streams of one device, behind the host that starts them one after the other.

A task starts when the host has issued it, what it waits for has ended and its streams are free. Two collectives over
other axes that are limited by the same link take turns on it. A computation that runs while something is communicated
is slower: both want the same memory and cores (arXiv:2507.03114 measures 19 % on average).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from autoshard.simulation.timeline import COMPUTE, Event, Phase


class StreamTask(NamedTuple):
    """An event that has no time yet. It occupies all of `streams`, and is shown on the first.

    One `beside` the task before it does not wait for that one; several in a row wait for each other. `collective` is
    what it communicates over `axes`, "" for a computation. `link`: the level of the cluster that limits it. `held_up`:
    the host is, until it has ended. `continues`: the host issued it with the task before, of which it is a part.
    """

    name: str
    streams: tuple[str, ...]
    seconds: float
    phase: Phase
    bytes: float
    module: str
    reason: str
    instruction: int | None = None
    beside: bool = False
    collective: str = ""
    axes: tuple[str, ...] = ()
    link: str = ""
    held_up: bool = False
    continues: bool = False


@dataclass
class Schedule:
    """Schedule. `dispatch_seconds`: the host's, per task. `slowdown`: of overlapped computation (0.15: 15 % slower)."""

    dispatch_seconds: float = 0.0
    slowdown: float = 0.0
    events: list[Event] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)  # by stream, and by link
    waits: tuple[int, ...] = ()  # what the next task in order waits for
    host: float = 0.0  # when the host issues the next task
    talks: list[tuple[float, float]] = field(default_factory=list)  # when something is communicated
    computing: tuple[int, float] | None = None  # the last computation: its event, and its seconds when nothing is

    @property
    def now(self) -> float:
        """Time at which what has run in order has ended."""
        return max((self.events[index].end_seconds for index in self.waits), default=0.0)

    def wait_for(self, events: Iterable[int]) -> None:
        """The next task in order waits for these, too."""
        self.waits = tuple(sorted({*self.waits, *events}))

    def run_in_order(self, tasks: Iterable[StreamTask], after: tuple[int, ...] = ()) -> None:
        """Run tasks, each after the one before; the first also after the events `after`."""
        before = self.waits  # of the last task that stands beside no other what it waited for, and those beside it
        for task in tasks:
            waits = self.waits
            self.waits = before if task.beside else waits
            started = self.start(task, after)
            if task.seconds == 0:
                self.waits = waits
                continue
            self.waits = tuple(sorted({*waits, *started})) if task.beside else started
            before, after = tuple(sorted({*before, *started})) if task.beside else waits, ()

    def start(self, task: StreamTask, after: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Places a task that nothing waits for yet; gives its position. One that takes no time costs the host alone."""
        self.host += 0.0 if task.continues else self.dispatch_seconds
        if task.seconds == 0:
            return after
        waits = tuple(sorted({*self.waits, *after})) if after else self.waits
        ready = [self.events[index].end_seconds for index in waits]
        occupied = (*task.streams, *([f"link {task.link}"] if task.link else []))
        start = max((self.host, *ready, *(self.free.get(stream, 0.0) for stream in occupied)))
        seconds = self._stretched(start, task.seconds) if COMPUTE in task.streams else task.seconds
        self.free.update(dict.fromkeys(occupied, start + seconds))
        self.events.append(
            Event(task.name, task.streams[0], start, seconds, task.phase, task.bytes, task.module, task.reason,
                  task.instruction, waits, task.collective, task.axes)
        )  # fmt: skip
        if task.held_up:
            self.host = start + seconds
        if COMPUTE in task.streams:
            self.computing = len(self.events) - 1, task.seconds
        if task.collective:
            self._communicate(start, start + seconds)
        return (len(self.events) - 1,)

    def _stretched(self, start: float, seconds: float) -> float:
        """Duration of `seconds` of computation from `start` on: longer while something is communicated."""
        now, left, extra = start, seconds, 0.0
        for begin, end in sorted(talk for talk in self.talks if talk[1] > start):
            now, left = max(now, begin), left - max(0.0, begin - now)
            if left <= 0 or not self.slowdown:
                break
            done = min(left, max(0.0, end - now) / (1 + self.slowdown))
            now, left, extra = now + done * (1 + self.slowdown), left - done, extra + done * self.slowdown
        return seconds + extra

    def _communicate(self, start: float, end: float) -> None:
        """The last computation becomes slower too, where it runs at that time and nothing has waited for it."""
        self.talks.append((start, end))
        if self.computing is None:
            return
        index, seconds = self.computing
        event = self.events[index]
        self.talks = [talk for talk in self.talks if talk[1] > event.start_seconds]
        if event.end_seconds <= start or any(index in later.waits for later in self.events[index + 1 :]):
            return
        self.events[index] = event._replace(duration_seconds=self._stretched(event.start_seconds, seconds))
        self.free[COMPUTE] = self.events[index].end_seconds
