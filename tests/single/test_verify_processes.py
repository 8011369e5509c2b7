"""Processes of a rank each: errors are told, nothing is left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.verification.ranks.rank_processes import RankFailed, run_processes

pytestmark = pytest.mark.processes


def test_all_ranks_run() -> None:
    run_processes("timeit", ["-n", "1", "import os; assert os.environ['WORLD_SIZE'] == '3'"], 3, 500)


def test_a_file_in_the_current_folder_hides_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datetime.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    run_processes("calendar", [], 1, 500)


def test_the_failing_rank_and_its_error_are_named() -> None:
    code = "import os, time; assert os.environ['RANK'] != '1', 'a planted error'; time.sleep(9999)"
    with pytest.raises(RankFailed, match="rank 1: AssertionError: a planted error"):
        run_processes("timeit", ["-n", "1", code], 2, 9999)  # the other is not waited for


LOG = """Traceback (most recent call last):
  File "a.py", line 1
ValueError: the first
During handling of the above exception, another exception occurred:
Traceback (most recent call last):
  File "b.py", line 2
AttributeError: no attribute 'swish'
and a second line of its message
[W1121 socket.cpp:1] a warning
"""


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_the_error_of_a_traceback_is_told_with_and_without_a_process_group(prefix: str) -> None:
    code = f"import sys; sys.stderr.write({LOG!r}.replace(chr(10), chr(10) + {prefix!r})); sys.stderr.flush(); "
    with pytest.raises(RankFailed, match=r"^rank 0: AttributeError: no attribute 'swish'$"):
        run_processes("timeit", ["-n", "1", f"{code} import os; os._exit(1)"], 1, 500)


def test_a_hang_ends() -> None:
    with pytest.raises(RankFailed, match="rank 0, 1 did not end within 1 s"):
        run_processes("timeit", ["-n", "1", "import time; time.sleep(9999)"], 2, 1)
