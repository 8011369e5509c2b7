"""Measuring: few and small shapes, here only for the form of what is written; slow: a whole calibration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoshard.calibrate import measure_worker, measured_shapes
from autoshard.calibrate.calibrate_run import COLUMNS, Request, run
from autoshard.calibrate.fitted_models import MEMORY_KINDS
from autoshard.cluster.hardware import load_hardware


def test_kernels_are_measured(monkeypatch):
    monkeypatch.setattr(measured_shapes, "PRODUCTS", 3)
    monkeypatch.setattr(measured_shapes, "ATTENTIONS", 2)
    monkeypatch.setattr(measured_shapes, "LARGEST_SECONDS", 1e-3)
    monkeypatch.setattr(measured_shapes, "MEMORY_BYTES", (2**14,))
    monkeypatch.setattr(measure_worker, "SAMPLE_SECONDS", 0.005)
    measured = measure_worker.kernels(torch.device("cpu"), torch.float32)
    assert [len(measured[table]) for table in COLUMNS] == [3, 2, len(MEMORY_KINDS)]
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


@pytest.mark.slow
def test_a_whole_calibration(tmp_path: Path):
    written = run(Request("cpu-local", tmp_path / "mine.toml", processes=2))
    assert {family.name for family in written.families} == {"matmul", "attention", "memory", "collective"}
    assert load_hardware(str(tmp_path / "mine.toml")).calibrated
    assert (
        run(Request("cpu-local", tmp_path / "again.toml", measured=written.measurements)).families == written.families
    )
