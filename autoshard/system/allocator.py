"""Where the memory of large tables comes from, and whether what is freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from enum import IntEnum


class _Parameter(IntEnum):
    """Parameters of glibc's mallopt, as malloc.h numbers them."""

    TRIM_THRESHOLD = -1
    TOP_PAD = -2
    MMAP_MAX = -4


# Bytes: free ones at the end of the heap never go back; as many are asked for at once as the system gives large pages.
_SETTINGS = {_Parameter.MMAP_MAX: 0, _Parameter.TRIM_THRESHOLD: 2**31 - 1, _Parameter.TOP_PAD: 64 << 20}


def freed_is_kept() -> bool:
    """For a process that plans and ends: tables of three axes are gigabytes, made and let go again and again, and to
    have each page zeroed anew took a tenth of such a plan. What is freed is there for the next table, never for others.

    False where nothing changed: another C library, or an environment that says how memory is given out.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    with contextlib.suppress(AttributeError, OSError):
        given_out = ctypes.CDLL(None).mallopt
        taken = [given_out(ctypes.c_int(name), ctypes.c_int(value)) for name, value in _SETTINGS.items()]
        return all(taken)
    return False
