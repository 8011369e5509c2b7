"""Stages by dynamic programming, the layers that they hold, and their printed rows."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.stage_layers import balanced, layers_of, part_layers
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import estimate
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from autoshard.ir.graph_json import dumps
from autoshard.program.schedules.pipeline_schedule import SCHEDULES, Slot, ends, most_in_flight, run_pipeline
from autoshard.solvers.stages.room_bound import RoomBound
from autoshard.solvers.stages.stage_partition import certificate, solve_stages
from autoshard.solvers.stages.stage_problem import (
    Front,
    StagePlan,
    StageProblem,
    bytes_of,
    stage_seconds,
)
from autoshard.whole_step_search.blocks.block_fronts import exposed_seconds
from tests.graphs import mlp_graph
from tests.slow import quick_at
from tests.stage_brute_force import any_order_bound, every_plan

# --- stages by dynamic programming: against every plan, and the certificate against the simulated schedule ---


SCHEDULE = {1: "1f1b", 2: "interleaved"}


def front(rng: np.random.Generator, points: int, tail: bool) -> Front:
    forward, backward, kept_bytes, static, working = rng.uniform(0.2, 1.0, (5, points))
    tails, share = rng.uniform(0, 3, points) * tail, rng.choice([0.0, 0.1, 0.4], points)
    late = rng.choice([0.0, rng.uniform(0, 3)])
    return Front(forward, 2 * backward, kept_bytes, static, tails, share * working, rng.choice([0.0, 0.7]), late)


def live(stages: int, micro_batches: int, chunks: int) -> np.ndarray:
    order = SCHEDULES[SCHEDULE[chunks]]
    return np.array([most_in_flight(order(s, stages, micro_batches, chunks)) / chunks for s in range(stages)])


@st.composite
def problems(draw: st.DrawFn) -> StageProblem:
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    stages, chunks = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
    fronts = tuple(front(rng, draw(st.integers(1, 3)), draw(st.booleans())) for _ in range(3))
    if chunks == 1:
        line = draw(st.sampled_from([(0, 1, 1, 1, 2), (0, 0, 1, 1), (1, 1, 1, 1, 1), (0, 1, 2, 1, 0), (0, 0, 2)]))
        micro_batches = draw(st.integers(1, 9))
    else:
        stages = min(stages, 2)
        line = draw(st.sampled_from([(0, 1, 1, 1, 1, 2), (1, 1, 1, 1), (0, 1, 1, 1, 1, 1, 1)]))
        micro_batches = stages * draw(st.integers(1, 4))
    room = draw(st.sampled_from([3.0, 5.0, 8.0, 1e9])) * rng.uniform(0.8, 1.5, stages)
    allowed = None
    if chunks == 1 and draw(st.booleans()):
        allowed = np.ones((stages, len(line)), bool)
        allowed[draw(st.integers(0, stages - 1)), draw(st.integers(0, len(line) - 1))] = False
    send = draw(st.sampled_from([0.0, 0.3]))
    held = live(stages, micro_batches, chunks)
    beside = draw(st.sampled_from([0.0, 0.2, 1.0]))
    problem = StageProblem(fronts, line, stages, micro_batches, held, room, chunks, send, allowed)
    if chunks == 1 and draw(st.booleans()):
        kinds = (fronts, tuple(slower(rng, front) for front in fronts))
        by_stage = tuple(kinds[int(rng.integers(2))] for _ in range(stages))
        problem = replace(
            problem, fronts=tuple(map(least, *by_stage)) if stages > 1 else by_stage[0], stage_fronts=by_stage
        )
    return replace(problem, late_beside=beside)


def slower(rng: np.random.Generator, front: Front) -> Front:
    """The block on devices of another kind, slower or faster."""
    return replace(front, **{name: getattr(front, name) * rng.uniform(0.5, 3.0) for name in vars(front)})


def least(*fronts: Front) -> Front:
    return Front(**{name: np.minimum.reduce([getattr(front, name) for front in fronts]) for name in vars(fronts[0])})


def left_late(problem: StageProblem, plan: StagePlan, stage: int) -> float:
    """What a stage's late collectives take after its last backward, one by one."""
    (part,) = (part for part in plan.parts if (part.stage, part.chunk) == (stage, 0))
    fronts = problem.of_stage(stage)
    chosen = [(fronts[problem.line[k]], plan.points[k]) for k in range(part.first, part.stop)]
    late = [front.late_seconds for front, _ in chosen]
    exposed = exposed_seconds([f.backward_seconds[p] for f, p in chosen], [0.0] * len(chosen), late)
    return exposed + problem.late_beside * (sum(late) - exposed)


