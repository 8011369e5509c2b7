"""An emitted class that lost, doubled or moved a call with an effect is not written."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.emit.classes import ClassContext
from autoshard.emit.markers.marker_check import check_markers
from autoshard.emit.statements import Body
from autoshard.emit.variable_liveness import Liveness
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Compute
from autoshard.program.lower import lower
from autoshard.search.fixed_step import with_step
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.slow import quick_at

ROOT = Path(__file__).parents[2]
GPT2 = f"{ROOT / 'examples/gpt2.py'}:build"
SMALL = {"n_layer": 2, "sequence": 8, "n_embd": 48, "n_head": 6, "vocabulary": 97}
CASES = {
    "megatron": (GPT2, SMALL, "dp=2,tp=2", "megatron", StepRequest(micro_batches=2, recompute="selective")),
    "fsdp": (GPT2, SMALL, "dp=2", "fsdp", None),
    "scaled": (f"{ROOT / 'tests/label_models.py'}:build", {"name": "the same twice"}, "tp=1", "auto", StepRequest(2)),
    "norm": (f"{ROOT / 'tests/single/test_micro_batches.py'}:build", {}, "dp=2", "dp", None),
}
LOSS = r"counted\((F\.cross_entropy\(.*?\)), self\.labels\)"
FAULTS = [  # the case, a pattern of its text, and what stands there instead, at the first place
    ("megatron", r"counted\(\s+(parallel.*), self\.labels\s+\)", r"\1"),
    ("megatron", r"recomputed\(block, self\.random, hidden_states, .*\)", "block(hidden_states)"),
    ("megatron", r'hidden_states, keep="expensive"\)', "hidden_states)"),
    ("megatron", r"column_parallel\(logits, self\.tp, weight\)", "F.linear(logits, weight)"),
    ("megatron", r"column_parallel\(logits, self\.tp, weight\)", "column_parallel(logits, self.dp, weight)"),
    ("megatron", r"all_reduce\((hidden_states), self\.tp\)", r"\1"),
    ("megatron", r"all_reduce\((hidden_states), self\.tp\)", r"all_reduce(all_reduce(\1, self.tp), self.tp)"),
    ("megatron", r"all_reduce\((hidden_states), self\.tp\)", r'all_reduce(\1, self.tp, grad="all_reduce")'),
    ("megatron", r"index=self\.first_random,", "index=self.first_random + 1,"),
    ("megatron", r"rows=\(self\.dp,\), vocabulary=\(\)", "rows=(self.tp,), vocabulary=()"),
    ("megatron", r" +del hidden_states\n", ""),
    ("megatron", r"del hidden_states\n", "del hidden_states, input_ids\n"),
    ("fsdp", r" +regather_before\(ln_1, weight, bias\)\n", ""),
    ("fsdp", r"regather_before\(ln_1, weight, bias\)", "regather_before(ln_1, weight)"),
    ("fsdp", r"( +regather_before\(ln_1, weight, bias\)\n)", r"\1\1"),
    ("fsdp", r" +del weight, bias\n", ""),
    ("fsdp", r"del weight, bias\n", "del weight\n"),
    ("fsdp", r"del weight, bias\n", "del weight, bias, bias\n"),
    ("fsdp", r"regather\(local\(self\.ln_1\.weight\)", "all_gather(local(self.ln_1.weight)"),
    ("fsdp", r"regather\(local\(self\.ln_1\.weight\)", "regather(local(self.ln_1.bias)"),
    ("fsdp", r"cast_weight\(weight, torch\.bfloat16\)", "weight.to(torch.bfloat16)"),
    ("fsdp", r"return weight, hidden_states", "return hidden_states, weight"),
    ("scaled", LOSS, r"\1"),
    ("scaled", LOSS, r"counted(counted(\1, self.labels), self.labels)"),
    ("scaled", rf"{LOSS} \* 0\.5", r"counted(\1 * 0.5, self.labels)"),
    ("norm", r" +local\(self\.norm\.running_mean\)\.copy_\(.*\)\n", ""),
    ("norm", r"local\(self\.norm\.running_mean\)\.copy_\(", "local(self.norm.running_var).copy_("),
]


@cache
def planned(name: str) -> tuple[Plan, Graph]:
    spec, arguments, mesh, style, step = CASES[name]
    graph = capture(spec, arguments, *(("bf16-mixed",) if spec == GPT2 else ()))
    plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse(mesh), strategy=style))
    return (plan if step is None else with_step(plan, graph, step)), graph


@cache
def written(name: str) -> tuple[str, list[ClassContext | None]]:
    """What emission checks."""
    plan, graph = planned(name)
    with mock.patch("autoshard.emit.model_file.check_markers") as check:
        emit(lower(plan, graph), plan, graph)
    return check.call_args.args  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", quick_at(CASES, 2))
def test_what_is_written_is_right(name: str) -> None:
    check_markers(*written(name))


@pytest.mark.parametrize(("name", "old", "new"), FAULTS)
def test_a_fault_in_the_text_is_seen(name: str, old: str, new: str) -> None:
    text, packages = written(name)
    wrong, count = re.subn(old, new, text, count=1)
    assert count == 1
    with pytest.raises(AssertionError, match=r"class \w+, as written"):
        check_markers(wrong, packages)


def test_a_marker_lost_where_it_is_nested_stops_emission(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, graph = planned("scaled")

    def bare(body: Body, op: Compute) -> str:
        return body._plain(op)

    monkeypatch.setattr(Body, "_expression", bare)
    with pytest.raises(AssertionError, match="counted"):
        emit(lower(plan, graph), plan, graph)


@pytest.mark.parametrize(("owner", "method"), [(Body, "_regather"), (Liveness, "after")])
def test_a_statement_left_out_stops_emission(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    plan, graph = planned("fsdp")
    monkeypatch.setattr(owner, method, lambda *_: [])
    with pytest.raises(AssertionError, match="as written"):
        emit(lower(plan, graph), plan, graph)
