"""`autoshard compare`: what a trace says is read, named, and laid beside the predicted step."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InvalidFileError
from autoshard.ir.mesh import Mesh
from autoshard.simulation import simulate
from autoshard.trace_comparison.differences import Comparison, as_dict, compare, text
from autoshard.trace_comparison.measured_step import MeasuredStep, canonical, collective_kind, measured_step
from autoshard.trace_comparison.trace_events import read_trace
from tests.recorded_trace import recorded_trace
from tests.small_programs import mlp

A100, MESH = load_hardware("a100-80g-sxm"), Mesh.parse("dp=2,tp=2")


def span(name: str, start: float, seconds: float, thread: int = 1, category: str = "cpu_op", **arguments: Any) -> Any:
    """Times in milliseconds."""
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": start * 1e3, "dur": seconds * 1e3,
            "args": arguments}  # fmt: skip


def step_spans(begin: float) -> list[Any]:
    """10 ms: linear 2 (its addmm inside), its gradient 3, gloo's all-reduce 4 on another thread, the optimizer 1."""
    engine = "autograd::engine::evaluate_function: "
    numbers = {"Sequence number": int(begin) + 7}
    return [
        span("aten::linear", begin, 2, **numbers),
        span("aten::addmm", begin + 0.5, 1, **numbers),
        span(f"{engine}AddmmBackward0", begin + 3, 3, **numbers, **{"Fwd thread id": 1}),
        span("aten::mm", begin + 3, 2),
        span("aten::sum", begin + 5, 1),
        span("gloo:all_reduce", begin + 4, 4, thread=2, category="user_annotation"),
        span("Optimizer.step#AdamW.step", begin + 9, 1, category="user_annotation"),
        span("aten::_fused_adamw_", begin + 9, 1),
    ]


def measured(tmp_path: Path, events: list[Any]) -> MeasuredStep:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return measured_step(read_trace(path))


def test_a_step_of_a_cpu_by_hand(tmp_path: Path) -> None:
    """The first of three steps warms up, however long it takes."""
    events = [*step_spans(0), *step_spans(10), *step_spans(20), span("aten::linear", -500, 400)]
    timing = measured(tmp_path, events)
    assert timing.steps == 2 and timing.step_seconds == pytest.approx(10e-3)
    seconds = {(item.name, item.phase): item.seconds for item in timing.items}
    assert seconds == pytest.approx(
        {("linear", "forward"): 2e-3, ("linear", "backward"): 3e-3, ("all_reduce", "forward"): 4e-3,
         ("fused_adamw", "optimizer"): 1e-3}
    )  # fmt: skip
    assert timing.compute_seconds == pytest.approx(6e-3) and timing.waiting_seconds == pytest.approx(4e-3)


def test_marked_steps_are_preferred(tmp_path: Path) -> None:
    marks = [span(f"ProfilerStep#{n}", 5 * n, 5, thread=9, category="user_annotation") for n in range(1, 4)]
    timing = measured(tmp_path, [*marks, *step_spans(10)])
    assert timing.steps == 2 and timing.step_seconds == pytest.approx(5e-3)


@pytest.fixture(scope="module")
def predicted() -> Any:
    graph, program = mlp(MESH, 512, 1024, 2048, 2)
    return simulate(program, graph, A100), program, graph


def trace_of(predicted: Any) -> Any:
    timeline, program, graph = predicted
    return recorded_trace(timeline, program, graph)


def compared(predicted: Any, trace: Any, tmp_path: Path) -> Comparison:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    timeline, program, graph = predicted
    return compare(timeline, program, graph, measured_step(read_trace(path)))


def test_a_simulated_trace_is_the_prediction(tmp_path: Path, predicted: Any) -> None:
    """Round trip over the profiler's format: kernels by their launches, collectives with their ranks, no difference."""
    result = compared(predicted, trace_of(predicted), tmp_path)
    assert result.on_device and result.steps == 2 and result.step.difference_seconds == pytest.approx(0, abs=1e-9)
    assert {row.name for row in result.collectives} == {"all_reduce of 2"}
    assert {"linear, forward", "linear, backward", "relu, forward", "optimizer"} <= {r.name for r in result.operators}
    for row in (*result.operators, *result.collectives, *result.streams):
        assert row.predicted_seconds is not None and row.measured_seconds is not None, row
        assert row.difference_seconds == pytest.approx(0, abs=1e-8), row


def test_what_is_left_of_a_step_by_rounding_is_nothing(tmp_path: Path, predicted: Any) -> None:
    timeline, program, graph = predicted
    computed = compared(predicted, trace_of(predicted), tmp_path).streams[0].predicted_seconds
    assert computed is not None
    for step, expected in ((computed * (1 + 1e-15), 0.0), (computed * 1.5, computed / 2)):
        changed = replace(timeline, step_seconds=step), program, graph
        waiting = compared(changed, trace_of(predicted), tmp_path).streams[2]
        assert waiting.predicted_seconds == pytest.approx(expected, abs=0, rel=1e-9)


@pytest.mark.parametrize(("slow", "name"), [("ncclDevKernel_AllReduce", "all_reduce of 2"), ("h0", "linear, forward")])
def test_the_largest_difference_is_named(tmp_path: Path, predicted: Any, slow: str, name: str) -> None:
    """One kind of kernel a second longer than predicted."""
    trace = trace_of(predicted)
    late = [e for e in trace["traceEvents"] if e.get("cat") == "kernel" and e["name"].startswith(slow)]
    for event in [e for e in late if e["args"]["phase"] == "forward"]:
        event["dur"] += 1e6
    result = compared(predicted, trace, tmp_path)
    assert late and result.largest.name == name
    shown = text(result)
    assert f"Most of the difference: {name}" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert as_dict(result)["largest"]["name"] == name


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("aten::layer_norm", "layer_norm"), ("NativeLayerNormBackward0", "layer_norm"), ("layer_norm_12", "layer_norm"),
        ("aten.linear", "linear"), ("autoshard.linear_in_out", "linear"),
        ("autoshard.float8_linear", "float8_linear"), ("autoshard.float8_linear_in_out", "float8_linear"),
        ("_Float8LinearBackward", "float8_linear"), ("aten::_scaled_mm", "float8_linear"), ("aten::addmm", "linear"),
        ("_CrossEntropyBackward", "cross_entropy"), ("aten.cross_entropy_loss", "cross_entropy"),
        ("parallel_cross_entropy", "cross_entropy"), ("MmBackward0", "matmul"),
        ("_RedistributionBackward", "redistribute"),
    ],
)  # fmt: skip
def test_one_name_for_an_operator(name: str, own: str) -> None:
    assert canonical(name) == own


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float", "reduce_scatter"), ("gloo:all_gather", "all_gather"),
        ("hcom_allReduce__1", "all_reduce"), ("ncclDevKernel_SendRecv", "send_receive"),
    ],
)  # fmt: skip
def test_the_kind_of_a_collective(name: str, kind: str) -> None:
    assert collective_kind(name) == kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected a trace of torch.profiler"),
        ("{}", "expected a trace of torch.profiler"),
        ('{"traceEvents": []}', "no events with a duration"),
        (json.dumps({"traceEvents": [span("aten::mm", 0, 1)]}), "the trace marks no step"),
    ],
)
def test_what_is_no_trace_is_told(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(InvalidFileError, match=message):
        measured_step(read_trace(path))
    with pytest.raises(InvalidFileError, match="none"):
        read_trace(tmp_path / "none.json")
