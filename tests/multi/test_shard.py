"""`autoshard.shard` in an eager program under torchrun's environment, in float64, against the program without it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.verification.ranks.rank_processes import run_processes
from tests.hangs import HANGS
from tests.shard_worker import CASES

ROOT = Path(__file__).resolve().parents[2]


def test_function_and_module() -> None:
    run_processes("tests.shard_worker", ["function", "module", "computed_again", "frozen"], 2, 380)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_cases(ranks: int) -> None:
    """Together: to start processes takes longer than a case."""
    run_processes("tests.shard_worker", list(CASES), ranks, 580)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("shard_function", 4), ("operator_strategies", 8)])
def test_the_examples_run_split_and_alone(name: str, ranks: int) -> None:
    """The same losses on several processes as in one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(ROOT / "examples" / f"{name}.py")
    losses = []
    for start in (command, [sys.executable]):
        done = subprocess.run([*start, script], capture_output=True, text=True, timeout=HANGS, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        losses.append(re.findall(r"step \d: loss ([\d.]+)", done.stdout))
    assert len(losses[0]) == 3
    assert [float(x) for x in losses[0]] == pytest.approx([float(x) for x in losses[1]], abs=2e-6)
