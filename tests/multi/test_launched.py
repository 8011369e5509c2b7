"""Packages started by what `autoshard launch` writes, and by the variables of other launchers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.launchers.launch_files import launch_of, write_launch
from autoshard.launchers.starting import start_words
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from tests.hangs import HANGS
from tests.small_models import spec
from tests.training_ranks import start

OPTIONS = "--steps 2 --log-every 2 --save saved"
SLURM = Path(__file__).parents[1] / "slurm_local.sh"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "MS_", "RANK"))}
ROOT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    graph = capture(spec("residual"), {})
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2"), load_hardware("cpu-local")), 3)
    write_package(tmp_path / "package", emit(lower(plan, graph), plan, graph))
    for on, hosts in (("ssh", ("127.0.0.1", "localhost")), ("slurm", ("n1", "n2")), ("mpirun", ()), ("ray", ())):
        launch = launch_of(plan, on, None, hosts, OPTIONS, python=sys.executable)
        write_launch(launch, plan, tmp_path / "package")
        (tmp_path / f"{on}.json").write_text(json.dumps(start_words(launch, tmp_path / "package")))
    return tmp_path / "package"


def test_a_rank_imports_what_it_needs(tmp_path: Path) -> None:
    """No TorchScript for half a second, no inductor; what would hold a group is there before the group."""
    graph = capture(spec("residual"), {})
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=1"), load_hardware("cpu-local")), 3)
    write_package(tmp_path / "package", emit(lower(plan, graph), plan, graph))
    command = [sys.executable, "-X", "importtime", str(tmp_path / "package" / "train.py"), "--backend", "gloo"]
    command += ["--steps", "2", "--save", str(tmp_path / "saved")]
    done = subprocess.run(command, env=CLEAN | ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0 and "step 2: loss" in done.stdout, done.stdout + done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "torch.distributed.nn.functional" in imported
    assert not imported & {"torch.distributed.optim", "torch.distributed.tensor.debug", "torch._inductor.compile_fx"}


def words(package: Path, on: str) -> list[str]:
    command: list[str] = json.loads((package.parent / f"{on}.json").read_text())
    return command


def launched(package: Path, on: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = CLEAN | ROOT | environment
    return subprocess.run(words(package, on), env=variables, capture_output=True, text=True, timeout=HANGS)


@pytest.mark.slow
def test_ssh(package: Path) -> None:
    """`ssh` is a shell here: two nodes of one process, with torchrun on each."""
    folder = package.parent / "bin"
    folder.mkdir()
    (folder / "ssh").write_text('#!/bin/bash\nshift 2\nexec bash -c "$1"\n')
    (folder / "ssh").chmod(0o755)
    done = launched(package, "ssh", PATH=f"{folder}:{os.environ['PATH']}", PORT="29761")
    assert done.returncode == 0 and "step 2: loss" in done.stdout, done.stdout + done.stderr
    assert (package / "saved" / "step-2").is_dir()


@pytest.mark.slow
def test_ray(package: Path) -> None:
    """In a Ray of its own on this machine."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'autoshard[ps]'")
    (package.parent / "ray.json").write_text(json.dumps([sys.executable, *words(package, "ray")[1:]]))
    done = launched(package, "ray")
    assert done.returncode == 0 and "step 2: loss" in done.stdout + done.stderr, done.stdout + done.stderr
    assert (package / "saved" / "step-2").is_dir()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)")
def test_mpirun(package: Path) -> None:
    done = launched(package, "mpirun", MASTER_PORT="29762")
    assert done.returncode == 0 and done.stdout.count("step 2: loss") == 1, done.stdout + done.stderr


def test_variables_of_a_start_without_a_launcher(package: Path) -> None:
    """Two workers and who introduces them; then a rank table."""
    variables = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "29763"}
    roles = ("MS_SCHED", "MS_WORKER", "MS_WORKER")
    ranks = start(package, "--steps", 2, environments=[variables | {"MS_ROLE": role} for role in roles])
    assert ranks.wait() == [0, 0, 0], ranks.said()
    assert "".join(ranks.said()).count("step 2: loss") == 1 and not ranks.said()[0], ranks.said()

    devices = [{"device_id": str(rank), "device_ip": "10.0.0.1", "rank_id": str(rank)} for rank in range(2)]
    table = {"server_count": "1", "server_list": [{"server_id": "127.0.0.1", "device": devices}], "version": "1.0"}
    (package.parent / "table.json").write_text(json.dumps(table))
    variables = {"RANK_TABLE_FILE": str(package.parent / "table.json"), "MASTER_PORT": "29764"}
    ranks = start(package, "--steps", 2, environments=[variables | {"RANK_ID": str(rank)} for rank in range(2)])
    assert ranks.wait() == [0, 0] and "step 2: loss" in ranks.said()[0], ranks.said()
    ranks = start(package, environments=[variables | {"RANK_ID": "5"}])
    assert ranks.wait() == [2] and "no rank table with ranks 0 and 5" in ranks.said()[0]


@pytest.mark.slow  # Slurm itself is at times late by minutes on a machine with other work
def test_slurm_stops_saves_and_requeues(package: Path, tmp_path: Path) -> None:
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("Slurm is not installed (Debian: slurm-wlm, munge), or this is not root")
    script = package / "launch" / "slurm.sbatch"
    script.write_text(
        script.read_text().replace("--steps 2 --log-every 2", "--steps 100000 --save-every 5 --resume auto")
    )
    environment = CLEAN | ROOT | {"SLURM_CONF": str(tmp_path / "slurm" / "slurm.conf")}

    def called(*command: str) -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS).stdout

    def until(what: str, *command: str) -> str:
        end = time.monotonic() + 300
        while what not in (said := called(*command)):
            assert time.monotonic() < end, said
            time.sleep(0.3)
        return said

    try:
        subprocess.run(["bash", str(SLURM), "start", str(tmp_path / "slurm")], check=True, timeout=HANGS)
        job = called(*words(package, "slurm")).split()[-1]
        until("step-5", "ls", str(package / "saved"))
        called("scancel", "--signal=TERM", job)
        until("Restarts=1", "scontrol", "show", "job", job)
        said = (package / f"slurm-{job}.out").read_text()
        assert "SIGTERM: stopped after step " in said and "--resume auto goes on; exit code 75" in said, said
        assert said.count("Exited with exit code 75") == 2, "both nodes, and so it was requeued"
        called("scancel", job)
    finally:
        subprocess.run(["bash", str(SLURM), "stop", str(tmp_path / "slurm")], timeout=HANGS)
