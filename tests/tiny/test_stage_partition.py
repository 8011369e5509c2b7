"""Stages by dynamic programming: against every plan, and the certificate against the simulated schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.simulation.pipeline_schedule import SCHEDULES, Slot, ends, most_in_flight, run_pipeline
from autoshard.solvers.stages.room_bound import RoomBound
from autoshard.solvers.stages.stage_brute_force import every_plan
from autoshard.solvers.stages.stage_partition import solve_stages
from autoshard.solvers.stages.stage_problem import (
    Front,
    StagePlan,
    StageProblem,
    any_order_bound,
    bytes_of,
    stage_seconds,
)

SCHEDULE = {1: "1f1b", 2: "interleaved"}


def front(rng: np.random.Generator, points: int, tail: bool) -> Front:
    forward, backward, kept, static, working = rng.uniform(0.2, 1.0, (5, points))
    tails, share = rng.uniform(0, 3, points) * tail, rng.choice([0.0, 0.1, 0.4], points)
    return Front(forward, 2 * backward, kept, static, tails, share * working, rng.choice([0.0, 0.7]))


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
    return StageProblem(fronts, line, stages, micro_batches, held, room, chunks, send, allowed)


def simulated(problem: StageProblem, plan: StagePlan) -> float:
    """The schedule's own order, with the seconds of each part; the tail of a stage after its last slot."""
    seconds: dict[tuple[int, int, str], float] = {}
    once: dict[tuple[int, int], float] = {}
    last = len(plan.parts) - 1
    for number, part in enumerate(plan.parts):
        for kind, gives in (("F", number < last), ("B", number > 0)):
            total = problem.send_seconds * gives
            for k in range(part.first, part.stop):
                own = problem.fronts[problem.line[k]]
                total += (own.forward_seconds if kind == "F" else own.backward_seconds)[plan.points[k]]
            seconds[part.stage, part.chunk, kind] = total
        once[part.stage, part.chunk] = sum(
            problem.fronts[problem.line[k]].first_seconds for k in range(part.first, part.stop)
        )

    def slot_seconds(stage: int, slot: Slot) -> float:
        begun = once[stage, slot.chunk] if slot.kind == "F" and slot.micro_batch == 0 else 0.0
        return seconds[stage, slot.chunk, slot.kind] + begun

    schedule = SCHEDULES[SCHEDULE[problem.chunks]]
    orders = [schedule(s, problem.stages, problem.micro_batches, problem.chunks) for s in range(problem.stages)]
    placed = run_pipeline(orders, slot_seconds, lambda a, b: 0.0)
    tails = stage_seconds(problem, plan.parts, plan.points)[2]
    return float((np.array(ends(placed, problem.stages)) + tails).max())


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_best_plan_and_both_bounds_are_those_of_brute_force(problem: StageProblem) -> None:
    found, every = solve_stages(problem, count=4), list(every_plan(problem))
    if not every:
        assert found is None
        return
    assert found is not None
    least, room = min(plan.seconds for plan in every), RoomBound(problem)
    assert room.form_seconds <= least * (1 + 1e-9)
    assert found.plans[0].seconds == pytest.approx(least) and found.model_bound == pytest.approx(least)
    for plan in found.plans:
        assert (bytes_of(problem, plan.parts, plan.points) <= problem.capacity_bytes * (1 + 1e-9)).all()
        assert plan in every or min(abs(other.seconds - plan.seconds) for other in every) < 1e-9
    steps = [simulated(problem, plan) for plan in every]
    assert max(found.any_order_bound, room.step_seconds) <= min(steps) * (1 + 1e-9)
    for plan, step in zip(every, steps, strict=True):
        assert any_order_bound(problem, plan.parts, plan.points) <= step * (1 + 1e-9)
    if problem.chunks == 1 and not any(front.tail_seconds.any() for front in problem.fronts):
        exact = min(any_order_bound(problem, plan.parts, plan.points) for plan in every)
        assert found.any_order_bound == pytest.approx(min(exact, found.plans[0].seconds + problem.first_seconds[-1]))


def test_the_closed_form_is_the_step_of_equal_stages() -> None:
    one = np.ones(1)
    block = Front(one, 2 * one, one, one, 0 * one, 0 * one)
    for chunks in (1, 2):
        problem = StageProblem((block,), (0,) * 8, 4, 8, live(4, 8, chunks), np.full(4, 1e9), chunks)
        found = solve_stages(problem)
        assert found is not None
        plan = found.plans[0]
        assert simulated(problem, plan) == pytest.approx(plan.seconds)
        assert [part.stage for part in plan.parts] == list(range(4)) * chunks


def test_a_stage_with_less_room_takes_fewer_blocks_or_leaner_points() -> None:
    kept, nothing = np.array([1.0, 0.1]), np.zeros(2)
    block = Front(np.ones(2), np.array([2.0, 3.0]), kept, nothing, nothing, nothing)
    problem = StageProblem((block,), (0,) * 8, 2, 8, np.array([2.0, 1.0]), np.full(2, 4.0))
    found = solve_stages(problem)
    assert found is not None
    first, second = (plan_points(found.plans[0], stage) for stage in (0, 1))
    assert len(first) + len(second) == 8 and sum(first) > sum(second) == 0  # the first holds two micro-batches


def plan_points(plan: StagePlan, stage: int) -> list[int]:
    return [plan.points[k] for part in plan.parts if part.stage == stage for k in range(part.first, part.stop)]


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (8, 1), (64, 1), (16, 2)])
def test_a_line_of_a_hundred_blocks_is_near_its_bound_on_any_order(stages: int, chunks: int) -> None:
    """An embedding, 96 layers and a head, a dozen points each."""
    rng = np.random.default_rng(0)
    fronts = tuple(front(rng, 12, True) for _ in range(3))
    room = np.full(stages, 120.0 / stages + 40)
    problem = StageProblem(fronts, (0, *[1] * 96, 2), stages, 512, live(stages, 512, chunks), room, chunks)
    found = solve_stages(problem, tolerance=1e-3)
    assert found is not None
    best = found.plans[0]
    assert (bytes_of(problem, best.parts, best.points) <= problem.capacity_bytes).all()
    assert found.any_order_bound >= 0.97 * simulated(problem, best)


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


def test_of_two_chunks_the_first_one_is_lean_for_most_of_it_is_in_flight() -> None:
    """4 blocks on one of two stages, of which one must keep less."""
    nothing = np.zeros(2)
    block = Front(np.ones(2), np.array([2.0, 3.0]), np.array([1.0, 0.2]), nothing, nothing, nothing)
    problem = StageProblem((block,), (0,) * 8, 2, 8, np.array([2.5, 1.5]), np.array([8.5, 99.0]), 2)
    found = solve_stages(problem)
    assert found is not None
    plan = found.plans[0]
    chunks = {part.chunk: plan.points[part.first : part.stop] for part in plan.parts if part.stage == 0}
    assert sorted(chunks[0]) == [0, 1] and chunks[1] == (0, 0)
