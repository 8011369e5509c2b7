"""Constants from a real run: a machine that is not as its profile says is found from one trace, and written down."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.calibrate.run_files import as_dict, check_out, summary, write_run
from autoshard.calibrate.run_fit import run_fit
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.simulation import simulate
from autoshard.trace_comparison.measured_step import MeasuredStep, measured_step
from autoshard.trace_comparison.trace_events import read_trace
from tests.recorded_trace import recorded_trace
from tests.small_programs import mlp

A100 = load_hardware("a100-80g-sxm")
MESH = Mesh((("dp", 2), ("tp", 2)))
SMALL, LARGE = (512, 1024, 2048, 2), (2048, 2048, 4096, 2)  # rows, widths, layers


def slower(hardware: Hardware, **factors: float) -> Hardware:
    """The machine as it is: `matmul_compute=0.5` is products at half the rate."""
    constants = dict(hardware.constants)
    for name, factor in factors.items():
        constants[name.replace("_", ".", 1)] *= factor
    return replace(hardware, constants=tuple(constants.items()))


def run_of(case: tuple[Any, Any], hardware: Hardware, path: Path) -> MeasuredStep:
    """What a profiler would record of the program on `hardware`."""
    graph, program = case
    trace = recorded_trace(simulate(program, graph, hardware), program, graph)
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return measured_step(read_trace(path))


TRUE = slower(A100, matmul_compute=0.4, matmul_dgrad=0.7, memory_elementwise=0.5, host_dispatch=3.0)


def test_the_run_is_predicted_and_another_one_too(tmp_path: Path) -> None:
    case, other = mlp(MESH, *LARGE), mlp(MESH, *SMALL)
    graph, program = case
    fitted = run_fit(program, graph, A100, run_of(case, TRUE, tmp_path / "rank0.json.gz"))
    assert fitted.after_seconds == pytest.approx(fitted.measured_seconds, rel=0.01)
    assert abs(fitted.before_seconds / fitted.measured_seconds - 1) > 0.2
    assert fitted.ratios["matmul forward"] > 1.5
    real, before, after = (simulate(other[1], other[0], h).step_seconds for h in (TRUE, A100, fitted.hardware))
    assert abs(after / real - 1) < 0.5 * abs(before / real - 1)


def test_a_run_that_is_as_predicted_changes_nothing(tmp_path: Path) -> None:
    graph, program = case = mlp(MESH, *LARGE)
    fitted = run_fit(program, graph, A100, run_of(case, A100, tmp_path / "rank0.json.gz"))
    assert fitted.after_seconds == pytest.approx(fitted.before_seconds, rel=1e-3)
    assert set(fitted.changed) <= {"host.dispatch"}


def test_collectives_between_nodes_are_left_to_the_profile(tmp_path: Path) -> None:
    nodes = replace(A100, devices_per_node=1)
    graph, program = case = mlp(MESH, *LARGE)
    fitted = run_fit(program, graph, nodes, run_of(case, slower(A100, collective_launch=3.0), tmp_path / "a.json.gz"))
    assert fitted.left_out == ("all_reduce of 2",)
    assert not [key for key in fitted.changed if key.startswith("collective")]


def test_what_is_written_is_what_was_fitted(tmp_path: Path) -> None:
    graph, program = case = mlp(MESH, *LARGE)
    fitted = run_fit(program, graph, A100, run_of(case, TRUE, tmp_path / "rank0.json.gz"))
    written = write_run(tmp_path / "mine.toml", A100, fitted, "2 steps of mlp")
    hardware = load_hardware(str(written.profile))
    step = simulate(program, graph, hardware).step_seconds
    assert step == pytest.approx(fitted.measured_seconds, rel=0.01)
    assert hardware.peaks == A100.peaks and hardware.links == A100.links and hardware.name == "mine"
    kinds = {figure.key: (figure.kind, figure.source) for figure in hardware.figures}
    assert kinds["constants.matmul.compute"][0] == "measured"
    assert kinds["constants.matmul.compute"][1].startswith("autoshard compare: 2 steps of mlp, ")
    untouched = next(figure for figure in A100.figures if figure.key == "constants.attention.compute")
    assert kinds[untouched.key] == (untouched.kind, untouched.source)
    assert "took" in summary(written) and as_dict(written)["measured_seconds"] == fitted.measured_seconds
    with pytest.raises(UsageError, match="exists already"):
        check_out(tmp_path / "mine.toml")
