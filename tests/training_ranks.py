"""Ranks of a package's train.py, as forks of one process that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.checkpoint_worker import PRELOAD
from tests.hangs import HANGS


@dataclass(frozen=True)
class Ranks:
    processes: list[BaseProcess]
    files: list[Path]  # what each has said

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

    def said(self) -> list[str]:
        return [file.read_text(encoding="utf-8") for file in self.files]

    def wait(self) -> list[int]:
        """Their exit codes. They end within 10 s of each other."""
        ended: list[float] = []
        try:
            while len(ended) < len(self.processes):
                codes = [process.exitcode for process in self.processes]
                ended += [time.monotonic()] * (sum(code is not None for code in codes) - len(ended))
                assert not ended or time.monotonic() < ended[0] + 10, (codes, self.said())
                time.sleep(0.05)
        finally:
            for process in self.processes:
                process.kill()
        return [process.exitcode or 0 for process in self.processes]


def start(
    package: Path,
    *options: object,
    ranks: int = 2,
    largest_file: int = 0,
    environments: list[dict[str, str]] | None = None,
) -> Ranks:
    """`train.py --backend gloo OPTIONS`. `largest_file`: bytes; a disk that is full for what is larger.

    `environments`: of each process, in place of torchrun's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = environments or [_environment(rank, ranks, port) for rank in range(ranks)]
    files = [package.parent / f"rank-{port}-{rank}" for rank in range(len(own))]
    words = ["train.py", "--backend", "gloo", *map(str, options)]
    each = [(package, words, *one, largest_file) for one in zip(own, files, strict=True)]
    processes: list[BaseProcess] = [context.Process(target=_rank, args=one) for one in each]
    for process in processes:
        process.start()
    return Ranks(processes, files)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _rank(package: Path, words: list[str], own: dict[str, str], file: Path, largest_file: int) -> None:
    os.environ.update(own, OMP_NUM_THREADS="1")
    said = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = (os.fdopen(one, "w", closefd=False) for one in (1, 2))
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.argv = words
    sys.path.insert(0, str(package))
    runpy.run_path(str(package / "train.py"), run_name="__main__")


def until(there: Path, ranks: Ranks) -> None:
    end = time.monotonic() + HANGS
    while not there.exists():
        assert all(process.is_alive() for process in ranks.processes), ranks.said()
        assert time.monotonic() < end
        time.sleep(0.02)
