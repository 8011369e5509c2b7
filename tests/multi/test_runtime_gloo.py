"""The runtime on real processes (gloo): a compact self-check, a checkpoint saved on four and loaded on two and one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.hangs import HANGS

RUNTIME = Path(__file__).parents[2] / "autoshard" / "emit" / "runtime"
SCRIPT = Path(__file__).with_name("runtime_selfcheck.py")


def launch(world: int, path: Path, *arguments: str, timeout_seconds: float = HANGS) -> None:
    """Starts `world` processes as torchrun does, or plain python for one; the output of those that fail is shown.

    `path`: where they find the runtime.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"}
    if world > 1:
        common |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else common,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = {}
    try:
        for rank, process in enumerate(processes):
            outputs[rank] = process.communicate(timeout=timeout_seconds)[0]
    finally:
        for process in processes:
            process.kill()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    assert not failed, "\n".join(f"--- rank {rank}\n{outputs[rank][-3000:]}" for rank in failed)


def test_all_functions_on_four_processes_and_checkpoints_on_fewer(tmp_path: Path) -> None:
    saved, copy = tmp_path / "saved", tmp_path / "copy"
    saved.mkdir()
    (copy / "runtime").mkdir(parents=True)
    for file in RUNTIME.glob("*.py"):  # read as emission reads them
        (copy / "runtime" / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    launch(4, copy, "save", "2x2", str(saved))
    assert sorted(p.name for p in saved.iterdir()) == ["blocked-False", "blocked-True"]
    launch(2, copy, "load", "1x2", str(saved))
    launch(1, copy, "load", "1x1", str(saved))