def simulated(problem: StageProblem, plan: StagePlan, orders: list[list[Slot]] | None = None) -> float:
    """In the schedule's own order unless one is given, with the seconds of each part; a stage's tail comes last."""
    seconds: dict[tuple[int, int, str], float] = {}
    once: dict[tuple[int, int], float] = {}
    last = len(plan.parts) - 1
    for number, part in enumerate(plan.parts):
        for kind, gives in (("F", number < last), ("B", number > 0)):
            total = problem.send_seconds * gives
            for k in range(part.first, part.stop):
                base = problem.of_stage(part.stage)[problem.line[k]]
                total += (base.forward_seconds if kind == "F" else base.backward_seconds)[plan.points[k]]
            seconds[part.stage, part.chunk, kind] = total
        once[part.stage, part.chunk] = sum(
            problem.of_stage(part.stage)[problem.line[k]].first_seconds for k in range(part.first, part.stop)
        )

    def slot_seconds(stage: int, slot: Slot) -> float:
        begun = once[stage, slot.chunk] if slot.kind == "F" and slot.micro_batch == 0 else 0.0
        return seconds[stage, slot.chunk, slot.kind] + begun

    schedule = SCHEDULES[SCHEDULE[problem.chunks]]
    base = [schedule(s, problem.stages, problem.micro_batches, problem.chunks) for s in range(problem.stages)]
    placed = run_pipeline(orders or base, slot_seconds, lambda a, b: 0.0)
    late = [left_late(problem, plan, stage) for stage in range(problem.stages)]
    tails = stage_seconds(problem, plan.parts, plan.points)[2] + late
    return float((np.array(ends(placed, problem.stages)) + tails).max())


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_best_plan_and_both_bounds_are_those_of_brute_force(problem: StageProblem) -> None:
    best, every = solve_stages(problem), list(every_plan(problem))
    if not every:
        assert best is None
        return
    assert best is not None
    least, room = min(plan.seconds for plan in every), RoomBound(problem)
    assert room.form_seconds <= least * (1 + 1e-9)
    assert best.seconds == pytest.approx(least)
    assert (bytes_of(problem, best.parts, best.points) <= problem.capacity_bytes * (1 + 1e-9)).all()
    steps = [simulated(problem, plan) for plan in every]
    known = best.seconds + problem.first_seconds[-1]
    proved = certificate(problem, 1.05 * known)
    assert max(proved, room.step_seconds) <= min(steps) * (1 + 1e-9)
    for plan, step in zip(every, steps, strict=True):
        assert any_order_bound(problem, plan.parts, plan.points) <= step * (1 + 1e-9)
    if problem.chunks == 1 and not any(front.tail_seconds.any() or front.late_seconds for front in problem.fronts):
        exact = min(any_order_bound(problem, plan.parts, plan.points) for plan in every)
        assert proved >= min(exact, known) * (1 - 1e-9)


def patterns(micro_batches: int, most: int) -> Iterator[str]:
    """Every order of one stage's forwards and backwards that holds at most so many micro-batches."""
    for chosen in itertools.combinations(range(2 * micro_batches), micro_batches):
        order = "".join("F" if i in chosen else "B" for i in range(2 * micro_batches))
        held = np.cumsum([1 if kind == "F" else -1 for kind in order])
        if held.min() >= 0 and held.max() <= most:
            yield order


