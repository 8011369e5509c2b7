"""A plan that is read again: its figures are today's, and what has changed since it was made is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware, parse_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import UserError
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.formulation.planning_context import PlanningContext
from autoshard.html_report.page import warnings
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.package import package_files
from autoshard.replay import reevaluate
from autoshard.replay.simulated_plan import simulate_plan
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.text import explain, plan_diff, plan_summary
from autoshard.workflow import make_plan
from tests.graphs import mlp_graph
from tests.slow import quick_at

GRAPH, MESH, HARDWARE = mlp_graph(3, 256, 2048), Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")
FOUR = StepRequest(micro_batches=4)
MADE = {
    "level 0": lambda: search(GRAPH, HARDWARE, SearchRequest(MESH, level=0)),
    "level 1": lambda: search(GRAPH, HARDWARE, SearchRequest(MESH, level=1)),
    "level 2": lambda: search(GRAPH, HARDWARE, SearchRequest(MESH)),
    "pinned": lambda: search(GRAPH, HARDWARE, SearchRequest(MESH, pins=("h.0.fc=Shard(1)@dp",))),
    "no all-to-all": lambda: search(GRAPH, HARDWARE, SearchRequest(MESH, all_to_all=False)),
    "megatron": lambda: search(GRAPH, HARDWARE, SearchRequest(MESH, strategy="megatron")),
    "micro-batches": lambda: search(
        GRAPH, HARDWARE, SearchRequest(MESH, strategy="dp", step=StepRequest(micro_batches=4))
    ),
    "ZeRO 1 of dp": lambda: (
        make_plan(GRAPH, HARDWARE, SearchRequest(MESH, strategy="dp", step=StepRequest(zero=1))).plan
    ),
    "random": lambda: random_plan(PlanningContext(GRAPH, MESH, HARDWARE), 3),
}


@pytest.mark.parametrize("name", quick_at(MADE, 0, 3, 6, 7))
def test_nothing_has_changed_in_a_plan_just_made(name: str) -> None:
    plan: Plan = MADE[name]()
    explained = explain.explain(plan, GRAPH, HARDWARE, None, None)
    assert explained.notes == ()
    assert explained.plan.certificate == plan.certificate
    assert explained.plan.predicted_seconds == plan.predicted_seconds
    parts = explained.total
    total = parts.compute_seconds + parts.communication_seconds + explained.outputs_seconds
    assert total == pytest.approx(plan.certificate.objective_seconds, rel=1e-9)


def test_casts_that_zero_moves_are_offered() -> None:
    graph = transformer_graph(Transformer(1, 64, 4, 32, 256), 8, "bf16-mixed", "adamw").graph
    plan = make_plan(graph, HARDWARE, SearchRequest(MESH, strategy="fsdp", step=StepRequest(zero=0))).plan
    assert explain.explain(plan, graph, HARDWARE, None, None).notes == ()


@pytest.fixture(scope="module")
def old() -> Plan:
    return search(GRAPH, HARDWARE, SearchRequest(MESH))


def text_of(plan: Plan, graph: Graph = GRAPH, what: str | None = None, how: str | None = None) -> str:
    return explain.text(explain.explain(plan, graph, parse_hardware(plan.hardware_text), what, how))


def test_another_version_is_told(old: Plan) -> None:
    plan = replace(old, versions=(("autoshard", "0.0.1"), ("numpy", "2.0")))
    note = "this plan was made by autoshard 0.0.1"
    assert note in text_of(plan)
    assert "costs have changed" not in text_of(plan)
    assert f"A: {note}" in plan_diff.text(plan_diff.diff(plan, GRAPH, old, GRAPH))
    assert "note" not in plan_diff.text(plan_diff.diff(old, GRAPH, old, GRAPH))
    built = simulate_plan(plan, GRAPH, HARDWARE)
    assert note in plan_summary.timeline_summary(built.timeline, plan, GRAPH)
    assert note.capitalize() in package_files.report_text(built, None)


def test_figures_of_other_costs_are_made_again(old: Plan) -> None:
    """As if costs had been half of today's when the plan was made."""
    certificate = old.certificate
    half = replace(certificate, objective_seconds=certificate.objective_seconds / 2, lower_bound_seconds=1e-9)
    plan = replace(old, certificate=half, predicted_seconds=old.predicted_seconds / 2)
    explained = explain.explain(plan, GRAPH, HARDWARE, "h.1.fc", "Replicate@dp,Replicate@tp")
    assert explained.plan.certificate.objective_seconds == pytest.approx(certificate.objective_seconds, rel=1e-9)
    assert explained.plan.predicted_seconds == old.predicted_seconds
    assert explained.plan.certificate.level_objective == old.predicted_seconds  # of the step, not of the sum of costs
    same = explain.explain(old, GRAPH, HARDWARE, "h.1.fc", "Replicate@dp,Replicate@tp").why_not
    assert explained.why_not == same
    said = explain.text(explained)
    assert "costs have changed since this plan was made (objective" in said and "no lower bound" in said
    assert "gap" not in said
    built = simulate_plan(plan, GRAPH, HARDWARE)
    assert "simulated again: when the plan was made, its predicted step was" in plan_summary.timeline_summary(
        built.timeline, plan, GRAPH
    )


