"""A step's times and memory are the same whether they are laid on a kept sequence or looked up slot by slot."""

from __future__ import annotations

import random

import pytest

from autoshard.simulation.pipeline_schedule import Slot, order_of, run_pipeline
from autoshard.simulation.step_timeline import PartCosts, StageCosts, StepCosts, simulate_step


def random_costs(seed: int) -> StepCosts:
    draw = random.Random(seed)
    schedule = draw.choice(["gpipe", "1f1b", "interleaved"])
    stages, chunks = draw.randint(1, 5), draw.randint(2, 3) if schedule == "interleaved" else 1
    micro_batches = stages * draw.randint(1, 4)
    drawn = [[draw.uniform(0.1, 3.0) for _ in range(7)] for _ in range(stages * chunks)]
    parts = tuple(PartCosts(a, b, 6.0 + kept, *rest) for a, b, kept, *rest in drawn)  # kept: what is sent, and more
    own = tuple(StageCosts(draw.uniform(0, 5), (("optimizer", draw.uniform(0, 2)),)) for _ in range(stages))
    return StepCosts(schedule, micro_batches, parts, own)


def by_definition(costs: StepCosts) -> dict[tuple[int, Slot], float]:
    """When each slot ends: after the one before it on its stage, and after what makes its input."""
    stages, parts = len(costs.stages), len(costs.parts)
    orders = [order_of(costs.schedule, s, stages, costs.micro_batches, costs.chunks) for s in range(stages)]
    before = {(s, slot): order[i - 1] if i else None for s, order in enumerate(orders) for i, slot in enumerate(order)}
    found: dict[tuple[int, Slot], float] = {}

    def end(stage: int, slot: Slot) -> float:
        if (stage, slot) not in found:
            part, earlier = slot.chunk * stages + stage, before[stage, slot]
            giver = part - 1 if slot.kind == "F" else part + 1
            kind = slot.kind
            if slot.kind == "B" and part == parts - 1:
                kind, giver = "F", part
            starts = [0.0 if earlier is None else end(stage, earlier)]
            if giver >= 0:
                starts.append(end(giver % stages, Slot(kind, slot.micro_batch, giver // stages)))
            found[stage, slot] = max(starts) + costs.slot_seconds(stage, slot)
        return found[stage, slot]

    return {(s, slot): end(s, slot) for s, order in enumerate(orders) for slot in order}


@pytest.mark.parametrize("seed", range(40))
def test_a_kept_sequence_says_when_each_slot_ends(seed: int) -> None:
    costs = random_costs(seed)
    made, wanted = simulate_step(costs), by_definition(costs)
    assert {(p.stage, p.slot): pytest.approx(p.end_seconds) for p in made.placed} == wanted
    last = [max(end for (s, _), end in wanted.items() if s == stage) for stage in range(len(costs.stages))]
    tails = [own.tail_seconds for own in costs.stages]
    assert made.stage_seconds == pytest.approx([end + tail for end, tail in zip(last, tails, strict=True)])


@pytest.mark.parametrize("seed", range(40))
def test_what_a_stage_holds_most_is_that_of_its_curve(seed: int) -> None:
    """The one is said by the orders alone, before any time is known."""
    costs = random_costs(seed)
    curves = simulate_step(costs).memory
    assert costs.peak_bytes == pytest.approx([max(size for _, size in own) for own in curves])


def test_what_a_send_takes_is_waited_for() -> None:
    costs = random_costs(3)
    stages = len(costs.stages)
    orders = [costs.order(stage) for stage in range(stages)]
    placed = run_pipeline(orders, costs.slot_seconds, lambda a, b: 10.0 + a)
    ends = {(p.stage, p.slot): p.end_seconds for p in placed}
    sent = [p for p in placed if p.slot.kind == "F" and p.stage > 0 and p.slot.chunk == 0]
    assert sent
    for own in sent:
        given = ends[own.stage - 1, own.slot] + 10.0 + own.stage - 1
        assert own.start_seconds >= given - 1e-9
