"""Processes of a rank each: errors are told, nothing is left running."""

from __future__ import annotations

import time

import pytest

from autoshard.verify.processes import RankFailed, run_processes


def test_all_ranks_run() -> None:
    run_processes("timeit", ["-n", "1", "import os; assert os.environ['WORLD_SIZE'] == '3'"], 3, 60)


def test_the_failing_rank_and_its_error_are_named() -> None:
    code = "import os, time; assert os.environ['RANK'] != '1', 'a planted error'; time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1: AssertionError: a planted error"):
        run_processes("timeit", ["-n", "1", code], 2, 60)
    assert time.monotonic() - start < 30


def test_a_hang_ends() -> None:
    with pytest.raises(RankFailed, match="rank 0, 1 did not end within 1 s"):
        run_processes("timeit", ["-n", "1", "import time; time.sleep(60)"], 2, 1)
