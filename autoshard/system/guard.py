"""Processes and temporary folders that end with this process, however it ends: a small process next to it waits for the
end of a pipe, ends the group of processes that it leads, and removes the folders that it was given."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WATCH = """
import json, os, shutil, signal, sys, time
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
folders = [json.loads(line) for line in sys.stdin if line.endswith("\\n")]
group = os.getpgrp()
if os.fork() == 0:
    os.setpgid(0, 0)
    os.killpg(group, signal.SIGKILL)  # with the process that waited, which leads it
    for _ in range(50):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not any(map(os.path.lexists, folders)):
            break
        time.sleep(0.1)
    os._exit(0)
signal.pause()
"""
_LOCK = threading.Lock()
_WATCHING: list[subprocess.Popen[str]] = []  # one, for all that is guarded now
_USES: list[object] = []


@contextlib.contextmanager
def guarded() -> Iterator[int | None]:
    """Within it there is a group for processes, which ends with this process; None where the system has no groups."""
    if not hasattr(os, "fork"):
        yield None
        return
    use = object()
    with _LOCK:
        if not _USES:
            command = [sys.executable, "-I", "-S", "-c", _WATCH]
            quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/"}
            _WATCHING[:] = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True, process_group=0, **quiet)]
        _USES.append(use)
        process = _WATCHING[0]
    try:
        yield process.pid
    finally:
        with _LOCK:
            _USES.remove(use)
            if not _USES and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
                process.wait()


@contextlib.contextmanager
def guarded_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder that is removed afterwards, or when this process ends."""
    with guarded() as group:
        folder = Path(tempfile.gettempdir()).absolute() / f"{prefix}{uuid.uuid4().hex[:12]}"
        if group is not None:
            with _LOCK:
                pipe = _WATCHING[0].stdin
                assert pipe is not None
                pipe.write(json.dumps(str(folder)) + "\n")  # before it is there
                pipe.flush()
        folder.mkdir(mode=0o700, parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def end_with_parent(parent: int) -> None:
    """End this copy of the process `parent` when that ends (on Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
