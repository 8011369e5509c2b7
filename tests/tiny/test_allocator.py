"""Freed memory that stays: in a process of its own, for it holds to its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_RELEASED = """
import ctypes, resource, sys
from autoshard.system.allocator import freed_is_kept
if not freed_is_kept():
    sys.exit("not taken")
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(200 << 20)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, second = touched(), touched()
assert second < 0.1 * first + 20, (first, second)
"""


def run(**said: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    return subprocess.run([sys.executable, "-c", _RELEASED], capture_output=True, text=True, env=own | said)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_what_is_freed_is_there_for_the_next_table() -> None:
    done = run()
    if "not taken" in done.stderr:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr


def test_what_the_environment_says_goes_before() -> None:
    assert "not taken" in run(MALLOC_ARENA_MAX="2").stderr
