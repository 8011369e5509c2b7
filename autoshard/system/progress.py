"""Progress on stderr: a spinner on a terminal, elsewhere lines, ever more seldom, for what takes over two seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from autoshard.system.terminal import stdout_aside

SILENT_SECONDS = 2.0


@contextmanager
def step(label: str, quiet: bool = False) -> Iterator[None]:
    """Report on stderr that `label` is under way, if it lasts; nothing at all where `quiet`.

    What a user's model prints meanwhile goes to stderr where `quiet`: stdout holds the result alone.
    """
    if quiet:
        with stdout_aside():
            yield
        return
    with _spinner(label) if _is_terminal() else _lines(label):
        yield


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def _spinner(label: str) -> Iterator[None]:
    from rich.console import Console  # a tenth of a second: only where it is shown

    start = time.monotonic()
    with Console(file=sys.stderr).status(f"{label} …"):
        yield
    _report_long(label, start)


@contextmanager
def _lines(label: str) -> Iterator[None]:
    start, done = time.monotonic(), threading.Event()
    screen = sys.stderr  # as it is now: torch.export runs with another one
    thread = threading.Thread(target=_announce, args=(label, start, done, screen), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    _report_long(label, start)


def _announce(label: str, start: float, done: threading.Event, screen: TextIO) -> None:
    wait = SILENT_SECONDS
    while not done.wait(wait):
        print(f"{label} … {time.monotonic() - start:.0f} s", file=screen, flush=True)
        wait *= 2


def _report_long(label: str, start: float) -> None:
    elapsed = time.monotonic() - start
    if elapsed >= SILENT_SECONDS:
        print(f"{label}: {elapsed:.1f} s", file=sys.stderr, flush=True)
