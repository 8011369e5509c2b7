"""Pipeline schedules and the slots of their stages."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.program.schedules.pipeline_schedule import (
    SCHEDULES,
    Placed,
    Slot,
    ends,
    most_in_flight,
    order_of,
    run_pipeline,
)
from autoshard.simulation.step_timeline import PartCosts, StageCosts, StepCosts, simulate_step

# --- pipeline schedules: every slot once and in order, the known closed forms, and a brute-force clock ---


NAMES = sorted(SCHEDULES)


def orders(name: str, stages: int, micro_batches: int, chunks: int) -> list[list[Slot]]:
    return [SCHEDULES[name](stage, stages, micro_batches, chunks) for stage in range(stages)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name, stages = draw(st.sampled_from(NAMES)), draw(st.integers(1, 5))
    if name == "interleaved":
        return name, stages, stages * draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return name, stages, draw(st.integers(1, 12)), 1


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_stage_runs_every_micro_batch_once_each_way(case: tuple[str, int, int, int]) -> None:
    _, _, micro_batches, chunks = case
    wanted = {Slot(k, m, c) for k, m, c in itertools.product("FB", range(micro_batches), range(chunks))}
    for order in orders(*case):
        assert len(order) == len(wanted) and set(order) == wanted
        for slot in wanted:
            if slot.kind == "B":
                assert order.index(slot) > order.index(slot._replace(kind="F"))


@settings(max_examples=60, deadline=None)
@given(cases(), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 1))
def test_a_slot_starts_as_soon_as_its_stage_and_its_input_allow(
    case: tuple[str, int, int, int], forward: float, backward: float, send: float
) -> None:
    _, stages, _, chunks = case
    placed = run_pipeline(orders(*case), lambda s, slot: (forward if slot.kind == "F" else backward) + s / 7,
                          lambda a, b: send)  # fmt: skip
    times = {(p.stage, p.slot): p for p in placed}
    for stage, order in enumerate(orders(*case)):
        free = 0.0
        for slot in order:
            arrives = given_at(times, stage, slot, stages, chunks, send)
            assert times[stage, slot].start_seconds == pytest.approx(max(free, arrives))
            free = times[stage, slot].end_seconds


def given_at(
    times: dict[tuple[int, Slot], Placed], stage: int, slot: Slot, stages: int, chunks: int, send: float
) -> float:
    """By the definition: parts of the model in a row, part p on stage p % stages."""
    part = slot.chunk * stages + stage
    if slot.kind == "F":
        before = part - 1
    elif part == stages * chunks - 1:
        return times[stage, slot._replace(kind="F")].end_seconds
    else:
        before = part + 1
    if before < 0:
        return 0.0
    other = before % stages
    return times[other, slot._replace(chunk=before // stages)].end_seconds + (send if other != stage else 0.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 8), (8, 3)])
def test_uniform_stages_take_the_known_time(name: str, stages: int, micro_batches: int) -> None:
    """(m + p - 1)(f + b), Narayanan et al. 2021, section 2.2."""
    placed = run_pipeline(orders(name, stages, micro_batches, 1), lambda s, x: 1.0 if x.kind == "F" else 2.0,
                          lambda a, b: 0.0)  # fmt: skip
    assert max(ends(placed, stages)) == pytest.approx((micro_batches + stages - 1) * 3.0)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_interleaving_divides_the_bubble(stages: int, micro_batches: int, chunks: int) -> None:
    """The bubble is (p - 1)(f + b) / v, Narayanan et al. 2021, section 2.3."""
    placed = run_pipeline(orders("interleaved", stages, micro_batches, chunks),
                          lambda s, x: (1.0 if x.kind == "F" else 2.0) / chunks, lambda a, b: 0.0)  # fmt: skip
    assert max(ends(placed, stages)) == pytest.approx(micro_batches * 3.0 + (stages - 1) * 3.0 / chunks)


def test_one_forward_one_backward_keeps_fewer_micro_batches_than_gpipe() -> None:
    assert [most_in_flight(order) for order in orders("1f1b", 4, 8, 1)] == [4, 3, 2, 1]
    assert [most_in_flight(order) for order in orders("gpipe", 4, 8, 1)] == [8] * 4


def test_orders_that_wait_for_each_other_are_refused() -> None:
    backward_first = [[Slot("B", 0), Slot("F", 0)], [Slot("F", 0), Slot("B", 0)]]
    with pytest.raises(ValueError, match="never ends"):
        run_pipeline(backward_first, lambda s, x: 1.0, lambda a, b: 0.0)


# --- a step's times and memory are the same whether they are laid on a kept sequence or looked up slot by slot ---


def random_costs(seed: int) -> StepCosts:
    draw = random.Random(seed)
    schedule = draw.choice(["gpipe", "1f1b", "interleaved"])
    stages, chunks = draw.randint(1, 5), draw.randint(2, 3) if schedule == "interleaved" else 1
    micro_batches = stages * draw.randint(1, 4)
    drawn = [[draw.uniform(0.1, 3.0) for _ in range(7)] for _ in range(stages * chunks)]
    parts = tuple(PartCosts(a, b, 6.0 + held, *more) for a, b, held, *more in drawn)  # kept: what is sent, and more
    by_stage = tuple(StageCosts(draw.uniform(0, 5), (("optimizer", draw.uniform(0, 2)),)) for _ in range(stages))
    return StepCosts(schedule, micro_batches, parts, by_stage)


def by_definition(costs: StepCosts) -> dict[tuple[int, Slot], float]:
    """When each slot ends: after the one before it on its stage, and after what makes its input."""
    stages, parts = len(costs.stages), len(costs.parts)
    orders = [order_of(costs.schedule, s, stages, costs.micro_batches, costs.chunks) for s in range(stages)]
    before = {(s, slot): order[i - 1] if i else None for s, order in enumerate(orders) for i, slot in enumerate(order)}
    ends: dict[tuple[int, Slot], float] = {}

    def end(stage: int, slot: Slot) -> float:
        if (stage, slot) not in ends:
            part, earlier = slot.chunk * stages + stage, before[stage, slot]
            giver = part - 1 if slot.kind == "F" else part + 1
            kind = slot.kind
            if slot.kind == "B" and part == parts - 1:
                kind, giver = "F", part
            starts = [0.0 if earlier is None else end(stage, earlier)]
            if giver >= 0:
                starts.append(end(giver % stages, Slot(kind, slot.micro_batch, giver // stages)))
            ends[stage, slot] = max(starts) + costs.slot_seconds(stage, slot)
        return ends[stage, slot]

    return {(s, slot): end(s, slot) for s, order in enumerate(orders) for slot in order}


@pytest.mark.parametrize("seed", range(40))
def test_a_kept_sequence_says_when_each_slot_ends(seed: int) -> None:
    costs = random_costs(seed)
    timeline, wanted = simulate_step(costs), by_definition(costs)
    assert {(p.stage, p.slot): pytest.approx(p.end_seconds) for p in timeline.placed} == wanted
    last = [max(end for (s, _), end in wanted.items() if s == stage) for stage in range(len(costs.stages))]
    tails = [stage.tail_seconds for stage in costs.stages]
    assert timeline.stage_seconds == pytest.approx([end + tail for end, tail in zip(last, tails, strict=True)])


@pytest.mark.parametrize("seed", range(40))
def test_what_a_stage_holds_most_is_that_of_its_curve(seed: int) -> None:
    """The one is said by the orders alone, before any time is known."""
    costs = random_costs(seed)
    curves = simulate_step(costs).memory
    assert costs.peak_bytes == pytest.approx([max(size for _, size in curve) for curve in curves])


def test_what_a_send_takes_is_waited_for() -> None:
    costs = random_costs(3)
    stages = len(costs.stages)
    orders = [costs.order(stage) for stage in range(stages)]
    placed = run_pipeline(orders, costs.slot_seconds, lambda a, b: 10.0 + a)
    ends = {(p.stage, p.slot): p.end_seconds for p in placed}
    sent = [p for p in placed if p.slot.kind == "F" and p.stage > 0 and p.slot.chunk == 0]
    assert sent
    for forward in sent:
        arrival = ends[forward.stage - 1, forward.slot] + 10.0 + forward.stage - 1
        assert forward.start_seconds >= arrival - 1e-9
