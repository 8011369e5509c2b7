"""A clock that exact work looks at while it lasts: OutOfTime is raised once it is over, or certain to be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from autoshard.solvers.options import Clock

_PER_SECOND = 300_000_000.0  # joint entries that elimination minimises
_CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)


class OutOfTime(Exception):
    """The clock of `watched` is over. Never seen by a person: who watches falls back on something quicker."""


@contextlib.contextmanager
def watched(clock: Clock) -> Iterator[None]:
    before = _CLOCK.set(clock)
    try:
        yield
    finally:
        _CLOCK.reset(before)


def check(work: float = 0.0) -> None:
    """Raises OutOfTime where the clock is over, or `work` (joint entries) can't be done in what it leaves."""
    clock = _CLOCK.get()
    if clock is not None and clock.left <= work / _PER_SECOND:
        clock.cut = True
        raise OutOfTime


def over() -> bool:
    """Whether the clock is over, for work that can leave off with what it has."""
    clock = _CLOCK.get()
    return clock is not None and clock.over
