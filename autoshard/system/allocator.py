"""Where the memory of large tables comes from, and whether what is freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt, as malloc.h numbers them
_ASKED_AT_ONCE = (
    64 << 20
)  # bytes: the system zeroes a page where it is first touched, and gives large ones to large asks
_NEVER = 2**31 - 1  # bytes that are free at the end of the heap, before they go back


def freed_is_kept() -> bool:
    """For a process that plans and ends: tables of three axes are gigabytes, made and let go again and again, and to
    have each page zeroed anew took a tenth of such a plan. What is freed is there for the next table, never for others.

    False where nothing changed: another C library, or an environment that says how memory is given out.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    with contextlib.suppress(AttributeError, OSError):
        given_out = ctypes.CDLL(None).mallopt
        known = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _ASKED_AT_ONCE))
        taken = [given_out(ctypes.c_int(name), ctypes.c_int(value)) for name, value in known]
        return all(taken)
    return False
