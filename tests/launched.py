"""Programs of packages, started as forks of processes that have imported torch: in milliseconds instead of seconds.

What is tested is the program, not torchrun or the start of an interpreter; some tests of each kind start the real ones.
Even and odd ranks hash strings differently, so that where ranks go by the order of a set they differ, and hang.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, Any

from tests.hangs import HANGS

SERVER = Path(__file__).with_name("fork_server.py")
VERIFICATION = ("autoshard.verification.ranks.rank_worker",)
POLL_SECONDS = 0.01
HASH_SEEDS = ("6", "7")  # {"dp", "tp"}, {"h", "w"}, {"cp", "dp"} have another order under each (tried: 1 to 8)


class Ended(subprocess.CompletedProcess[str]):
    """`returncode` is that of the first rank that failed; `codes`, of all."""

    codes: Sequence[int]


class Forked:
    """A running program, as much of `subprocess.Popen` as is used."""

    def __init__(self, status: Path) -> None:
        self._status, self.returncode = status, None
        while not self._lines():
            time.sleep(POLL_SECONDS)
        self.pid = int(self._lines()[0])

    def _lines(self) -> list[str]:
        try:
            return [line for line in self._status.read_text().splitlines(keepends=True) if line.endswith("\n")]
        except FileNotFoundError:
            return []

    def poll(self) -> int | None:
        if self.returncode is None and len(lines := self._lines()) > 1:
            self.returncode = int(lines[1])
        return self.returncode

    def send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def wait(self, timeout: float = HANGS) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            time.sleep(POLL_SECONDS)
        return int(self.poll() or 0)


@cache
def _server(modules: tuple[str, ...], odd: bool) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEEDS[odd]}
    command = [sys.executable, str(SERVER), *modules]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment, cwd=SERVER.parents[1])
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def fork(
    argv: Sequence[str], out: Path, err: Path, *, env: Mapping[str, str] | None = None, cwd: Path | None = None,
    group: int | None = None, modules: tuple[str, ...] = (), odd: bool = False, largest_file: int = 0,
) -> Forked:  # fmt: skip
    """`python ARGV...` as a fork. `out`, `err`: files that its words are added to. `largest_file`: bytes; a disk that
    is full for what is larger."""
    server, status = _server(modules, odd), _folder() / f"status{next(_NUMBERS)}"
    request = {
        "argv": [str(word) for word in argv], "env": dict(os.environ if env is None else env), "group": group,
        "cwd": str(cwd or Path.cwd()), "out": str(out), "err": str(err), "status": str(status),
        "largest_file": largest_file,
    }  # fmt: skip
    assert server.stdin is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return Forked(status)


_NUMBERS = count()


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def rank_process(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], group: int | None) -> Any:
    """For `rank_processes.start`, in its place."""
    path, odd = Path(f"/proc/{os.getpid()}/fd/{log.fileno()}"), int(environment["RANK"]) % 2 == 1
    return fork(command[1:], path, path, env=environment, group=group, modules=VERIFICATION, odd=odd)


def run(argv: Sequence[object], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Ended:
    """`python ARGV...` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        return _ended(Path(folder), [str(word) for word in argv], [dict(os.environ if env is None else env)], cwd)


def rank_environments(processes: int, port: int, env: Mapping[str, str]) -> list[dict[str, str]]:
    """What torchrun sets for each process of one node."""
    common = {
        "GLOO_SOCKET_IFNAME": "lo", **env, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def torchrun(
    script: Path, processes: int, *options: object, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    limit: float = HANGS,
) -> Ended:  # fmt: skip
    """`torchrun --nproc-per-node PROCESSES SCRIPT OPTIONS...`: the first rank that fails ends the others. `limit`:
    seconds, then all are killed, and TimeoutExpired."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", **(os.environ if env is None else env)}
    environments = rank_environments(processes, store.port, variables)
    with tempfile.TemporaryDirectory() as folder:
        return _ended(Path(folder), [str(script), *map(str, options)], environments, cwd, limit)


def _ended(
    folder: Path, argv: Sequence[str], environments: Sequence[Mapping[str, str]], cwd: Path | None,
    limit: float = HANGS,
) -> Ended:  # fmt: skip
    out, err = folder / "out", folder / "err"
    running = [fork(argv, out, err, env=env, cwd=cwd, odd=rank % 2 == 1) for rank, env in enumerate(environments)]
    end, stopped = time.monotonic() + limit, False
    while None in (codes := [process.poll() for process in running]):
        if any(codes) and not stopped:
            for process in running:
                process.send(signal.SIGTERM)
            stopped = True
        if time.monotonic() > end:
            for process in running:
                process.kill()
            raise subprocess.TimeoutExpired(list(argv), limit)
        time.sleep(POLL_SECONDS)
    exit_code = next((code for code in codes if code), 0)
    done = Ended(list(argv), exit_code, out.read_text("utf-8"), err.read_text("utf-8"))
    done.codes = [int(code or 0) for code in codes]
    return done