def in_any_order(problem: StageProblem, plan: StagePlan) -> float:
    """The fastest of all orders that fit the memory. Micro-batches are alike: each stage takes them in turn."""
    points = plan.points
    choices = []
    for part in plan.parts:
        chosen = [(problem.fronts[problem.line[k]], points[k]) for k in range(part.first, part.stop)]
        room = problem.capacity_bytes[part.stage] - sum(f.static_bytes[p] for f, p in chosen)
        room = (room - max(f.working_bytes[p] for f, p in chosen)) * (1 + 1e-12)
        choices.append(list(patterns(problem.micro_batches, int(room / sum(f.saved_bytes[p] for f, p in chosen)))))
    least = np.inf
    for orders in itertools.product(*choices):
        slots = []
        for order in orders:
            numbers = {"F": itertools.count(), "B": itertools.count()}
            slots.append([Slot(kind, next(numbers[kind])) for kind in order])  # type: ignore[arg-type]
        with contextlib.suppress(ValueError):  # stages that wait for each other for ever
            least = min(least, simulated(problem, plan, slots))
    return least


@settings(max_examples=25, deadline=None)
@given(problems())
def test_no_order_that_fits_the_memory_beats_the_certificate(problem: StageProblem) -> None:
    """Every order of a few micro-batches, of the plans that may be fastest."""
    count = 4 if problem.stages < 3 else 3
    small = replace(problem, micro_batches=count, live=live(problem.stages, count, 1), chunks=1)
    best = solve_stages(small)
    if best is not None:
        plans = sorted(every_plan(small), key=lambda plan: any_order_bound(small, plan.parts, plan.points))
        assert solve_bound(small) <= min(in_any_order(small, plan) for plan in plans[:5]) * (1 + 1e-9)


def test_stages_that_hold_no_more_than_1f1b_needs_wait_as_long_as_it_does() -> None:
    """Two equal stages, 4 micro-batches: 5 x 6 seconds where the first holds two; its first backward comes later than
    its two forwards. With more room it could be given more work."""
    one = np.ones(1)
    block = Front(one, 2 * one, one, 0 * one, 0 * one, 0 * one)
    tight = StageProblem((block,), (0,) * 4, 2, 4, live(2, 4, 1), np.array([4.0, 2.0]))
    best = solve_stages(tight)
    assert best is not None
    assert solve_bound(tight) == pytest.approx(in_any_order(tight, best)) == pytest.approx(5 * 6)
    line = replace(tight, line=(0,) * 240, stages=4, micro_batches=32, live=live(4, 32, 1))
    even = solve_bound(replace(line, capacity_bytes=60 * line.live))
    free = solve_bound(replace(line, capacity_bytes=np.full(4, 1e9)))
    assert free < even * 0.97 and even == pytest.approx(35 * 180)


def solve_bound(problem: StageProblem) -> float:
    best = solve_stages(problem)
    assert best is not None
    return certificate(problem, 1.05 * (best.seconds + float(problem.first_seconds[-1])))


def test_the_closed_form_is_the_step_of_equal_stages() -> None:
    one = np.ones(1)
    block = Front(one, 2 * one, one, one, 0 * one, 0 * one)
    for chunks in (1, 2):
        problem = StageProblem((block,), (0,) * 8, 4, 8, live(4, 8, chunks), np.full(4, 1e9), chunks)
        best = solve_stages(problem)
        assert best is not None
        assert simulated(problem, best) == pytest.approx(best.seconds)
        assert [part.stage for part in best.parts] == list(range(4)) * chunks


def test_a_stage_with_less_room_takes_fewer_blocks_or_leaner_points() -> None:
    kept_bytes, nothing = np.array([1.0, 0.1]), np.zeros(2)
    block = Front(np.ones(2), np.array([2.0, 3.0]), kept_bytes, nothing, nothing, nothing)
    problem = StageProblem((block,), (0,) * 8, 2, 8, np.array([2.0, 1.0]), np.full(2, 4.0))
    best = solve_stages(problem)
    assert best is not None
    first, second = (plan_points(best, stage) for stage in (0, 1))
    assert len(first) + len(second) == 8 and sum(first) > sum(second) == 0  # the first holds two micro-batches


