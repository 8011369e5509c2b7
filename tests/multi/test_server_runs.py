"""Parameter servers as processes of Ray: workers and servers that are killed, one that joins, saving and resuming."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.verification.ranks.loaded_package import load_package
from examples.dlrm import build
from tests.hangs import HANGS

DLRM = str(Path(__file__).parents[2] / "examples" / "dlrm.py") + ":build"
SIZES = {"batch": 32, "rows": 200, "width": 8}
WORKER, SERVER = "WorkerActor", "ServerActor"


def package_of(folder: Path, **options: Any) -> Path:
    servers = {"parameter_servers": 2, "workers": 2} | options
    plan = autoshard.plan(DLRM, arguments=SIZES, hardware="a100-80g-sxm", **servers)
    return autoshard.write(plan, folder)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package_of(tmp_path_factory.mktemp("ray") / "package")


def actors(package: Path, kind: str) -> list[int]:
    """The processes of a package's actors."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            words, variables = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if words.startswith(f"ray::{kind}".encode()) and str(package).encode() in variables:
            pids.append(int(entry.name))
    return pids


def run(package: Path, *options: object, at_step: Callable[[int], str] = lambda step: "") -> list[str]:
    """The lines of a run. `at_step`: the kind of actor of which one is killed after a step, the first time."""
    command = [sys.executable, str(package / "train_servers.py"), "--device", "cpu", *map(str, options)]
    lines, last = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if (match := re.match(r"step (\d+):", line)) and int(match[1]) > last:
                last = int(match[1])
                kind = at_step(last)
                for victim in random.Random(last).sample(actors(package, kind), 1) if kind else ():
                    os.kill(victim, signal.SIGKILL)
        code = process.wait(HANGS)
    assert code == 0, "".join(lines)
    return lines


def figures(lines: list[str]) -> dict[int, tuple[str, str]]:
    """Loss and norm of each step, as it was done last."""
    matches = (re.match(r"step (\d+): loss (\S+), gradient norm (\S+),", line) for line in lines)
    return {int(match[1]): (match[2], match[3]) for match in matches if match}


def undisturbed(package: Path, steps: int) -> tuple[dict[int, tuple[str, str]], dict[str, torch.Tensor]]:
    """The same run in one process, without Ray: figures and parameters."""
    loaded = load_package(package)
    server_run, model = loaded.server_run, loaded.model
    plan = types.SimpleNamespace(**vars(loaded.server_plan))
    local_run = server_run.InProcess(model.build_model, model.MESH, plan, model.OPTIMIZER, model.MICRO_BATCHES, {})
    batches, by_step = loaded.batches.synthetic_batches(local_run.workers[0].mesh, 0, 0), {}
    for step in range(1, steps + 1):
        works = server_run.share_works(
            step, [next(batches) for _ in range(model.MICRO_BATCHES)], [()] * model.MICRO_BATCHES, None
        )
        losses = [result.loss for result in local_run.compute(server_run.Dealer(), works)]
        norm = server_run.update_norm(local_run.client, 0, step)
        server_run.apply_update(local_run.client, 0, step, norm, 1.0, (3e-4, 0.01))
        by_step[step] = (f"{sum(losses) / len(losses):.6f}", f"{norm:.4f}")
    return by_step, local_run.values()


HELD_OUT = """
import torch

def batches():
    torch.manual_seed(1)
    for _ in range(3):
        yield torch.randn(32, 13), torch.randint(200, (32, 4, 4)), torch.randint(200, (32, 4)), torch.rand(32)
"""


