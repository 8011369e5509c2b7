"""Pipeline schedules: every slot once and in order, the known closed forms, and a brute-force clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.simulation.pipeline_schedule import SCHEDULES, Placed, Slot, ends, most_in_flight, run_pipeline

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