def plan_points(plan: StagePlan, stage: int) -> list[int]:
    return [plan.points[k] for part in plan.parts if part.stage == stage for k in range(part.first, part.stop)]


@pytest.mark.parametrize(("stages", "chunks"), quick_at([(1, 1), (8, 1), (64, 1), (16, 2)], 3))
def test_a_line_of_a_hundred_blocks_is_near_its_bound_on_any_order(stages: int, chunks: int) -> None:
    """An embedding, 96 layers and a head, a dozen points each."""
    rng = np.random.default_rng(0)
    fronts = tuple(front(rng, 12, True) for _ in range(3))
    room = np.full(stages, 120.0 / stages + 40)
    problem = StageProblem(fronts, (0, *[1] * 96, 2), stages, 512, live(stages, 512, chunks), room, chunks)
    best = solve_stages(problem, tolerance=1e-3)
    assert best is not None
    assert (bytes_of(problem, best.parts, best.points) <= problem.capacity_bytes).all()
    assert solve_bound(problem) >= 0.97 * simulated(problem, best)


def test_no_plan_where_the_least_bytes_do_not_fit() -> None:
    one = np.ones(1)
    block = Front(one, one, one, one, one, one)
    problem = StageProblem((block,), (0,) * 4, 2, 4, np.array([2.0, 1.0]), np.full(2, 4.0))
    assert solve_stages(problem) is None  # two blocks take 2 * (1 + 2) + 1 on the first stage


def test_the_room_of_stages_bounds_the_step_where_all_must_be_lean() -> None:
    """8 blocks on 2 stages with room for 4 lean ones: 5 seconds each, where a fast one takes 3."""
    nothing = np.zeros(2)
    block = Front(np.array([1.0, 2.0]), np.array([2.0, 3.0]), nothing, np.array([2.0, 1.0]), nothing, nothing)
    problem = StageProblem((block,), (0,) * 8, 2, 10, np.ones(2), np.full(2, 4.0))
    assert RoomBound(problem).slowest_seconds == pytest.approx(4 * 5)
    assert RoomBound(replace(problem, capacity_bytes=np.full(2, 6.0))).slowest_seconds == pytest.approx(2 * 5 + 2 * 3)
    assert RoomBound(replace(problem, capacity_bytes=np.full(2, 3.9))).step_seconds == np.inf


def test_stages_without_any_room_hold_nothing() -> None:
    """Of a vertex that is none, infinitely many times no room."""
    nothing = np.zeros(3)
    block = Front(np.array([1.0, 1.5, 2.0]), np.ones(3), nothing, np.array([3.0, 2.9, 1.0]), nothing, nothing)
    problem = StageProblem((block,), (0,) * 2, 1, 4, np.ones(1), np.zeros(1))
    assert RoomBound(problem).step_seconds == RoomBound(problem).form_seconds == np.inf


def test_of_two_chunks_the_first_one_is_lean_for_most_of_it_is_in_flight() -> None:
    """4 blocks on one of two stages, of which one must keep less."""
    nothing = np.zeros(2)
    block = Front(np.ones(2), np.array([2.0, 3.0]), np.array([1.0, 0.2]), nothing, nothing, nothing)
    problem = StageProblem((block,), (0,) * 8, 2, 8, np.array([2.5, 1.5]), np.array([8.5, 99.0]), 2)
    best = solve_stages(problem)
    assert best is not None
    chunks = {part.chunk: best.points[part.first : part.stop] for part in best.parts if part.stage == 0}
    assert sorted(chunks[0]) == [0, 1] and chunks[1] == (0, 0)


# --- pipelines whose stages hold unequal numbers of layers: by themselves, and as a user gives them ---


