"""`estimate` from numbers and `simulate` of the captured model agree at the same TP x DP."""

from __future__ import annotations

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.step import estimate
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.workflow import ModelRequest, read_graph

A100 = load_hardware("a100-80g-sxm")
LAYERS, SEQUENCE, MICRO_BATCH = 4, 512, 4
GPT2 = Transformer(LAYERS, 768, 12, SEQUENCE, 50257)  # capture folds its GELU into one operator


def captured(batch: int) -> Graph:
    arguments = {"batch": batch, "sequence": SEQUENCE, "n_layer": LAYERS, "dropout": 0.0}
    return read_graph(ModelRequest("examples/gpt2.py:build", arguments))


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_gpt2(dp: int, tp: int) -> None:
    plan = search(captured(MICRO_BATCH * dp), A100, SearchRequest(Mesh((("dp", dp), ("tp", tp))), strategy="megatron"))
    runs = (
        TrainingRun(MICRO_BATCH * dp, MICRO_BATCH, dp, tp, precision="fp32", sequence_parallel=cut, overlap=True)
        for cut in (False, True)
    )
    made = [estimate(GPT2, run, A100) for run in runs]  # the search may cut the norms' sequence, too
    nearest = min(made, key=lambda one: one.step_seconds)
    assert nearest.step_seconds == pytest.approx(plan.predicted_seconds, rel=0.01)
    peaks = [one.memory.peak for one in made]
    assert min(peaks, key=lambda peak: abs(peak / plan.predicted_peak_bytes - 1)) == pytest.approx(
        plan.predicted_peak_bytes, rel=0.01
    )
