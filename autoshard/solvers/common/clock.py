"""Clock that all work checks while it lasts: OutOfTime is raised once it is over, or certain to be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from autoshard.solvers.common.solver_options import Clock

_PER_SECOND = 300_000_000.0  # joint entries that elimination minimises
_SURE = 0.1  # of the time there is, after which the pace so far tells how long the rest takes
_CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class OutOfTime(Exception):
    """The clock of `watched` is over. Never seen by a user: who watches has something else, or less."""


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
    """True if the clock is over, for work that can leave off with what it has."""
    clock = _CLOCK.get()
    return clock is not None and clock.over


def attempt(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """Result of the work; None if time runs out in it."""
    try:
        return work(*args, **kwargs)
    except OutOfTime:
        return None


class Pace:
    """Checks the clock in a loop of `total` steps of about the same length.

    Raises OutOfTime once it is over, and as soon as the steps done so far show that the rest will not be in time.
    """

    def __init__(self, total: int) -> None:
        self.clock, self.total = _CLOCK.get(), total
        self.started = self.clock.seconds if self.clock else 0.0

    def step(self, done: int) -> None:
        """`done`: how many steps are behind."""
        clock = self.clock
        if clock is None:
            return
        left = clock.left
        taken = clock.seconds - self.started
        late = taken > _SURE * (taken + left) and taken * (self.total - done) > left * done
        if left <= 0.0 or late:
            clock.cut = True
            raise OutOfTime
