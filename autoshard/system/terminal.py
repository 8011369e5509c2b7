"""The standard streams as a user's shell gave them: closed, ASCII only, a full disk, a closed pipe."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from autoshard.errors import UsageError


def prepare() -> None:
    """Streams that can be written to, whatever the text. UsageError where stdout is closed.

    A closed descriptor is taken by /dev/null, so that no file of ours gets its number and what is printed.
    """
    if not (closed := [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]):
        return _lenient()
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # the lowest free number: that of a closed stream
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        raise UsageError("standard output is closed: there is nowhere to print the result", "> FILE, or > /dev/null")
    _lenient()


def _lenient() -> None:
    """Write a character that an encoding lacks as its number, `\\xb5`, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def speaks_unicode() -> bool:
    """True if stdout can show more than ASCII."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"


def flush() -> None:
    """Flush stdout. OSError if it can't be; the interpreter then does not try once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        raise


@contextmanager
def stdout_aside() -> Iterator[None]:
    """Send to stderr what is printed meanwhile, by Python, by C or by a child process: stdout is for the result."""
    if not _is_descriptor_1():
        with redirect_stdout(sys.stderr):
            yield
        return
    sys.stdout.flush()
    saved_fd = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved_fd, 1)
        os.close(saved_fd)


def _is_descriptor_1() -> bool:
    try:
        return sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):  # a test's or a notebook's stream
        return False
