"""The runtime on real processes (gloo): a compact self-check, a checkpoint saved on four and loaded on two and one."""

from __future__ import annotations

import os
from pathlib import Path

from tests import launched

RUNTIME = Path(__file__).parents[2] / "autoshard" / "emit" / "runtime"
SCRIPT = Path(__file__).with_name("runtime_selfcheck.py")


def launch(world: int, path: Path, *arguments: str) -> None:
    """Starts `world` processes as torchrun does, or plain python for one.

    `path`: where they find the runtime.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"}
    if world > 1:
        done = launched.torchrun(SCRIPT, world, *arguments, env=env)
    else:
        done = launched.run([SCRIPT, *arguments], env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_functions_on_four_processes_and_checkpoints_on_fewer(tmp_path: Path) -> None:
    saved, copy = tmp_path / "saved", tmp_path / "copy"
    saved.mkdir()
    (copy / "runtime").mkdir(parents=True)
    for file in RUNTIME.glob("*.py"):  # read as emission reads them
        (copy / "runtime" / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    launch(4, copy, "save", "2x2", str(saved))
    assert sorted(p.name for p in saved.iterdir()) == ["blocked-False", "blocked-True", "table"]
    launch(2, copy, "load", "1x2", str(saved))
    launch(1, copy, "load", "1x1", str(saved))
