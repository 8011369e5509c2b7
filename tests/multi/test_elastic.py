"""A package with plans for several numbers of devices: a job goes on with more or fewer, and computes the same."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import autoshard
from tests.hangs import HANGS
from tests.launched import run
from tests.slow import slow
from tests.training_ranks import start, until

MODEL = """
import time

import torch
from torch import nn

ROWS = 96

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)

def batch(number, rows=ROWS):
    source = torch.Generator().manual_seed(number)
    return torch.randn(rows, 64, generator=source).double(), torch.randint(10, (rows,), generator=source)

def build(rows=ROWS):
    return Model().double(), batch(0, rows)

class Stateful:
    number = 0
    def __iter__(self):
        while True:
            time.sleep(0.05)
            self.number += 1
            yield batch(self.number)
    def state_dict(self):
        return {"number": self.number}
    def load_state_dict(self, state):
        self.number = state["number"]
"""
STEPS = 12


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For 3 and 2 devices in one step, for 1 in two micro-batches."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")

    def planned(mesh: str, **settings: int) -> autoshard.Plan:
        pins = {"x": "Shard(0)@dp", "y": "Shard(0)@dp"} if mesh != "dp=1" else ()
        common = {"hardware": "cpu-local", "mesh": mesh, "pins": pins, "cache": False}
        rows = 96 // settings.get("micro_batches", 1)
        return autoshard.plan(f"{folder / 'model.py'}:build", arguments={"rows": rows}, **common, **settings)

    others = planned("dp=2"), planned("dp=1", micro_batches=2)
    autoshard.write(planned("dp=3"), folder / "package", also=others)
    torch.save(runpy.run_path(str(folder / "model.py"))["Model"]().double().state_dict(), folder / "start.pt")
    return folder / "package"


def expected(package: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process, undisturbed."""
    module = runpy.run_path(str(package.parent / "model.py"))
    model, losses = module["Model"]().double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        loss = model(*module["batch"](number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def options(package: Path, saved: Path, steps: int) -> list[object]:
    data = f"{package.parent / 'model.py'}:Stateful"
    cli = ["--data", data, "--lr", "1e-3", "--max-norm", "inf", "--weights", package.parent / "start.pt"]
    return [*cli, "--steps", steps, "--save", saved, "--save-every", 2, "--resume", "auto", "--log-json", saved / "log"]


def check(package: Path, saved: Path, steps: int) -> None:
    losses, weights = expected(package, steps)
    rows = [json.loads(line) for line in (saved / "log").read_text().splitlines()]
    assert {row["step"] for row in rows} == {*range(1, steps + 1)}
    for row in rows:  # what is logged is summed over devices in float32
        assert row["loss"] == pytest.approx(losses[row["step"] - 1], rel=1e-6), row
    out = saved / "weights.pt"
    assert run([package / "convert.py", "--to-original", saved, out]).returncode == 0
    for name, value in torch.load(out).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-12)


def test_a_job_goes_on_with_as_many_devices_as_there_are(package: Path, tmp_path: Path) -> None:
    """3; one is killed; 2; 1, in micro-batches of the same batches; 3, and one too many that waits."""
    ranks = start(package, *options(package, tmp_path, 100), ranks=3)
    until(tmp_path / "step-2" / "training.json", ranks)
    ranks.send(signal.SIGKILL, 1)
    assert 0 not in ranks.wait(), ranks.said()
    done = max(int(path.name[5:]) for path in tmp_path.glob("step-*") if (path / "training.json").exists())
    for count, said in (
        (2, "2 devices: the plan in devices_2"),
        (1, "1 device: the plan"),
        (4, "the plan is for 3, 1 wait"),
    ):
        ranks = start(package, *options(package, tmp_path, done + 2), ranks=count)
        assert ranks.wait() == [0] * count, ranks.said()
        assert f"resumed {tmp_path}/step-{done} at step {done}" in ranks.said()[0] and said in "".join(ranks.said())
        done += 2
    check(package, tmp_path, done)


@pytest.mark.parametrize("launcher", [slow("srun"), "without a launcher"])
def test_whoever_starts_the_processes_one_tells_the_plan(package: Path, launcher: str) -> None:
    """Once, and before the first step; without a launcher ranks are known when all are there."""
    variables = {"MASTER_PORT": "29767", "MS_WORKER_NUM": "2", "MS_SCHED_PORT": "29768"}
    if launcher == "srun":
        variables = {"MASTER_PORT": "29767", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    numbers = [{name: str(rank) for name in ("SLURM_PROCID", "SLURM_LOCALID")} for rank in range(2)]
    environments = [variables | (number if launcher == "srun" else {}) for number in numbers]
    ranks = start(package, "--steps", 1, environments=environments)
    assert ranks.wait() == [0, 0], ranks.said()
    output = "".join(ranks.said())
    assert re.search("^2 devices: the plan in devices_2$.*^step 1: loss", output, re.M | re.S), output
    assert output.count("the plan in") == 1, output


def test_too_few_devices(package: Path, tmp_path: Path) -> None:
    """The smallest plan of two is for 2."""
    hidden = (package / "devices_1").rename(package.parent / "hidden")
    try:
        ranks = start(package, "--steps", 1, ranks=1)
        assert ranks.wait() == [2] and "(and there are plans for 2 devices) needs 3 processes" in ranks.said()[0]
    finally:
        hidden.rename(package / "devices_1")


@pytest.mark.slow  # nodes are waited for: two minutes
def test_nodes_that_are_lost_and_come_back(package: Path, tmp_path: Path) -> None:
    """3 agents of torchrun as `autoshard launch` starts them; one is killed with its rank, then started again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "20", "--rdzv-backend", "c10d"]
    words += ["--rdzv-id", "e", "--rdzv-endpoint", f"localhost:{port}", package / "train.py", "--backend", "gloo"]
    words += options(package, tmp_path, 60)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
        with (tmp_path / "said").open("ab") as said:
            return subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True, env=environment)

    def reached(step: int) -> None:
        end = time.monotonic() + HANGS
        while not re.search(rf'"step": {step},', (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
            assert time.monotonic() < end and agents[0].poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.1)

    agents = [agent()]
    time.sleep(1)  # the first has the rendezvous
    agents += [agent(), agent()]
    try:
        reached(7)
        for pid in map(int, subprocess.run(["pgrep", "-P", str(agents[2].pid)], capture_output=True).stdout.split()):
            os.kill(pid, signal.SIGKILL)
        agents[2].kill()
        agents[2].wait()
        reached(25)
        agents[2] = agent()
        reached(60)
        assert [process.wait(HANGS) for process in agents] == [0, 0, 0]
    finally:
        for process in agents:
            process.kill()
            process.wait()
    said = (tmp_path / "said").read_text()
    assert "2 devices: the plan in devices_2" in said
    check(package, tmp_path, 60)
