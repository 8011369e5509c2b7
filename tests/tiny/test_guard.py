"""Processes and temporary folders end with the process that guards them, however and whenever that ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.system.guard import guarded, guarded_folder
from autoshard.system.isolated_process import apart

ROOT = Path(__file__).resolve().parents[2]
GUARDING = """
import subprocess, sys, time
from autoshard.system.guard import guarded, guarded_folder
print("begun", flush=True)
mark = sys.argv[1]
own = "import subprocess as s, sys, time; s.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]])"
with guarded_folder("autoshard-verify-") as folder, guarded() as group:
    (folder / "large").write_text("x" * 100_000)
    for _ in range(2):
        subprocess.Popen([sys.executable, "-c", own + "; time.sleep(600)", mark], process_group=group)
    print("all", flush=True)
    time.sleep(600)
"""
SECONDS = 30.0  # until all has ended, on a machine with much else to do


def _running(mark: str) -> list[str]:
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if mark in line and "<defunct>" not in line]


def _wait(mark: str, count: int, folder: Path) -> None:
    end = time.monotonic() + SECONDS
    while len(_running(mark)) != count or (not count and list(folder.iterdir())):
        assert time.monotonic() < end, (_running(mark), list(folder.iterdir()))
        time.sleep(0.05)


@contextlib.contextmanager
def _started(code: str, mark: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code, mark], stdout=subprocess.PIPE, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no groups of processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_killed_when_all_runs(tmp_path: Path, number: signal.Signals) -> None:
    mark, env = uuid.uuid4().hex, {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with _started(GUARDING, mark, env) as process:
        assert process.stdout is not None and process.stdout.readline()
        _wait(mark, 5, tmp_path)  # itself, its two, and one of each
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        process.wait(SECONDS)
    _wait(mark, 0, tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no groups of processes")
def test_killed_at_random_moments(tmp_path: Path) -> None:
    mark, env, moments = uuid.uuid4().hex, {**os.environ, "PYTHONPATH": str(ROOT)}, random.Random(0)
    env |= {"TMPDIR": str(tmp_path)}
    for _ in range(20):
        with _started(GUARDING, mark, env) as process:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.1 * moments.random())
            process.send_signal(signal.SIGKILL)
    _wait(mark, 0, tmp_path)


def test_one_watch_for_all_that_is_guarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with guarded() as one, guarded() as other, guarded_folder("x-") as folder:
        assert one == other and folder.is_dir() and folder.parent == tmp_path
    assert not list(tmp_path.iterdir())
    with guarded() as later:
        assert later != one


APART = """
import sys, time
from autoshard.system.isolated_process import apart
print("begun", flush=True)
apart(lambda: [time.sleep(1) for _ in range(600)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a copy of the end of its parent")
def test_a_copy_of_the_process_ends_with_it(tmp_path: Path) -> None:
    mark, env = uuid.uuid4().hex, {**os.environ, "PYTHONPATH": str(ROOT)}
    with _started(APART, mark, env) as process:
        assert process.stdout is not None and process.stdout.readline()
        _wait(mark, 2, tmp_path)
        process.send_signal(signal.SIGKILL)
    _wait(mark, 0, tmp_path)


def test_what_a_copy_of_the_process_says() -> None:
    assert apart(lambda: "said").text == "said"


def test_work_apart_that_hangs_ends() -> None:
    assert apart(lambda: str(time.sleep(600)), 0.1) == (None, False)