def test_a_timeline_of_compiled_blocks_is_not_laid_beside_eager_ones_unsaid(old: Plan) -> None:
    compiled = simulate_plan(old, GRAPH, HARDWARE, compiled=True).timeline
    text = plan_summary.timeline_summary(compiled, old, GRAPH, compiled=True)
    assert "note: with eager blocks the predicted step is" in text and "simulated again" not in text
    changed = replace(old, step=replace(old.step, predicted_seconds=1.0))
    text = plan_summary.timeline_summary(compiled, changed, GRAPH, compiled=True)
    assert "the step of all of eager blocks takes 1 s" in text


def test_a_profile_that_has_changed_since_is_told(old: Plan) -> None:
    shipped = load_hardware("a100-80g-sxm").text
    slower = shipped.replace("312 TFLOP/s", "31.2 TFLOP/s")
    assert slower != shipped
    plan = search(GRAPH, parse_hardware(slower), SearchRequest(MESH))
    said = text_of(plan)
    assert "the profile a100-80g-sxm has changed since" in said and "costs have changed" not in said
    assert reevaluate.origin(replace(plan, hardware="mine")) == ()  # a profile of a user's own: not ours to compare
    assert warnings(plan, HARDWARE)


def test_choices_that_are_no_longer_offered(old: Plan) -> None:
    first = replace(old.ops[0], strategy="gone gone")
    plan = replace(old, ops=(first, *old.ops[1:]))
    with pytest.raises(UserError, match="has no strategy 'gone gone'"):
        simulate_plan(plan, GRAPH, HARDWARE)
    fixed = explain.formulated(old, GRAPH, HARDWARE)
    now = reevaluate.today(plan, fixed.formulation)
    assert not now.offered and "does not offer all choices" in now.notes[-1]
    assert now.plan == plan


def test_the_notes_are_in_json(old: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(old, versions=(("autoshard", "0.0.1"),))
    from autoshard.package import output_folder

    output_folder.write_package(tmp_path / "out", package_files.package_files(simulate_plan(plan, GRAPH, HARDWARE)))
    assert commands.main(["explain", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0].startswith("this plan was made by autoshard 0.0.1")
    assert commands.main(["diff", str(tmp_path / "out"), str(tmp_path / "out"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 2


SPACES = [
    ("megatron", "optimal among plans of --strategy megatron)", "no plan among plans of --strategy megatron has less"),
    ("pinned", "optimal with the pins)", "no plan with the pins has less"),
    ("no all-to-all", "optimal without all-to-all)", "no plan without all-to-all has less"),
    ("level 2", "optimal)", "and no plan has less"),
]


@pytest.mark.parametrize(("name", "said", "reported"), quick_at(SPACES, 2), ids=[name for name, _, _ in SPACES])
def test_an_optimum_says_of_what(name: str, said: str, reported: str) -> None:
    plan: Plan = MADE[name]()
    proved = replace(plan.certificate, status="optimal", level_bound=plan.certificate.level_objective)
    best = replace(plan, certificate=proved)
    assert said in " ".join(plan_summary.summary(best, GRAPH).split())
    assert reported in package_files.report_text(simulate_plan(best, GRAPH, HARDWARE), None)
