"""Runs that a signal stops, that start again, or that fail on one rank: what is saved, and who reports what."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.fixed_step import with_step
from autoshard.search.fixed_styles import random_plan
from tests.forced import forced_plan
from tests.hangs import HANGS
from tests.slow import slow
from tests.small_models import spec
from tests.training_ranks import Ranks, start, until

LOADER = """
import time

import torch

def batch(number):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(8, 8, generator=generator) for _ in range(2))

class Stateful:  # it can't be asked for a batch twice
    number = 0
    def __iter__(self):
        while True:
            time.sleep(0.02)
            self.number += 1
            yield batch(self.number)
    def state_dict(self):
        return {"number": self.number}
    def load_state_dict(self, state):
        self.number = state["number"]

def raises(rank):
    for number in range(100):
        if rank == 1 and number == 4:
            raise ValueError("planted")
        yield batch(number)

def shorter(mesh):
    yield from map(batch, range(5 - mesh.global_rank))

def unequal(mesh):
    for number in range(100):
        yield batch(number + (mesh.global_rank if number == 4 else 0))

def waits():
    yield from map(batch, range(4))
    time.sleep(1000)
"""


def made(folder: Path, mesh: str, stages: int = 1) -> Path:
    graph = capture(spec("residual"), {})
    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("cpu-local")), 3)
    if stages > 1:
        plan = with_step(plan, graph, StepRequest(micro_batches=2, stages=stages))
    write_package(folder / "package", emit(lower(plan, graph), plan, graph))
    (folder / "data.py").write_text(LOADER, encoding="utf-8")
    return folder / "package"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("split"), "dp=2")


def data(package: Path, name: str) -> tuple[str, str]:
    return "--data", f"{package.parent}/data.py:{name}"


def losses(said: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): loss (\S+),", said, re.MULTILINE)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")  # left by one that fell silent


def stopped(ranks: Ranks, saved: Path) -> int:
    """After which step, once all have ended as they should."""
    assert ranks.wait() == [75, 75], ranks.said()
    (step,) = re.findall(rf"^.*: stopped after step (\d+), which is saved in {saved}: ", ranks.said()[0], re.MULTILINE)
    assert not ranks.said()[1], "one line is enough"
    return int(step)


@pytest.mark.parametrize("stages", [1, slow(2)])
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_as_if_nothing_was(
    tmp_path: Path, package: Path, stages: int
) -> None:
    folder, saved = package if stages == 1 else made(tmp_path, "dp=1", 2), tmp_path / "saved"
    options = (*data(folder, "Stateful"), "--save", saved, "--save-every", 3, "--keep", 2)
    ranks = start(folder, *options, "--steps", 100_000, "--resume", "auto")
    until(saved / "step-9", ranks)
    second = start(folder, *options, "--steps", 3)
    assert second.wait() == [2, 2]
    errors = "".join(second.said())
    assert errors.count("error") == 1 and "another job writes its checkpoints there: process " in errors, errors
    ranks.send(signal.SIGTERM, 1)
    step = stopped(ranks, saved)
    assert f"no checkpoint in {saved}: a fresh start" in ranks.said()[0]
    assert len(names(saved)) == 2 and f"step-{step}" in names(saved)

    refused = start(folder, *options, "--steps", step + 3)
    assert refused.wait() == [2, 2] and "it has checkpoints of another run" in "".join(refused.said())
    (saved / "step-100.partial").mkdir()  # as one leaves it that was killed while it saved
    (saved / "step-9999").mkdir()
    (saved / ".lock").write_text("process 1 on a host")
    os.replace(saved / f"step-{step}", saved / f"step-{step}.older")
    resumed = start(folder, *options, "--steps", step + 3, "--resume", "auto", "--save-async")
    assert resumed.wait() == [0, 0], resumed.said()
    assert f"resumed {saved}/step-{step} at step {step}" in resumed.said()[0]
    assert f"{saved}/step-9999 is left out: " in resumed.said()[0]
    assert len(names(saved)) == 3 and {f"step-{step + 3}", "step-9999"} < {*names(saved)}, names(saved)

    whole = start(folder, *data(folder, "Stateful"), "--steps", step + 3)
    assert whole.wait() == [0, 0]
    assert losses(ranks.said()[0]) | losses(resumed.said()[0]) == losses(whole.said()[0])


def test_all_ranks_of_several_axes_agree_on_the_step(tmp_path: Path) -> None:
    """Where the loss is summed over no axis, what they agree on is summed over each, in one order on all ranks."""
    graph = capture(spec("residual"), {})
    plan = forced_plan(graph, Mesh.parse("dp=2,tp=2"), lambda _, s: {one.kind for one in s.choices} == {"repeat"})
    write_package(tmp_path / "package", emit(lower(plan, graph), plan, graph))
    saved = tmp_path / "saved"
    ranks = start(
        tmp_path / "package", "--steps", 100_000, "--save", saved, "--save-every", 3, "--timeout", 20, ranks=4
    )
    until(saved / "step-3", ranks)
    ranks.send(signal.SIGTERM, 3)
    assert ranks.wait() == [75] * 4, ranks.said()


@pytest.mark.slow
def test_signals_to_the_launcher(package: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(package / "train.py"), "--backend", "gloo", *data(package, "Stateful")]
    command += ["--save", str(tmp_path / "saved"), "--resume", "auto", "--save-every", "3", "--steps", "100000"]
    run = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        end = time.monotonic() + HANGS
        while not (tmp_path / "saved" / "step-3").exists() and time.monotonic() < end:
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        said = run.communicate(timeout=HANGS)[0]
    finally:
        run.kill()
    assert run.returncode and "SIGINT: stopped after step " in said and "KeyboardInterrupt" not in said, said
    (step,) = re.findall(r"SIGINT: stopped after step (\d+)", said)
    assert f"step-{step}" in names(tmp_path / "saved")


def test_a_second_signal_ends_at_once(package: Path, tmp_path: Path) -> None:
    ranks = start(package, *data(package, "waits"), "--save", tmp_path / "saved", "--save-every", 1, "--prefetch", 0)
    until(tmp_path / "saved" / "step-4", ranks)
    ranks.send(signal.SIGTERM)
    ranks.send(signal.SIGTERM)  # a launcher and a scheduler send one each
    time.sleep(1.5)
    assert all(process.poll() is None for process in ranks.processes)
    ranks.send(signal.SIGINT)
    assert ranks.wait() == [130, 130]
    assert "step-4" in names(tmp_path / "saved")


FAULTS = {
    "raises": ("error on rank 1: ValueError: planted (data.py:", 1),
    "shorter": ("error on rank 1: --data: this rank's loader ended", 2),
    "unequal": ("error: --data: ranks that hold the same part of ", 2),
}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("together"), "tp=2")


@pytest.mark.parametrize(("fault", "log_every"), [*((fault, 1) for fault in FAULTS), slow("shorter", 10)])
def test_what_fails_on_one_rank_is_reported_by_the_one_that_knows(
    tmp_path: Path, together: Path, fault: str, log_every: int
) -> None:
    pkg = together
    message, code = FAULTS[fault]
    ranks = start(
        pkg, *data(pkg, fault), "--steps", 20, "--save", tmp_path / "saved", "--save-every", 2, "--log-every", log_every
    )
    assert ranks.wait() == [code, code], ranks.said()
    errors = [line for said in ranks.said() for line in said.splitlines() if not line.startswith(("step", "  try: "))]
    assert len(errors) == 1 and errors[0].startswith(message), ranks.said()
    assert names(tmp_path / "saved") == ["step-2", "step-4"]
    if fault == "shorter":
        assert "this rank's loader ended before step 5, and those of other ranks did not" in errors[0]


@pytest.mark.parametrize("background", [slow(False), True])
def test_a_full_disk(package: Path, tmp_path: Path, background: bool) -> None:
    saved = tmp_path / "saved"
    options = ("--save", saved, "--save-every", 2, *["--save-async"] * background)
    assert start(package, "--steps", 2, *options).wait() == [0, 0]
    ranks = start(package, "--steps", 6, "--resume", "auto", *options, largest_file=2000)
    assert ranks.wait() == [2, 2], ranks.said()
    errors = [line for said in ranks.said() for line in said.splitlines() if not line.startswith(("step", "resumed"))]
    assert len(errors) == 2 and "/step-4 could not be written, by rank " in errors[0], ranks.said()
    assert "the last one that is whole is step-2" in errors[0] and errors[1].startswith("  try: ")
    assert names(saved) == ["step-2"]


def test_a_rank_that_is_killed(package: Path, tmp_path: Path) -> None:
    ranks = start(package, *data(package, "Stateful"), "--steps", 100_000, "--save", tmp_path, "--save-every", 2)
    until(tmp_path / "step-2", ranks)
    ranks.send(signal.SIGKILL, 1)
    code, killed = ranks.wait()
    errors = [line for line in ranks.said()[0].splitlines() if not line.startswith("step")]
    assert (code, killed) == (1, -signal.SIGKILL) and len(errors) == 1 and errors[0].startswith("error: "), ranks.said()
