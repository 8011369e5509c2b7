"""What a whole search says of its plan whenever the clock ends it, and which plans it simulates."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir import plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.problem import Problem
from autoshard.search import min_memory
from autoshard.search.memory_fit import named
from autoshard.search.mesh_search import STYLE_AXES, meshes, search_meshes
from autoshard.search.objectives import MEMORY, RATIO, SPEED, Levelled, ratio_problem
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import SearchTask
from autoshard.search.select_plan import search
from autoshard.search.style_plans import style_plans
from autoshard.solvers import solve
from autoshard.solvers.common.result import CUT_SHORT, OPTIMAL, Solution, fits
from autoshard.solvers.common.solver_options import Clock, Computing, Options
from autoshard.solvers.relax.low_memory_plans import LowMemoryPlans, minimum_memory_bound
from autoshard.text.plan_figures import certificate_rows
from autoshard.workflow import make_plan
from tests.graphs import mlp_graph
from tests.looks import Looks
from tests.slow import slow

# --- certificates ---


HARDWARE = load_hardware("a100-80g-sxm")
MESH = Mesh.parse("dp=2,tp=2")
GRAPH = mlp_graph(1, 64, 128)


def limits() -> Iterator[int]:
    limit = 0
    while True:
        yield limit
        limit = limit + 1 if limit < 3 else 3 * limit


def optimum(problem: Problem) -> float:
    """inf where nothing fits by the solver's count: some programs may."""
    try:
        solution = solve(problem, "ilp")
    except InfeasibleError:
        return math.inf
    assert solution.status == OPTIMAL
    return solution.objective


def judge(plan: Plan, least_seconds: float, least: float) -> None:
    """`least`: the optimum of what the level minimises; at level 2 the step of any plan."""
    proof = plan.certificate
    assert 0.0 <= proof.lower_bound_seconds <= least_seconds * (1 + 1e-9)
    assert 0.0 <= proof.level_bound <= least * (1 + 1e-9)
    assert proof.objective_seconds >= proof.lower_bound_seconds and proof.level_objective >= proof.level_bound
    if proof.status == OPTIMAL and plan.search.level != SPEED:
        assert proof.level_objective == pytest.approx(least)
    assert (proof.status == CUT_SHORT) == plan.search.cut_short
    said = " ".join(text for _, text in certificate_rows(plan))
    assert not ("optimal" in said and plan.search.cut_short)
    for tried in plan.search.candidates:
        if tried.name.startswith("optimum") and plan.search.level == SPEED:
            assert tried.objective_seconds <= least_seconds * (1 + 1e-9)


@pytest.mark.parametrize("level", [slow(RATIO), slow(MEMORY), SPEED])
@pytest.mark.parametrize("share", [slow(math.inf), 0.8])
def test_a_search_that_is_stopped_at_any_look_says_nothing_false(level: int, share: float) -> None:
    free = search(GRAPH, HARDWARE, SearchRequest(MESH))
    limit = free.predicted_peak_bytes * share
    formulation = formulate(PlanningContext(GRAPH, MESH, HARDWARE), capacity_bytes=limit)
    seconds = optimum(formulation.problem)
    least = optimum(ratio_problem(formulation)) if level == RATIO else seconds
    if level == MEMORY:
        least = minimum_memory_bound(formulation.problem)
    if level == SPEED:
        least = free.predicted_seconds
    for number in limits():
        clock = Clock(number, timer=Looks())
        options = Options(clock=clock)
        try:
            plan = search(GRAPH, HARDWARE, SearchRequest(MESH, level=level, memory_limit_bytes=limit), options=options)
        except InfeasibleError:
            if not clock.cut:
                return
            continue
        judge(plan, seconds, least)
        if not clock.cut:
            return