A100 = load_hardware("a100-80g-sxm")
MODEL = Transformer(8, 256, 8, 128, 1000)
EVEN = TrainingRun(16, 2, pp=4)


@pytest.mark.parametrize(
    ("layers", "parts", "own"),
    [
        (70, 12, (5, *[6] * 10, 5)),  # BLOOM's 176B
        (8, 4, (2, 2, 2, 2)),
        (61, 8, (7, 8, 8, 8, 8, 8, 8, 6)),
        (7, 4, (2, 2, 2, 1)),
        (78, 12, (6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 5)),
        (5, 4, (1, 1, 2, 1)),
    ],
)
def test_embedding_and_head_count_as_a_layer(layers: int, parts: int, own: tuple[int, ...]) -> None:
    assert balanced(layers, parts) == own


@given(st.integers(1, 200), st.integers(1, 64))
def test_no_layer_is_lost_and_no_part_is_empty(layers: int, parts: int) -> None:
    parts = min(layers, parts)
    counts = balanced(layers, parts)
    assert len(counts) == parts and sum(counts) == layers and min(counts) >= 1
    whole = [count + (i == 0) + (i == parts - 1) for i, count in enumerate(counts)]
    assert layers % parts == 0 or max(whole) - min(whole) <= 2


def test_the_fullest_stage_sets_the_pace() -> None:
    """With many micro-batches a step is the slots of the slowest stage; layers given as they would be are no change."""
    run = replace(EVEN, batch=256)
    even, explicit = (estimate(MODEL, r, A100, Host()) for r in (run, replace(run, stage_layers=(2, 2, 2, 2))))
    assert (even.step_seconds, even.memory) == (explicit.step_seconds, explicit.memory)
    layer = pieces(build(MODEL, run, A100), A100).layer
    each = layer.forward_seconds + layer.backward_seconds
    wide = estimate(MODEL, replace(run, stage_layers=(1, 5, 1, 1)), A100, Host())
    slots = run.micro_batches * 5 * each
    assert slots < wide.step_seconds < even.step_seconds + (run.micro_batches + 3) * 3 * each
    assert wide.memory.peak > even.memory.peak
    assert sum(part for _, part in wide.parts) == pytest.approx(wide.step_seconds)


def test_chunks_of_a_stage_may_differ() -> None:
    run = replace(EVEN, pp=2, schedule="interleaved", interleave=2, stage_layers=(1, 2, 3, 2))
    assert part_layers(MODEL, run) == (1, 2, 3, 2)
    assert layers_of(MODEL, run, 0) == (1, 3) and layers_of(MODEL, run, 1) == (2, 2)
    assert estimate(MODEL, run, A100).step_seconds > 0


def test_the_command_takes_and_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 7, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 1000, "batch": 16, "pp": 4}
    words = ["estimate", "--hardware", "a100-80g-sxm", *(w for k, v in sizes.items() for w in (f"--{k}", str(v)))]
    assert main(words) == 0
    assert "layers of its stages: 2 x 3, 1\n" in capsys.readouterr().out
    assert main([*words, "--stage-layers", "1,2,2,2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["stage_layers"] == [1, 2, 2, 2]
    assert main([*words, "--stage-layers", "2,2,x"]) == 2
    assert "--stage-layers" in capsys.readouterr().err


# --- the stages of a plan in its printed summary ---


def test_the_printed_plan_lists_its_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "model.graph.json"
    saved.write_text(dumps(mlp_graph(2, 64, 256)), encoding="utf-8")
    args = [
        "plan",
        str(saved),
        "--mesh",
        "dp=2",
        "--hardware",
        "a100-80g-sxm",
        "--stages",
        "2",
        "--micro-batches",
        "4",
    ]
    assert main([*args, "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    rows = output[output.index("stage  modules") :].splitlines()
    assert "backward" in rows[0] and any(row.startswith("0      the start") for row in rows)
    assert any(row.startswith("1 ") for row in rows)
    assert output.index("bubble") > output.index("stage  modules") and "one stage: all below" not in output
