"""Ranks of a package's train.py that a test sends signals to, or starts with variables of its own."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from tests.hangs import HANGS
from tests.launched import Forked, fork, rank_environments


@dataclass(frozen=True)
class Ranks:
    processes: list[Forked]
    files: list[Path]  # what each has said

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].send(number)

    def said(self) -> list[str]:
        return [file.read_text(encoding="utf-8") for file in self.files]

    def wait(self) -> list[int]:
        """Their exit codes. They end within 10 s of each other."""
        ended: list[float] = []
        try:
            while len(ended) < len(self.processes):
                codes = [process.poll() for process in self.processes]
                ended += [time.monotonic()] * (sum(code is not None for code in codes) - len(ended))
                assert not ended or time.monotonic() < ended[0] + 10, (codes, self.said())
                time.sleep(0.05)
        finally:
            for process in self.processes:
                process.kill()
        return [process.wait() for process in self.processes]


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clean = {"OMP_NUM_THREADS": "1", **os.environ}
    envs = [clean | one for one in environments] if environments else rank_environments(ranks, port, clean)
    files = [package.parent / f"rank-{port}-{rank}" for rank in range(len(envs))]
    for file in files:
        file.touch()
    words = [str(package / "train.py"), "--backend", "gloo", *map(str, options)]
    each = enumerate(zip(envs, files, strict=True))
    return Ranks(
        [fork(words, file, file, env=env, odd=rank % 2 == 1, largest_file=largest_file) for rank, (env, file) in each],
        files,
    )


def until(there: Path, ranks: Ranks) -> None:
    end = time.monotonic() + HANGS
    while not there.exists():
        assert all(process.poll() is None for process in ranks.processes), ranks.said()
        assert time.monotonic() < end
        time.sleep(0.02)
