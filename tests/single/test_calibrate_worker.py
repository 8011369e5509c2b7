"""Measuring: few and small shapes, here only for the form of what is written; slow: a whole calibration."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoshard.calibrate import measure_worker, measured_shapes
from autoshard.calibrate.calibrate_run import COLUMNS, Request, run
from autoshard.calibrate.fitted_models import MEMORY_KINDS
from autoshard.cluster.hardware import load_hardware
from tests.hangs import HANGS


def test_kernels_are_measured(monkeypatch):
    monkeypatch.setattr(measured_shapes, "SHAPES", 3)
    monkeypatch.setattr(measured_shapes, "LARGEST_SECONDS", 1e-3)
    monkeypatch.setattr(measured_shapes, "MEMORY_BYTES", (2**14,))
    monkeypatch.setattr(measure_worker, "SAMPLE_SECONDS", 0.005)
    measured = measure_worker.kernels(torch.device("cpu"), torch.float32)
    assert [len(measured[table]) for table in COLUMNS] == [3, 3, len(MEMORY_KINDS)]
    assert {row["kind"] for row in measured["memory"]} == set(MEMORY_KINDS)
    for table, columns in COLUMNS.items():
        for row in measured[table]:
            assert columns <= row.keys() and row["seconds"] > 0
    assert measured["dispatch_seconds"] == 0
    json.dumps(measured)


def test_a_longer_kernel_takes_longer():
    x, y = torch.randn(64, 64), torch.randn(512, 512)
    device = torch.device("cpu")
    assert measure_worker.seconds_of(lambda: y @ y, device) > 20 * measure_worker.seconds_of(lambda: x @ x, device)


def test_what_else_runs_changes_no_time() -> None:
    """Half of the samples are disturbed: the others say how long a kernel takes, and not only the luckiest."""
    quiet = [1.00, 1.01, 1.02, 1.03, 1.04, 1.05]
    assert measure_worker.undisturbed(quiet) == pytest.approx(1.0125)
    assert measure_worker.undisturbed([*quiet, 2.0, 5.0, 7.0, 9.0]) == pytest.approx(1.0225)


def test_a_disturbed_while_is_shared_by_all_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three quarters of the time something else runs, in long stretches: no collective takes longer for it."""
    collectives, now = 8, 0
    quiet = [1e-4 * (1 + i) for i in range(collectives)]

    class Transport:
        def barrier(self) -> None:
            pass

    def sample(run, device, repeats):
        nonlocal now
        now += 1
        return run() + (0.01 if now % 240 >= 60 else 0.0)

    monkeypatch.setattr(measure_worker, "_sample", sample)
    runs = [lambda seconds=seconds: seconds for seconds in quiet]
    measured = measure_worker.in_rounds(runs, Transport(), torch.device("cpu"))  # type: ignore[arg-type]
    assert measured == pytest.approx(quiet)


def test_an_operator_is_issued_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are counted, whatever the length of the chain."""
    runs = []

    def counted(run, device):
        runs.append(run())
        return 8.0

    monkeypatch.setattr(measure_worker, "seconds_of", counted)
    monkeypatch.setattr(measure_worker, "CHAIN", 4)
    assert measure_worker.issued_seconds(torch.device("cpu")) == pytest.approx(1.0)
    assert len(runs) == 1


@pytest.mark.slow
def test_a_whole_calibration(tmp_path: Path):
    written = run(Request("cpu-local", tmp_path / "mine.toml", processes=2))
    assert {family.name for family in written.families} == {"matmul", "attention", "memory", "collective"}
    assert load_hardware(str(tmp_path / "mine.toml")).calibrated
    assert (
        run(Request("cpu-local", tmp_path / "again.toml", measured=written.measurements)).families == written.families
    )


@pytest.mark.slow
def test_two_nodes_under_torchrun(tmp_path: Path):
    """Two agents of two processes each stand for nodes: links between them are measured, the first process writes."""
    profile = load_hardware("cpu-local").text.replace("devices_per_node = 16", "devices_per_node = 2")
    before, links = profile.split("[[links]]")
    links, constants = links.split("# Constants of the cost formulas", 1)
    inner = links.replace("devices = 16", "devices = 2")
    outer = links.replace('"loopback"', '"network"')
    text = f"{before}[[links]]{inner}\n[[links]]{outer}\n# Constants of the cost formulas{constants}"
    (tmp_path / "two.toml").write_text(text, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "localhost", "--master-port", port]
    verb = ["-m", "autoshard", "calibrate", "--hardware", "two.toml", "--out", "mine.toml"]
    nodes = [
        subprocess.Popen([*command, "--node-rank", node, *verb], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for node in ("0", "1")
    ]
    outputs = [node.communicate(timeout=HANGS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert "network between nodes: " in outputs[0] and "written to" not in outputs[1]
    measured = load_hardware(str(tmp_path / "mine.toml"))
    assert [link.name for link in measured.links] == ["loopback", "network"]
    assert any(figure.key.endswith("bandwidth") and "across nodes" in figure.source for figure in measured.figures)