def test_only_what_is_proved_is_called_the_optimum() -> None:
    problem = formulate(PlanningContext(GRAPH, MESH, HARDWARE)).problem
    best = solve(problem)
    for bound, name in ((best.objective, "optimum"), (0.9 * best.objective, "best found"), (-math.inf, "best found")):
        solution = Solution(problem, best.choice, bound, "dp")
        assert named(Levelled(solution, solution.objective, solution.lower_bound)) == name


@pytest.mark.slow
@pytest.mark.parametrize("level", [RATIO, SPEED])
def test_meshes_are_compared_by_the_level(level: int) -> None:
    graph = mlp_graph(1, 24, 1000)
    chosen = search_meshes(graph, HARDWARE, SearchRequest(devices=16, level=level))
    run = [row.mesh for row in chosen.search.meshes if row.predicted_seconds]
    each = [search(graph, HARDWARE, SearchRequest(mesh, level=level)) for mesh in run]
    figures = [p.certificate.level_objective if level == RATIO else p.predicted_seconds for p in each]
    figure = chosen.certificate.level_objective if level == RATIO else chosen.predicted_seconds
    assert len(each) > 1 and figure == pytest.approx(min(figures))
    if level == RATIO:  # the test would see the step compared instead
        fastest = min(each, key=lambda plan: plan.predicted_seconds)
        assert fastest.certificate.level_objective > figure


def test_meshes_cut_short_say_so() -> None:
    for number in limits():
        clock = Clock(number, timer=Looks())
        plan = search_meshes(mlp_graph(1, 64, 64), HARDWARE, SearchRequest(devices=4), options=Options(clock=clock))
        assert plan.search.cut_short == clock.cut == (plan.certificate.status == CUT_SHORT)
        if not clock.cut:
            return


# --- the clock ---


SMALL = transformer_graph(Transformer(2, 512, 8, 2048, 4096), 16, "fp32", "adamw").graph


def best_style(graph: Graph, plans: list[Plan], limit: float, level: int = SPEED) -> float:
    """Of the styles on the meshes of these plans, the best that fits."""
    styles = [style for plan in plans for style in style_plans(plan, graph, HARDWARE) if style.predicted_seconds]
    here = [style for style in styles if fits(style.predicted_peak_bytes, limit)]
    return min((s.predicted_peak_bytes if level == MEMORY else s.predicted_seconds for s in here), default=math.inf)


@pytest.mark.parametrize(
    ("level", "limited"), [(SPEED, False), slow(SPEED, True), slow(MEMORY, False), slow(MEMORY, True)]
)
def test_no_time_at_all_is_enough_for_known_styles(level: int, limited: bool) -> None:
    free = search(SMALL, HARDWARE, SearchRequest(MESH))
    styles = [s.predicted_peak_bytes for s in style_plans(free, SMALL, HARDWARE) if s.predicted_seconds]
    limit = min(styles) * 1.01 if limited else math.inf
    least = best_style(SMALL, [free], limit, level)
    assert least < math.inf, "the test compares nothing"
    for number in (0, 1, 5, 50):
        wanted = SearchRequest(MESH, level=level, memory_limit_bytes=limit)
        plan = search(SMALL, HARDWARE, wanted, options=Options(Clock(number, timer=Looks())))
        figure = plan.predicted_peak_bytes if level == MEMORY else plan.predicted_seconds
        assert figure <= least * (1 + 1e-9)
        assert plan.search.cut_short or number > 1


@pytest.mark.slow
def test_no_time_at_all_is_enough_for_known_styles_on_any_mesh_of_theirs() -> None:
    graph = transformer_graph(Transformer(2, 512, 8, 2048, 4096), 2, "fp32", "adamw").graph
    each = [mesh for mesh in meshes(HARDWARE, 8) if len(mesh.axes) <= STYLE_AXES]
    plans = [search(graph, HARDWARE, SearchRequest(mesh), options=Options(Clock(0.0))) for mesh in each]
    least = best_style(graph, plans, HARDWARE.usable_memory_bytes)
    on_first = best_style(graph, plans[:1], HARDWARE.usable_memory_bytes)
    assert len(plans) > 2 and least < on_first, "the first mesh that is tried has not the best style"
    plan = search_meshes(graph, HARDWARE, SearchRequest(devices=8), options=Options(Clock(0.0)))
    assert plan.predicted_seconds <= least * (1 + 1e-9)
    assert plan.search.cut_short


