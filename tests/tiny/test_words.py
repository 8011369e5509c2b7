"""Plans in words: blocks folded, strategies as people name them, and why a plan has what it has."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.training.precision import apply_precision
from autoshard.graph_capture.training.requires_grad import mark_gradients
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Candidate, Plan
from autoshard.package import package_files
from autoshard.replay import reevaluate
from autoshard.replay.command_line import command
from autoshard.replay.simulated_plan import simulate_plan
from autoshard.rules.algebra.strategy import Choice, Strategy
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_styles import random_plan
from autoshard.search.objectives import MEMORY, RATIO
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.text import plan_diff, plan_labels
from autoshard.text.answer_labels import chosen_words, gap_words
from autoshard.text.answer_labels import plan_words as reasons
from autoshard.text.plan_labels import float8_words
from autoshard.text.plan_summary import summary
from autoshard.text.tables import table, wrapped
from autoshard.verification.coverage import plan_kinds
from tests.graphs import mlp_graph
from tests.rule_graphs import gpt
from tests.slow import quick_at

# --- a plan in words: blocks folded, strategies named as people name them ---


MESH = Mesh((("dp", 2), ("tp", 2)))
LINEAR = Op("linear", "aten.linear", ("x", "w", "b"), (), ("y",))
TENSORS = (*(Tensor(name, (4, 4), "float32") for name in "xwy"), Tensor("b", (4,), "float32"))
GRAPH = Graph("g", TENSORS, ("x",), (), (), (LINEAR,), ("y",), None)

SAID = [
    ("b n", "S0 R+|R+ S0|R+ S0|S0 S1", "batch split over dp, column-parallel over tp"),
    ("n n", "R+ R+|S0 S0|S0 S0|S1 S1", "column-parallel over dp and tp"),
    ("= m", "R S1|R S1|R P|R P", "replicated over dp, row-parallel over tp"),
    ("+ ~0", "R+ P|R+ R|R+ R|R+ P", "replicated with partial gradients over dp, partial sums propagated over tp"),
]


@pytest.mark.parametrize(("choices", "layouts", "said"), SAID, ids=[said for _, _, said in SAID])
def test_strategies(choices: str, layouts: str, said: str) -> None:
    *operands, result = (Layout.parse(text) for text in layouts.split("|"))
    strategy = Strategy(tuple(map(Choice.parse, choices.split())), tuple(operands), (result,))
    assert plan_labels.strategy_words(LINEAR, strategy, GRAPH, MESH) == said


def test_axes_of_size_one_say_nothing() -> None:
    whole = Layout.parse("R R")
    strategy = Strategy((Choice("repeat"), Choice("repeat")), (whole, whole, whole), (whole,))
    assert plan_labels.strategy_words(LINEAR, strategy, GRAPH, Mesh((("dp", 1), ("tp", 1)))) == "whole"


def test_repeated_blocks_are_folded() -> None:
    graph = mlp_graph(layers=6)
    plan = search(
        graph,
        load_hardware("a100-80g-sxm"),
        SearchRequest(Mesh((("dp", 2),)), origin=Origin("mlp.py:build", (("layers", 6),))),
    )
    blocks = plan_labels.blocks(plan, graph)
    assert sum(len(block.names) * len(block.rows) for block in blocks) == len(graph.ops)
    names = [name for block in blocks for name in block.names]
    assert [name for name in names if name] == [f"h.{n}" for n in range(6)]
    assert any(len(block.names) > 1 for block in blocks)
    text = summary(plan, graph)
    assert "(6 devices)" not in text
    assert "mlp.py:build on dp=2 (2 devices) of a100-80g-sxm" in text
    assert next(block.title for block in blocks if len(block.names) > 1) in text
    assert gap_words(plan) == f"{1 - plan.certificate.level_bound / plan.predicted_seconds:.2%}"
    assert command(plan).startswith("autoshard plan mlp.py:build --with layers=6 --mesh dp=2 --hardware a100-80g-sxm")


def test_table() -> None:
    assert table([("a", "long cell", "x"), ("a title that spans", "", ""), ("b", "", "y")]) == [
        "a  long cell  x",
        "a title that spans",
        "b             y",
    ]


def test_a_long_name_breaks_behind_its_parts() -> None:
    assert wrapped("scaled_dot_product_attention", 25) == ["scaled_dot_product_", "attention"]
    assert wrapped("  model.layers.0.self_attn x", 14) == ["  model.", "  layers.0.", "  self_attn x"]
    assert wrapped("a" * 30, 20) == ["a" * 20, "a" * 10]


# --- why a plan has what it has ---


HARDWARE = load_hardware("a100-80g-sxm")
CHOSEN_WORDS_MESH = Mesh.parse("dp=2,tp=2")


@cache
def graph() -> Graph:
    return transformer_graph(Transformer(2, 256, 8, 1024, 1024), 8, "bf16-mixed", "adamw").graph


def made(**options: object) -> Plan:
    return search(graph(), HARDWARE, SearchRequest(CHOSEN_WORDS_MESH, **options))  # type: ignore[arg-type]


def chosen_of(plan: Plan) -> Candidate:
    return next(candidate for candidate in plan.search.candidates if candidate.outcome == "chosen")


def with_candidates(plan: Plan, *rows: tuple[str, str, float, float]) -> Plan:
    """As if these had been simulated: (name, outcome, sum of costs, step)."""
    candidates = tuple(Candidate(*row, predicted_peak_bytes=1.0) for row in rows)
    return replace(plan, search=replace(plan.search, candidates=candidates))


@pytest.mark.slow
def test_each_way_of_choosing_has_its_own_sentence() -> None:
    plans = {
        "search": made(),
        "pins": made(pins=(f"{graph().inputs[0]}=Shard(0)@dp",)),
        "style": made(strategy="megatron"),
        "memory": made(level=MEMORY),
        "ratio": made(level=RATIO),
    }
    said = {name: {chosen_words(plan, op) for op in plan.ops} for name, plan in plans.items()}
    assert said["style"] == {"--strategy megatron has it so."}
    assert all("needs the least memory" in words or "the one that was simulated" in words for words in said["memory"])
    assert not any("shortest" in words for words in said["memory"] | said["ratio"] | said["style"])
    pinned = replace(plans["search"].ops[0], decided_by="pin")
    assert chosen_words(plans["search"], pinned) == "It is pinned."


def test_a_simulated_plan_is_not_said_to_have_the_least_sum() -> None:
    plan = made()
    by_simulation = with_candidates(
        plan, ("weighted", "chosen", 2.0, 1.0), ("minimum sum of costs", "not better", 1.5, 1.2)
    )
    words = reasons(by_simulation)
    assert "its simulated step, 1 s, is the shortest of 2 that were simulated" in words
    assert "its sum of costs is +500 ms from that of another (minimum sum of costs)" in words
    by_sum = with_candidates(plan, ("minimum sum of costs", "chosen", 1.5, 1.0), ("weighted", "not better", 2.0, 1.2))
    assert "and so is its sum of costs" in reasons(by_sum)
    limited = with_candidates(plan, ("weighted", "too large", 1.0, 0.5), ("within the limit", "chosen", 2.0, 1.0))
    assert "the one that was simulated and fits (within the limit); 1 other did not fit" in reasons(limited)
    assert "No search is recorded" in reasons(with_candidates(plan))


@pytest.mark.parametrize("level", quick_at([2, MEMORY], 0))
def test_the_sentence_of_a_search_is_true(level: int) -> None:
    plan = made(level=level)
    fitting = [candidate for candidate in plan.search.candidates if candidate.outcome != "too large"]
    chosen, words = chosen_of(plan), reasons(plan)
    if "shortest" in words:
        assert chosen.predicted_seconds == min(other.predicted_seconds for other in fitting)
        least = chosen.objective_seconds <= min(other.objective_seconds for other in fitting) * (1 + 1e-9)
        assert ("so is its sum" in words) == least
    if "least memory" in words:
        assert chosen.predicted_peak_bytes == min(other.predicted_peak_bytes for other in fitting)


def test_the_panel_says_it_of_each_operator() -> None:
    plan = made()
    page = package_files.report_text(simulate_plan(plan, graph(), HARDWARE))
    assert reasons(plan) in page and "sum of all costs is least with it" not in page


# --- what is reported of a random plan: its simulated step, and what each of its choices costs ---


def test_a_random_plan_tells_the_step_that_it_was_simulated_to_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = tmp_path / "mlp.graph.json"
    graph.write_text(graph_json.dumps(mlp_graph(3, 64, 128)), encoding="utf-8")
    command = ["plan", str(graph), "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm", "--strategy", "random:1"]
    code = commands.main([*command, "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    step = re.search(r"predicted step +(\S+ \S+)", out)
    assert code == 0 and step is not None and f"simulated step {step[1]}, no lower bound" in " ".join(out.split())


def test_costs_of_a_random_plans_choices_are_told_and_add_up() -> None:
    graph, hardware, mesh = mlp_graph(3, 64, 128), load_hardware("a100-80g-sxm"), Mesh.parse("dp=2,tp=2")
    plans = [random_plan(PlanningContext(graph, mesh, hardware), seed) for seed in (0, 1)]
    for plan in plans:
        each = [decided.parts for _, decided in reevaluate.decisions(plan)]
        total = sum(part.compute_seconds + part.communication_seconds for part in each) + plan.search.outputs_seconds
        assert total == pytest.approx(plan.certificate.objective_seconds, rel=1e-6)
    diff = plan_diff.diff(plans[0], graph, plans[1], graph)
    assert any(change.seconds for change in diff.changes)


# --- what a summary says of float8, and that a check at other sizes knows what did not run in it ---


def planned(precision: str, mesh: str, seq: int = 16) -> tuple[Plan, Graph]:
    graph = apply_precision(mark_gradients(gpt(batch=4, seq=seq, width=64, heads=4, words=96)), precision)
    request = SearchRequest(Mesh.parse(mesh), strategy="megatron")
    return search(graph, load_hardware("h100-80g-sxm"), request), graph


def test_other_precisions_say_nothing() -> None:
    plan, graph = planned("bf16-mixed", "dp=1,tp=2")
    assert float8_words(plan, graph) == "" and "in float8" not in summary(plan, graph)


@pytest.mark.parametrize(
    ("mesh", "seq", "whole", "uneven"),
    quick_at(
        [
            ("dp=1,tp=2", 16, 4, []),
            ("dp=4,tp=1", 8, 0, ["0.qkv", "0.out", "0.up", "0.down"]),  # a device has 8 rows
            ("dp=1,tp=8", 16, 2, ["0.qkv", "0.out"]),  # and here of 4 heads of 16 some have half or none
        ],
        0,
        1,
    ),
)
def test_it_counts_what_shards_allow(mesh: str, seq: int, whole: int, uneven: list[str]) -> None:
    plan, graph = planned("fp8-mixed", mesh, seq)
    words, head = float8_words(plan, graph), "head (no other layer follows: a head keeps its precision)"
    assert words.startswith(f"{whole} of 5 linear layers; in bfloat16 {head};") and words in " ".join(
        summary(plan, graph, width=10_000).split()
    )
    note = f"{', '.join(uneven[:3])}{' and 1 more' * (len(uneven) > 3)} (a shard has rows or a dim that are no multiple"
    assert (note in words) == bool(uneven)
    kinds = [kind for kind in plan_kinds(plan, graph) if kind.startswith("autoshard.float8_linear")]
    assert any(" in bfloat16: " in kind for kind in kinds) == bool(uneven)
    assert any(" in bfloat16: " not in kind for kind in kinds) == bool(whole)
