"""Options of a solver, and the clock that it checks while it works."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class Computing:
    """CPU seconds of this process, of all its threads, and of the helper processes that have ended; asked of the system
    at most 50 times a second, because that is slow."""

    def __init__(self) -> None:
        self.read_at = time.perf_counter()
        self.value = cpu_seconds()

    def __call__(self) -> float:
        now = time.perf_counter()
        if now - self.read_at > 0.02:
            self.read_at, self.value = now, cpu_seconds()
        return self.value


def cpu_seconds() -> float:
    helpers = os.times()
    return time.process_time() + helpers.children_user + helpers.children_system


@dataclass
class Clock:
    """Counts from its making. `over` is set by the limit, or by `stop` (Ctrl-C): then the best so far is returned.

    `timer`: a Computing counts what this process computes, whatever else the machine does. `cut`: something was left
    undone for want of time.
    """

    limit_seconds: float = float("inf")
    stopped: bool = False
    timer: Callable[[], float] = time.perf_counter
    cut: bool = False
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.timer()

    @property
    def seconds(self) -> float:
        return self.timer() - self.started

    @property
    def left(self) -> float:
        """Seconds until the limit, never negative; 0 once stopped."""
        return 0.0 if self.stopped else max(0.0, self.limit_seconds - self.seconds)

    @property
    def over(self) -> bool:
        """Asked by who then leaves off: `cut` is set."""
        over = self.left <= 0.0
        self.cut |= over
        return over

    def stop(self) -> None:
        self.stopped = True


@dataclass
class PartialClock(Clock):
    """A clock within another one: over when either is."""

    whole: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.timer = self.whole.timer
        super().__post_init__()

    @property
    def left(self) -> float:
        remaining = 0.0 if self.stopped else max(0.0, self.limit_seconds - self.seconds)
        return min(remaining, self.whole.left)


@dataclass(frozen=True, eq=False)
class Options:
    """`engine` of the ilp solver: "highs", or "pulp:CBC" and the like. `pinned`: node -> its choice, fixed by a user;
    propagation starts there. `budget_entries`: the most table entries that dp holds (8 bytes each), None: its own.
    `rough`: a good plan is enough for dp, without a tight bound. `unfit`: the structures, whatever the prices, of which
    dp found that no exact tables fit; it adds to them, and a rough plan does not try that again. `cache`: what a solver
    keeps for problems of the same structure, by the solver's name for it."""

    clock: Clock = field(default_factory=Clock)
    engine: str = "highs"
    pinned: Mapping[int, int] = field(default_factory=dict)
    budget_entries: int | None = None
    rough: bool = False
    unfit: set[int] = field(default_factory=set)
    cache: dict[str, object] = field(default_factory=dict)


@contextlib.contextmanager
def interruptible(clock: Clock) -> Iterator[Clock]:
    """Within it the first Ctrl-C stops the clock, and the second one the program."""
    if threading.current_thread() is not threading.main_thread():
        yield clock
        return
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:  # a background job: the terminal's Ctrl-C is not meant for it
        yield clock
        return

    def stop(*_: Any) -> None:
        clock.stop()
        signal.signal(signal.SIGINT, before)
        print("stopping: the best plan so far is kept; Ctrl-C once more ends at once", file=sys.stderr)

    signal.signal(signal.SIGINT, stop)
    try:
        yield clock
    finally:
        signal.signal(signal.SIGINT, before)
