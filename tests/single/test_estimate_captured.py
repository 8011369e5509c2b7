"""An estimate from numbers agrees with the simulation of the captured model: GPT-2 and Mixtral."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.step import estimate
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation import simulate
from autoshard.workflow import ModelRequest, read_graph
from tests.forced import data_parallel, forced_plan
from tests.slow import quick_at, slow
from tests.small_models import spec

# --- `estimate` from numbers and `simulate` of the captured model agree at the same TP x DP ---


A100 = load_hardware("a100-80g-sxm")
LAYERS, SEQUENCE, MICRO_BATCH = 4, 512, 4
GPT2 = Transformer(LAYERS, 768, 12, SEQUENCE, 50257)  # capture folds its GELU into one operator


def captured(batch: int) -> Graph:
    arguments = {"batch": batch, "sequence": SEQUENCE, "n_layer": LAYERS, "dropout": 0.0}
    return read_graph(ModelRequest("examples/gpt2.py:build", arguments))


@pytest.mark.parametrize(("dp", "tp"), [slow(1, 1), slow(1, 4), (2, 2), slow(4, 1)])
def test_gpt2(dp: int, tp: int) -> None:
    plan = search(captured(MICRO_BATCH * dp), A100, SearchRequest(Mesh((("dp", dp), ("tp", tp))), strategy="megatron"))
    runs = (
        TrainingRun(MICRO_BATCH * dp, MICRO_BATCH, dp, tp, precision="fp32", sequence_parallel=cut, overlap=True)
        for cut in (False, True)
    )
    estimates = [estimate(GPT2, run, A100) for run in runs]  # the search may cut the norms' sequence, too
    nearest = min(estimates, key=lambda one: one.step_seconds)
    assert nearest.step_seconds == pytest.approx(plan.predicted_seconds, rel=0.01)
    peaks = [one.memory.peak for one in estimates]
    assert min(peaks, key=lambda peak: abs(peak / plan.predicted_peak_bytes - 1)) == pytest.approx(
        plan.predicted_peak_bytes, rel=0.01
    )


# --- `estimate` from numbers and `simulate` of the captured Mixtral agree, with experts whole, shared and cut ---


HIDDEN, INNER, LENGTH, EXPERTS, WORDS = 1024, 2048, 1024, 4, 8000
NUMBERS = Transformer(
    1,
    HIDDEN,
    8,
    LENGTH,
    WORDS,
    2,
    INNER,
    "swiglu",
    "flash",
    "rotary",
    "rms_norm",
    False,
    False,
    experts=EXPERTS,
)


@cache
def mixtral(batch: int) -> Graph:
    sizes = {"hidden": HIDDEN, "inner": INNER, "heads": 8, "kv_heads": 2, "vocabulary": WORDS}
    arguments = {"form": "grouped_mm", "experts": EXPERTS, "batch": batch, "sequence": LENGTH, **sizes}
    return capture(spec("mixtral"), arguments)


@pytest.mark.slow
def test_time_and_memory() -> None:
    plan = search(mixtral(4), A100, SearchRequest(Mesh((("dp", 1), ("tp", 1))), strategy="megatron"))
    forecast = estimate(NUMBERS, TrainingRun(4, 4, precision="fp32"), A100)
    assert forecast.step_seconds == pytest.approx(plan.predicted_seconds, rel=0.01)
    assert forecast.memory.peak == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def around_experts(program: Program, graph: Graph) -> list[tuple[str, str, float, float]]:
    """Seconds and bytes of experts, and of all that travels within them, with no gradients reduced beside."""
    program = replace(program, gradient_buckets=(), weight_buckets=())
    blocks = {op.name for op in graph.ops if op.target == "autoshard.experts"}
    events = [e for e in simulate(program, graph, A100).events if e.name.split(":")[0] in blocks]
    return sorted((e.phase, e.collective, round(e.duration_seconds, 12), e.bytes) for e in events)


@pytest.mark.parametrize(("axis", "choice", "count"), quick_at([("ep", "t+e", 3), ("tp", "f", 1)], 1))
def test_experts_cut(axis: str, choice: str, count: int) -> None:
    """The same products and messages: tokens to their experts and back, or every expert's inner dim cut."""
    graph = mixtral(4)
    others = data_parallel(graph)

    def allowed(op: Op, strategy: Strategy) -> bool:
        if op.target == "autoshard.experts":
            return str(strategy.choices[0]) == choice
        return axis == "tp" or others(op, strategy)

    program = lower(forced_plan(graph, Mesh(((axis, 2),)), allowed), graph)
    run = TrainingRun(4, 2, 2, ep=2, precision="fp32") if axis == "ep" else TrainingRun(4, 4, tp=2, precision="fp32")
    built = build(NUMBERS, run, A100)
    expected = around_experts(program, graph)
    assert len(expected) == 2 * count
    assert around_experts(built.program, built.graph) == sorted(expected * 2)  # two layers
