"""Python's search for cycles of objects that nothing else refers to, while much is made and little of it in cycles."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

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


class _Parameter(IntEnum):
    """Parameters of glibc's mallopt, as malloc.h numbers them."""

    TRIM_THRESHOLD = -1
    TOP_PAD = -2
    MMAP_MAX = -4


# Bytes: free ones at the end of the heap never go back; as many are asked for at once as the system gives large pages.
_SETTINGS = {_Parameter.MMAP_MAX: 0, _Parameter.TRIM_THRESHOLD: 2**31 - 1, _Parameter.TOP_PAD: 64 << 20}


def keep_freed() -> bool:
    """Keep freed memory, for a process that plans and ends: tables of three axes are gigabytes, made and freed
    repeatedly; zeroing each page every time took a tenth of a plan. What is freed is there for the next table, never
    for others.

    False where nothing changed: another C library, or an environment that sets how memory is allocated.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    with contextlib.suppress(AttributeError, OSError):
        given_out = ctypes.CDLL(None).mallopt
        taken = [given_out(ctypes.c_int(name), ctypes.c_int(value)) for name, value in _SETTINGS.items()]
        return all(taken)
    return False
