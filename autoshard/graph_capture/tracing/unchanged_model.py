"""Guards the process around a user's code: whatever that does is put back, and it can't end the process unseen."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from autoshard.errors import UserError

ENDS = ("_exit", "abort", "execv", "execve")  # of `os`: nothing after them would run, not even our message


def is_not_guarded(error: BaseException) -> bool:
    """An error that is not the guarded code's: ours, or a user's Ctrl-C."""
    return isinstance(error, UserError | KeyboardInterrupt)


_guarding: list[int] = []  # processes that are within


@contextlib.contextmanager
def guarded(script: str = "") -> Iterator[None]:
    """Restore folder, streams, command line, warnings, SIGINT, gradient mode and default dtype after the outermost one:
    what a file sets, its functions see. `os._exit` and its like raise SystemExit; a child that the code forked ends
    here. `script` stands for it on the command line.
    """
    if os.getpid() in _guarding:
        yield
        return
    _guarding.append(os.getpid())
    try:
        with _put_back(script):
            yield
    finally:
        _guarding.clear()


@contextlib.contextmanager
def _put_back(script: str) -> Iterator[None]:
    process, folder, streams, words = os.getpid(), os.getcwd(), (sys.stdout, sys.stderr), sys.argv
    originals = {name: getattr(os, name) for name in ENDS}
    interrupt = signal.getsignal(signal.SIGINT)
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()

    def end(name: str) -> Any:
        def ended(*arguments: Any) -> NoReturn:
            if os.getpid() != process:  # a child of the code's own: its business
                originals[name](*arguments)
            raise SystemExit(f"os.{name}")

        return ended

    for name in ENDS:
        setattr(os, name, end(name))
    sys.argv = [script or words[0]]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if os.getpid() != process:
            originals["_exit"](1)
        for name, function in originals.items():
            setattr(os, name, function)
        (sys.stdout, sys.stderr), sys.argv = streams, words
        os.chdir(folder)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)
