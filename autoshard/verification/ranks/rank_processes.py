"""Runs a module on all ranks as processes of this machine, as torchrun would, and ends only those."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from torch.distributed import TCPStore

from autoshard.emit.runtime.failures import PATIENCE_SECONDS, POLL_SECONDS
from autoshard.system.guard import guarded

_RANK = re.compile(r"^(?:\[rank\d+\]: ?)+")  # before each line of a traceback, once there is a process group
SECOND_PORT = "AUTOSHARD_SECOND_PORT"  # of another store, for a second process group


class RankFailed(RuntimeError):
    """A process ended with an error or did not end in time."""


def run_processes(
    module: str, arguments: Sequence[str], ranks: int, timeout_seconds: float, scratch: Path | None = None
) -> None:
    """Runs `python -m module arguments` on `ranks` processes. RankFailed names the rank and its last words.

    They end with this process. `scratch`: folder for their temporary files.
    """
    ports = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    with ExitStack() as stack:
        group = stack.enter_context(guarded())
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, "-P", "-m", module, *arguments]  # no file of the user hides one
                environment = _environment(rank, ranks, [store.port for store in ports])
                environment |= {} if scratch is None else {"TMPDIR": str(scratch)}
                processes.append(start(command, environment, log, group))
            _wait(processes, logs, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def start(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], group: int | None
) -> subprocess.Popen[bytes]:
    """Starts a process in `group`; its output goes to `log`."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, process_group=group, **quiet)


def _environment(rank: int, ranks: int, ports: Sequence[int]) -> dict[str, str]:
    """Environment that torchrun sets. The stores are ours, as its agent's is, so no port can be taken in between."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {"GLOO_SOCKET_IFNAME": loopback} | os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", SECOND_PORT: str(ports[1]),
    }  # fmt: skip


def _wait(processes: list[subprocess.Popen[bytes]], logs: Sequence[IO[bytes]], timeout_seconds: float) -> None:
    end, first_failure = time.monotonic() + timeout_seconds, 0.0
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        now = time.monotonic()
        first_failure = first_failure or (now if failed else 0.0)
        if None not in codes or (failed and now > first_failure + PATIENCE_SECONDS):
            break
        if now > end:
            waiting = [str(rank) for rank, code in enumerate(codes) if code is None]
            raise RankFailed(f"rank {', '.join(waiting)} did not end within {timeout_seconds:.0f} s")
        with suppress(subprocess.TimeoutExpired):  # ends with the process
            processes[codes.index(None)].wait(POLL_SECONDS)
    if failed:
        words = {rank: _last_words(logs[rank]) for rank in failed}
        raised = [rank for rank in failed if "rror" in words[rank]] or failed  # the others end without a word
        rank = next((rank for rank in raised if "onnection" not in words[rank]), raised[0])  # or only lost their peer
        raise RankFailed(f"rank {rank}: {words[rank] or f'ended with code {codes[rank]}'}")


def _last_words(log: IO[bytes]) -> str:
    """Error of the last traceback (type and message); without one, the last line that says something."""
    log.seek(0)
    lines = [_RANK.sub("", line).rstrip() for line in log.read().decode(errors="replace").splitlines()]
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    raised = [line for line in lines[begins[-1] + 1 :] if line[:1].strip()] if begins else []
    said = [line.strip() for line in lines if line and not line.startswith(("[W", "Exception raised"))]
    return next(iter(raised), said[-1] if said else "")
