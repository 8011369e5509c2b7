"""Work in a separate process: operators that don't check their operands can end it, a model's code leaves state."""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from autoshard.system.guard import end_with_parent

# What an operator does to its process by itself; other signals, and errors of Python, come from elsewhere.
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL} | {getattr(signal, "SIGBUS", signal.SIGSEGV)}
)


class Ending(NamedTuple):
    """`text` is None where the work did not come to its end; `crashed`: its own code ended the process."""

    text: str | None
    crashed: bool = False


def apart(work: Callable[[], str], most_seconds: float | None = None) -> Ending:
    """Result of `work`, run in a copy of this process, which ends after `most_seconds`.

    The copy has all that this process has (operators that a model registered), and costs no import. If a process can't
    be copied, the work is done here.
    """
    if not hasattr(os, "fork"):
        return Ending(work())
    reading, writing, parent = *os.pipe(), os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the copy uses none of them
        child = os.fork()
    if child == 0:
        end_with_parent(parent)
        os.close(reading)
        _answer(work, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            came, _, _ = select.select([pipe], [], [], most_seconds)
            if not came:
                os.kill(child, signal.SIGKILL)
            text = pipe.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if status == 0:
        return Ending(text.decode())
    return Ending(None, os.WIFSIGNALED(status) and os.WTERMSIG(status) in CRASHES)


def _answer(work: Callable[[], str], writing: int) -> NoReturn:
    """Answer in the copy: silent, on one thread (those of the original are not there), and never back into its code."""
    code = 1
    try:
        faulthandler.disable()
        gc.freeze()  # a collection would copy every page of the original
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        text = work().encode()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(text)
        code = 0
    finally:
        os._exit(code)
