"""Python's search for cycles of objects that nothing else refers to, while much is made and little of it in cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (50_000, 20, 100)  # objects made between two searches, and of these between two that look further


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """A plan's problems and programs are millions of objects: looking through them took 5 to 9 % of a large one."""
    before = gc.get_threshold()
    if not 0 < before[0] < _SELDOM[0]:  # 0: the caller wants no search at all; as seldom: another thread plans
        yield
        return
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
