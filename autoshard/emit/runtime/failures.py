"""Failure reports: the rank that knows a failure reports it, once. The others read its exit code and end silently."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from .start_variables import tell_left

POLL_SECONDS = 0.25  # a run ends within a second of a failure, and the store answers 4 small requests a second a rank
PATIENCE_SECONDS = 5.0  # rank 0 checks its own batch and reports within a second: five leave room for a busy machine
_COUNT, _CODE = "train/failures", "train/failure"


class Failures:
    """Failure reports of one run. A thread ends this process when another reports a failure, whatever it waits for."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.store: Any = None
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None

    def watch(self) -> None:
        """Starts watching; call it once there is a process group."""
        if self.ranks > 1:
            store = cast(Any, dist.distributed_c10d)._get_default_store()
            self.store = store.clone() if hasattr(store, "clone") else store  # one that nothing else waits in
            self.thread = threading.Thread(target=self._watch, daemon=True)
            self.thread.start()

    def close(self) -> None:
        self.closed.set()
        if self.thread is not None:
            self.thread.join()
        self.store = self.thread = None

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the process that had it
            while not self.closed.wait(POLL_SECONDS):
                if (code := self._reported()) is not None:
                    tell_left()
                    os._exit(code)

    def _reported(self) -> int | None:
        """Exit code that a failed rank has reported."""
        return int(self.store.get(_CODE)) if self.store is not None and self.store.check([_CODE]) else None

    def end(self, text: str, code: int, knows: bool) -> int:
        """Reports a failure, unless another rank has. `knows`: this one knows the cause, else it waits for another.

        With several processes it does not return, so that none waits for messages that will not come.
        """
        self.closed.set()
        first = knows or not self._another_reports()
        if first and self.store is not None:
            try:
                first = self.store.add(_COUNT, 1) == 1
            except RuntimeError:
                first = self.rank == 1  # rank 0 is gone, and the store with it
        if first:
            print(f"error{f' on rank {self.rank}' * bool(self.rank)}: {text}", file=sys.stderr, flush=True)
        if self.store is None:
            return code
        with contextlib.suppress(RuntimeError):
            if first:
                self.store.set(_CODE, str(code))
            self._another_reports()
            code = code if (reported := self._reported()) is None else reported
        time.sleep(4 * POLL_SECONDS)  # while the others read it, as the store may be this process's
        sys.stdout.flush()
        with contextlib.suppress(RuntimeError):
            tell_left()
        os._exit(code)

    def _another_reports(self) -> bool:
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(RuntimeError):
                if self._reported() is not None:
                    return True
            time.sleep(POLL_SECONDS)
        return False


def described(error: BaseException) -> str:
    """One line: the exception, and where it was raised, outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    stack = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename[:1] != "<"] or frames
    said = str(error).strip().partition("\n")[0]
    place = f" ({Path(stack[-1].filename).name}:{stack[-1].lineno}, in {stack[-1].name})" if stack else ""
    return f"{type(error).__name__}{f': {said}' * bool(said)}{place}"