@pytest.mark.slow
def test_a_worker_and_a_server_are_killed(package: Path, tmp_path: Path) -> None:
    """The losses are those of an undisturbed run, and so are all bits of the parameters. The server ends while workers
    evaluate: what they find in the end is the loss of the original model."""
    kills, held_out = {2: WORKER, 6: SERVER}, tmp_path / "held_out.py"
    held_out.write_text(HELD_OUT)
    options = ("--steps", 9, "--save", tmp_path / "saved", "--save-every", 4, "--workers", "2")
    options += ("--eval-data", f"{held_out}:batches", "--eval-every", 3)
    lines = run(package, *options, at_step=lambda step: kills.get(step, ""))
    expected, values = undisturbed(package, 9)
    assert figures(lines) == expected, "".join(lines)
    text = "".join(lines)
    assert re.search(r"worker \d was lost in step [345]", text) and re.search(r"worker \d joined in step", text), text
    lost = re.search(r"a server was lost in step \d; all are back at step 4: (\d) steps are lost", text)
    assert lost and int(lost[1]) <= 4, text
    command = [sys.executable, str(package / "train_servers.py"), "--to-original"]
    subprocess.run([*command, str(tmp_path / "saved"), str(tmp_path / "model.pt")], check=True, timeout=HANGS)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state.keys() == values.keys() and all(torch.equal(state[name], values[name]) for name in values)
    evaluated = re.findall(r"step (\d+): evaluation loss (\S+)", text)
    assert {step for step, _ in evaluated} == {"3", "6", "9"} and len(set(evaluated)) == 3, text
    model, namespace = build(**SIZES)[0], dict[str, Any]()
    model.load_state_dict(state)
    exec(HELD_OUT, namespace)
    with torch.no_grad():
        losses = [float(model.eval()(*batch)) for batch in namespace["batches"]()]
    assert abs(float(evaluated[-1][1]) - sum(losses) / 3) < 1e-5, (evaluated, losses)


@pytest.mark.slow
def test_asynchronous_and_resumed(tmp_path: Path) -> None:
    package = package_of(tmp_path / "package", asynchronous=True, staleness=3)
    torch.save(build(**SIZES)[0].state_dict(), tmp_path / "weights.pt")  # as the command of a requeued job has it
    options = ("--save", tmp_path / "saved", "--save-every", 2, "--keep", 1, "--resume", "auto")
    options = (*options, "--weights", tmp_path / "weights.pt")
    first = run(package, "--steps", 3, *options)
    second = run(package, "--steps", 5, *options)
    assert [*figures(first)] == [1, 2, 3] and [*figures(second)] == [4, 5], first + second
    for text in ("".join(first), "".join(second)):
        oldest = re.search(r"the oldest gradient was (\d+) updates old, at most 3 may be", text)
        assert oldest and int(oldest[1]) <= 3, text
    assert [folder.name for folder in (tmp_path / "saved").glob("step-*")] == ["step-5"]


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "workers"), [(10, 3), (50, 2)])
def test_random_kills(tmp_path: Path, kills: int, workers: int) -> None:
    """Of workers and servers; each time at most the steps since the last snapshot are lost."""
    package = package_of(tmp_path / "package", workers=workers)
    chance, left = random.Random(kills), [kills]

    def at_step(step: int) -> str:
        if not left[0] or chance.random() < 0.3:
            return ""
        left[0] -= 1
        return chance.choice((WORKER, WORKER, SERVER))

    steps = 2 * kills + 10
    lines = run(package, "--steps", steps, "--snapshot-every", 5, at_step=at_step)
    print("".join(line for line in lines if not line.startswith("step ")))
    text = "".join(lines)
    assert not left[0] and figures(lines) == undisturbed(package, steps)[0], text
    assert all(int(count) <= 5 for count in re.findall(r"(\d+) steps are lost", text))


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray cluster with room for two servers and a worker."""
    ray = pytest.importorskip("ray.cluster_utils")
    ray_cluster = ray.Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    yield ray_cluster
    ray_cluster.shutdown()


@pytest.mark.slow
def test_a_worker_joins_with_a_node(package: Path, cluster: Any) -> None:
    def at_step(step: int) -> str:
        if step == 3:
            cluster.add_node(num_cpus=1)
        return ""

    lines = run(package, "--steps", 60, "--workers", "1:2", "--address", cluster.address, at_step=at_step)
    text = "".join(lines)
    assert re.search(r"worker \d joined in step \d+", text) and figures(lines) == undisturbed(package, 60)[0], text