@pytest.mark.parametrize("devices", [None, slow(4)])
def test_a_machine_that_others_use_finds_the_same_plan(devices: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall time runs a thousand times as fast as what the search computes."""
    mesh = MESH if devices is None else None
    alone = make_plan(SMALL, HARDWARE, SearchRequest(mesh, devices=devices)).plan
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 1000 * real())
    wanted = SearchRequest(mesh, devices=devices, time_limit_seconds=60.0)
    loaded = make_plan(SMALL, HARDWARE, wanted).plan
    assert not loaded.search.cut_short
    assert plan_json.plan_hash(loaded, SMALL) == plan_json.plan_hash(alone, SMALL)


def test_cpu_time_stands_still_while_others_run() -> None:
    clock = Clock(0.5, timer=Computing())
    time.sleep(0.6)
    assert clock.left > 0.3
    until = time.process_time() + 0.6
    while time.process_time() < until:
        pass
    assert clock.over and clock.cut


# --- which plans a search simulates besides the first, at level 1 and within a limit ---


def test_limits_of_memory_get_wider_while_that_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 1 programs of more and more of the solver's bytes are tried, up to one that needs more."""
    graph, mesh, hardware = mlp_graph(3, 256, 2048), Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")
    limits: list[float] = []
    quickly = SearchTask.quickly
    monkeypatch.setattr(SearchTask, "quickly", lambda task, p: (limits.append(p.capacity_bytes), quickly(task, p))[1])
    tried = search(graph, hardware, SearchRequest(mesh, level=1)).search.candidates
    assert sum(limit < float("inf") for limit in limits) == 2  # no proof is looked for: seconds only break ties
    (first,) = [row.predicted_peak_bytes for row in tried if row.name == "least memory"]
    least, wider = [row for row in tried if " within " in row.name]
    assert least.outcome == "chosen" and least.predicted_peak_bytes < first < wider.predicted_peak_bytes
    assert tried[-1] == wider and limits[-1] < float("inf")  # nor others that know no limit


def test_prices_of_bytes_give_programs_that_need_less() -> None:
    """At level 1 beside the least memory by the solver's count; and within a limit that nothing else fits."""
    graph, mesh, hardware = mlp_graph(6, 64, 4096), Mesh.parse("dp=4,tp=4"), load_hardware("a100-80g-sxm")
    least = search(graph, hardware, SearchRequest(mesh, level=1))
    (chosen,) = [row for row in least.search.candidates if row.outcome == "chosen"]
    assert chosen.name.endswith("of a step for 1 % of memory")
    others = [row.predicted_peak_bytes for row in least.search.candidates if row != chosen]
    limit = (least.predicted_peak_bytes + min(others)) / 2
    assert search(graph, hardware, SearchRequest(mesh, memory_limit_bytes=limit)).predicted_peak_bytes <= limit


def test_prices_are_lowered_until_programs_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few of these in a row no lower price is tried, and larger problems end there."""
    monkeypatch.setattr(min_memory, "FEW_CHOICES", 0)
    tried: list[float] = []
    at_rate = LowMemoryPlans.at_rate
    monkeypatch.setattr(LowMemoryPlans, "at_rate", lambda plans, rate: (tried.append(rate), at_rate(plans, rate))[1])
    graph, mesh, hardware = mlp_graph(4, 4096, 1024), Mesh.parse("dp=2,tp=4"), load_hardware("a100-80g-sxm")
    monkeypatch.setattr(min_memory, "_IN_A_ROW", 1)
    rows = search(graph, hardware, SearchRequest(mesh, level=1)).search.candidates
    assert 0 < len(tried) < len(min_memory.RATES) and not [row for row in rows if " within " in row.name]
    assert rows[-1].predicted_peak_bytes > min(row.predicted_peak_bytes for row in rows)
    tried.clear()
    monkeypatch.setattr(min_memory, "_IN_A_ROW", 100)
    search(graph, hardware, SearchRequest(mesh, level=1))
    assert tried == list(min_memory.RATES)


def test_within_a_limit_plans_of_a_step_are_tried_too() -> None:
    """Known styles and what the step search found without a limit: no plan is slower than one of these that fits."""
    graph, mesh, hardware = mlp_graph(4, 4096, 1024), Mesh.parse("dp=2,tp=4"), load_hardware("a100-80g-sxm")
    free = search(graph, hardware, SearchRequest(mesh))
    least = search(graph, hardware, SearchRequest(mesh, level=1))
    limit = (free.predicted_peak_bytes + least.predicted_peak_bytes) / 2
    plan = search(graph, hardware, SearchRequest(mesh, memory_limit_bytes=limit))
    names = [row.name for row in plan.search.candidates]
    assert "least of a step within the limit" in names and free.search.candidates[0].name in names
    fsdp = search(graph, hardware, SearchRequest(mesh, memory_limit_bytes=limit, strategy="fsdp"))
    assert plan.predicted_peak_bytes <= limit and plan.predicted_seconds <= fsdp.predicted_seconds


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_limit_that_a_known_style_keeps_is_not_refused(level: int) -> None:
    """The solver counts more of it than of others, whose programs need more."""
    graph = transformer_graph(Transformer(2, 256, 4, 128, 8192), 4, "bf16-mixed", "adamw").graph
    hardware, mesh = load_hardware("h100-80g-sxm"), Mesh.parse("dp=2,tp=2")
    limit = search(graph, hardware, SearchRequest(mesh, strategy="fsdp-tp")).predicted_peak_bytes
    plan = search(graph, hardware, SearchRequest(mesh, level=level, memory_limit_bytes=limit))
    assert plan.predicted_peak_bytes <= limit


def test_a_count_that_programs_may_need_less_than_proves_nothing_of_them() -> None:
    graph, hardware = mlp_graph(3, 16, 32), load_hardware("h100-80g-sxm")
    with pytest.raises(InfeasibleError, match=r"not proven\): .*; as the solver counts, no plan fits: every") as caught:
        search(graph, hardware, SearchRequest(Mesh.parse("tp=2"), memory_limit_bytes=29000.0))
    assert not caught.value.proven


def test_without_time_the_best_style_is_cut_short() -> None:
    request = SearchRequest(Mesh.parse("dp=2,tp=2"), time_limit_seconds=0.0)
    simulated = make_plan(mlp_graph(2, 64, 256), load_hardware("h100-80g-sxm"), request)
    assert simulated.plan.certificate.status == "cut short" and simulated.plan.certificate.level_bound == 0.0
    taken = [style.predicted_seconds for style in simulated.styles if style.predicted_seconds]
    assert len(taken) > 1 and simulated.plan.predicted_seconds <= min(taken) * (1 + 1e-9)


def test_a_hint_names_nothing_that_is_so_already() -> None:
    graph, hardware = mlp_graph(3, 16, 32), load_hardware("h100-80g-sxm")
    request = SearchRequest(Mesh.parse("tp=2"), memory_limit_bytes=1000.0)
    hints = []
    for variant in (graph, replace(graph, precision="bf16-mixed", optimizer="sgd")):
        with pytest.raises(InfeasibleError) as caught:
            search(variant, hardware, request)
        hints.append(caught.value.hint)
    assert hints == [
        "more devices, --precision bf16-mixed, --optimizer sgd or a smaller batch",
        "more devices or a smaller batch",
    ]
