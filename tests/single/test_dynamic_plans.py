"""Plans of graphs with dynamic sizes: strategies that hold at all, code that follows them, proofs at several."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from autoshard import rules
from autoshard.api.step_answer import planned_step
from autoshard.api.verbs import capture as captured_model
from autoshard.api.verbs import load_plan, planned, write
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.size_histogram import SizePoint, points_for, read_histogram
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.errors import UserError
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.dynamic_sizes.graph_numbers import numbers_of, sizes_of
from autoshard.graph_capture.dynamic_sizes.numbers import resized
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.problem import objective
from autoshard.program.lower import lower
from autoshard.replay.expected_step import weighted
from autoshard.replay.resize import reapply
from autoshard.rules.dynamic_strategies import probes
from autoshard.rules.resize.rebatch import rebatched
from autoshard.search.fixed_step import predicted
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.solvers import solve
from autoshard.verification.case import check_files, make_case
from autoshard.verification.sizing.dynamic_steps import step_sizes
from autoshard.workflow import make_plan
from tests.captured import captured
from tests.dynamic_models import spec
from tests.single.test_dynamic_capture import IMAGE, TWO, WORDS
from tests.slow import quick_at, slow

HARDWARE = load_hardware("cpu-local")
LENGTHS = "sequence=8..64/8"


def graph_of(name: str, text: str = "") -> Graph:
    return captured(spec(name), {}, dynamic=(text,) if text else ())


def proved(name: str, graph: Graph, plan: Plan, micro_batches: int = 1) -> dict[str, str]:
    """The files of a plan, run at several sizes."""
    program = lower(plan, graph)
    files = emit(program, plan, graph)
    case = make_case(spec(name), {}, graph, micro_batches=micro_batches, sizes=step_sizes(graph))
    proof = check_files(case, program, files, own_precision=True)
    assert proof.passed, proof.failure
    return files


@pytest.mark.parametrize(
    ("name", "text", "mesh", "strategy"),
    [
        slow("words", WORDS, "dp=2,tp=2", "best"),
        ("words", WORDS, "dp=2,tp=2", "fsdp-tp"),
        slow("words", WORDS, "dp=2,tp=2", "megatron-sp"),
        slow("image", IMAGE, "dp=4", "fsdp"),
        slow("image", IMAGE, "dp=2,tp=2", "best"),
        slow("two", TWO, "dp=2,tp=2", "best"),
        slow("declared", "", "dp=4", "dp"),
        slow("mapped", "batch=4..32/4,source=8..32/4@source.1,target=8..32/4@target.1", "dp=2,tp=2", "best"),
        slow("lstm", "batch=4..32/4,sequence=3..17@input.1", "dp=2", "dp"),
        slow("gru", "batch=4..32/4,sequence=3..17@input.1", "dp=2", "dp"),
        slow("placed", "batch=4..32/4,height=16..64/4@x.2,width=16..64/4@x.3", "dp=2", "dp"),  # 16 x 16 among the steps
    ],
)
def test_a_package_is_right_at_another_size_in_each_step(name: str, text: str, mesh: str, strategy: str) -> None:
    graph = graph_of(name, text)
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse(mesh), strategy=strategy))
    files = proved(name, graph, plan)
    assert len(step_sizes(graph)) > 3 and "DYNAMIC_SIZES" in files["model_parallel.py"]


def test_sizes_that_stand_for_all_are_near_those_that_there_are() -> None:
    """As a device holds a run for each block: pixels, counted together, in blocks by the billion took 23 GB."""
    graph = graph_of("image", "batch=4..32/4,height=16..64/4@pixels.2,width=16..64/4@pixels.3")
    sizes = probes(graph).graphs[0].tensor("pixels").shape
    assert sizes == (4 * 67, 3, 4 * 71, 4 * 73), "divisor times a prime above 64"


@pytest.mark.parametrize("seed", quick_at(range(4), 2))
def test_random_plans_are_right_too(seed: int) -> None:
    graph = graph_of("words", WORDS)
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), HARDWARE), seed)
    try:
        files = emit(lower(plan, graph), plan, graph)
    except UserError as error:  # a redistribution that is another one at another size
        assert "follow" in error.message or "unevenly" in error.message
        return
    case = make_case(spec("words"), {}, graph, sizes=step_sizes(graph))
    proof = check_files(case, lower(plan, graph), files)
    assert proof.passed, proof.failure


def test_micro_batches_and_recomputation_follow_sizes() -> None:
    graph = graph_of("words", WORDS)
    wanted = SearchRequest(Mesh.parse("dp=2,tp=2"), step=StepRequest(micro_batches=2, recompute="full"))
    proved("words", graph, make_plan(graph, HARDWARE, wanted).plan, micro_batches=2)


def test_a_global_batch_is_of_micro_batches_whose_sizes_follow() -> None:
    """A search over --devices has one batch and says so; the options that it names in its place give a right plan."""
    model = captured_model(spec("words"), dynamic=WORDS)
    batch = sizes_of(model.graph)["batch"]
    with pytest.raises(UserError, match="and batch can change in each step") as raised:
        planned_step(model, HARDWARE, SearchRequest(devices=4, step=StepRequest(global_batch=2 * batch)))
    match = re.match(r"--mesh (\S+) --global-batch (\d+), without --devices", raised.value.hint)
    assert match and int(match[2]) == 2 * batch
    wanted = SearchRequest(Mesh.parse(match[1]), step=StepRequest(global_batch=int(match[2])))
    plan = make_plan(model.graph, HARDWARE, wanted).plan
    assert plan.step.micro_batches == 2 and math.prod(plan.mesh.sizes) == 4
    proved("words", model.graph, plan, micro_batches=2)


@pytest.mark.parametrize("step", [StepRequest(global_batch=16, stages=2), slow(StepRequest(global_batch=16, zero=3))])
def test_a_step_is_searched_for_all_lengths(step: StepRequest) -> None:
    """At the largest, of whose best steps the least expected one is taken; right at other lengths."""
    model = captured_model(spec("words"), dynamic=LENGTHS)
    sizes = read_histogram("sequence=8:3;sequence=64:1")
    plan = planned_step(model, HARDWARE, SearchRequest(devices=2, step=step, sizes=sizes)).plan
    rows = plan.plan.search.sizes
    assert [dict(row.sizes)["sequence"] for row in rows] == [8, 64] and rows[0].seconds < rows[1].seconds
    at = resized(plan.graph, {"sequence": 8})
    there = predicted(reapply(plan.plan, plan.graph, at, HARDWARE), at)
    assert rows[0].seconds == pytest.approx(there.step_seconds)
    assert plan.plan.step.samples * plan.plan.step.micro_batches == 16
    assert all(style.predicted_seconds < plan.plan.step_seconds * 10 for style in plan.styles)
    if plan.plan.step.stages == 1:
        proved("words", plan.graph, plan.plan, plan.plan.step.micro_batches)


@pytest.mark.parametrize("samples", [slow(2), 12])
def test_numbers_of_another_batch_follow_the_sizes_as_captured_there(samples: int) -> None:
    graph = captured(spec("words"), {}, dynamic=(LENGTHS,))
    there = captured(spec("words"), {"batch": samples}, dynamic=(LENGTHS,))
    carried = rebatched(graph, samples)
    for length in (8, 24, 64):
        one, other = (resized(source, {"sequence": length}) for source in (carried, there))
        assert numbers_of(one) == numbers_of(other)


def test_a_number_of_the_planned_size_is_seen() -> None:
    """A planted fault: one expression of a size is the number that it is at the largest."""
    graph = graph_of("words", WORDS)
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse("dp=2"), strategy="dp"))
    program = lower(plan, graph)
    files = emit(program, plan, graph)
    text = files["model_parallel.py"]
    wrong = text.replace(".reshape(batch, sequence, 16)", ".reshape(batch, 64, 16)", 1)
    wrong = wrong if wrong != text else re.sub(r"reshape\(rows, sequence, 16\)", "reshape(rows, 64, 16)", text, count=1)
    assert wrong != text
    case = make_case(spec("words"), {}, graph, sizes=step_sizes(graph))
    assert not check_files(case, program, files | {"model_parallel.py": wrong}).passed


def test_only_what_divides_every_size_is_offered() -> None:
    graph, mesh = graph_of("words", "batch=4..32/4,sequence=8..64/8"), Mesh.parse("dp=8")
    op = next(op for op in graph.ops if op.target == "aten.embedding")
    known = rules.granularities(graph, mesh)
    offered = {str(s) for s in rules.strategies(graph, op, mesh, known)}
    reasons = dict(rules.explain(graph, op, mesh, known))
    message = "batch is only known to be a multiple of 4; 8 shards need a divisor of 8"
    assert any(reason == message for reason in reasons.values()), reasons
    assert not offered & {choice for choice, reason in reasons.items() if reason == message}
    plain = captured(spec("words"), {"batch": 32, "length": 64})
    every = {str(s) for s in rules.strategies(plain, plain.by_op[op.name], mesh, rules.granularities(plain, mesh))}
    assert offered < every
    for pin in ("input:ids=Shard(0)@dp", "input:ids=S0@dp", f"op:{op.name}=((1, 1), (8, 1))"):
        with pytest.raises(UserError, match="only known to be a multiple of 4"):
            search(graph, HARDWARE, SearchRequest(mesh, pins=(pin,)))


@pytest.mark.slow
def test_what_is_offered_holds_at_every_size() -> None:
    """By brute force: at each allowed size each strategy is offered, in the same layouts."""
    graph, mesh = graph_of("words", "batch=2..8/2,sequence=2..8/2"), Mesh.parse("dp=2,tp=2")
    known = rules.granularities(graph, mesh)
    for batch in (2, 4, 6, 8):
        for length in (2, 4, 6, 8):
            at = resized(graph, {"batch": batch, "sequence": length})
            plain = captured(spec("words"), {"batch": batch, "length": length})
            there = rules.granularities(plain, mesh)
            for op in graph.ops:
                general = {str(s): (s.operands, s.results) for s in rules.strategies(graph, op, mesh, known)}
                every = rules.strategies(plain, plain.by_op[op.name], mesh, there)
                offered = {str(s): (s.operands, s.results) for s in every}
                assert general.items() <= offered.items(), (op.name, batch, length)
            assert {o.name for o in at.ops} == {o.name for o in plain.ops}


# --- a histogram of sizes ---


POINTS = "batch=4,sequence=8:5;batch=8,sequence=64:1;batch=32,sequence=16:2"


@pytest.mark.slow
def test_the_expected_plan_is_no_worse_than_any_plan_of_one_size() -> None:
    graph, mesh = graph_of("words", WORDS), Mesh.parse("dp=2,tp=2")
    hardware = load_hardware("a100-80g-sxm")
    histogram = read_histogram(POINTS)
    plan = make_plan(graph, hardware, SearchRequest(mesh, sizes=histogram)).plan
    points = points_for(histogram, graph.dynamic)
    graphs = [resized(graph, dict(point.sizes)) for point in points]
    assert plan.search.expected_seconds == pytest.approx(mean_step(plan, graph, graphs, points, hardware))
    assert plan.certificate.level_objective == pytest.approx(plan.search.expected_seconds)
    assert plan.certificate.level_bound <= plan.certificate.level_objective
    for at, row in zip(graphs, plan.search.sizes, strict=True):
        alone = make_plan(at, hardware, SearchRequest(mesh)).plan
        assert row.bound_seconds <= row.best_seconds <= alone.step_seconds * (1 + 1e-9)
        whole = reapply(alone, at, graph, hardware)
        assert plan.search.expected_seconds <= mean_step(whole, graph, graphs, points, hardware) * (1 + 1e-9)


def mean_step(
    plan: Plan, graph: Graph, graphs: Sequence[Graph], points: Sequence[SizePoint], hardware: object
) -> float:
    steps = (reapply(plan, graph, at, hardware).step_seconds for at in graphs)  # type: ignore[arg-type]
    return sum(point.weight * step for point, step in zip(points, steps, strict=True))


def test_the_weighted_problem_is_the_mean_of_those_of_each_size() -> None:
    """Of every choice, and so its optimum by brute force."""
    graph, mesh = graph_of("declared"), Mesh.parse("dp=2")
    sizes, weights = (4, 16, 64), (0.5, 0.3, 0.2)
    base = formulate(PlanningContext(graph, mesh, HARDWARE))
    others = [formulate(PlanningContext(resized(graph, {"batch": size}), mesh, HARDWARE)) for size in sizes]
    problem = weighted(base, others, weights)
    assert problem is not None
    solution = solve(problem, "exhaustive") if size_of(base) < 1e5 else solve(problem, "dp")
    expected = sum(w * objective(other.problem, solution.choice) for w, other in zip(weights, others, strict=True))
    assert solution.objective == pytest.approx(expected) and solution.lower_bound == pytest.approx(expected)
    for other in others:
        alone = solve(other.problem, "dp")
        assert solution.objective <= objective(problem, alone.choice) * (1 + 1e-12)


def size_of(formulation: Formulation) -> float:
    return math.prod(float(len(node.seconds)) for node in formulation.problem.nodes)


@pytest.mark.slow
def test_a_histogram_is_in_the_plan_and_its_command(tmp_path: Path) -> None:
    model = captured_model(spec("words"), dynamic=WORDS)
    plan = planned(model, HARDWARE, SearchRequest(Mesh.parse("dp=2"), sizes=read_histogram(POINTS)), False)
    read = load_plan(write(plan, tmp_path / "package"))
    assert read.plan == plan.plan and len(read.plan.search.sizes) == 3
    assert "expected step" in str(read) and "batch 4, sequence 8" in str(read)
    text = (tmp_path / "package" / "model_parallel.py").read_text()
    assert "--sizes" in text and "--dynamic" in text
    page = (tmp_path / "package" / "report.html").read_text()
    assert "Dynamic sizes" in page and "Steps of the histogram" in page


@pytest.mark.parametrize("level", quick_at([0, 1], 0))
def test_other_levels_minimise_what_they_say(level: int) -> None:
    graph, mesh = graph_of("declared"), Mesh.parse("dp=2,tp=2")
    histogram = read_histogram("batch=4:9;batch=64:1")
    plan = make_plan(graph, HARDWARE, SearchRequest(mesh, level=level, sizes=histogram)).plan
    certificate = plan.certificate
    assert certificate.level_bound <= certificate.level_objective and len(plan.search.sizes) == 2
    largest = make_plan(graph, HARDWARE, SearchRequest(mesh, level=level)).plan
    if level == 1:
        assert plan.predicted_peak_bytes == largest.predicted_peak_bytes
        return
    assert certificate.status == "optimal"
    alone = [
        make_plan(resized(graph, {"batch": size}), HARDWARE, SearchRequest(mesh, level=0)).plan for size in (4, 64)
    ]
    best = sum(w * single.certificate.level_objective for w, single in zip((0.9, 0.1), alone, strict=True))
    assert certificate.level_objective >= best * (1 - 1e-9)
