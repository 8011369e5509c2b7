"""Handles SIGTERM and SIGINT. train.py ends the run after the running step, the same one on all ranks: which rank
received a signal travels with the loss (`nonfinite`).

A thread receives them: Python's own handlers don't run while a process waits in a collective.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

EXIT_STOPPED = os.EX_TEMPFAIL  # 75: nothing is wrong, start it again; what a scheduler requeues
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SECONDS = 1.0  # a launcher forwards within milliseconds what the scheduler sends to all: both are one signal


class StopSignals:
    """Signals received. `closing`: everything is saved, and the process ends by itself."""

    def __init__(self) -> None:
        self.name, self.at, self.closing = "", 0.0, False

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if not self.name:
            self.name, self.at = signal.Signals(number).name, now
            if not dist.is_initialized():  # it may wait for processes that never come
                os._exit(EXIT_STOPPED)
        elif now - self.at > SAME_SECONDS and not self.closing:
            os._exit(128 + number)

    def listen(self, heard: socket.socket) -> None:
        while numbers := heard.recv(64):  # a byte a signal
            for number in numbers:
                if number in SIGNALS:
                    self._hear(number)


@contextlib.contextmanager
def listening() -> Iterator[StopSignals]:
    """Context of a run. A second signal ends the process at once."""
    stop = StopSignals()
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield stop
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=stop.listen, args=(reader,), daemon=True)
    thread.start()
    if not _HOOKS:
        os.register_at_fork(after_in_child=_forget)
        _HOOKS.append(True)
    _HERE.append(os.getpid())
    try:
        yield stop
    finally:
        _HERE.clear()
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()  # which ends the thread
        thread.join()
        reader.close()


_HERE: list[int] = []  # the process that listens
_HOOKS: list[bool] = []  # can't be taken back


def _forget() -> None:
    """Restores default handlers in a fork, e.g. a loader's worker, which handles its own signals."""
    if _HERE:
        _HERE.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
