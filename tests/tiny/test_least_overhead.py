"""Level 0 of whole steps: what is left beside useful work, its least and the bound on it, against every plan."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from autoshard.search.objectives import RATIO
from autoshard.simulation.step_timeline import simulate_step
from autoshard.whole_step_search.best_first import OuterChoice
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_levels import OBJECTIVES
from autoshard.whole_step_search.step_overhead import overhead_of
from tests.slow import quick_at, slow, thinned
from tests.stage_brute_force import every_plan
from tests.tiny.test_stage_rooms import found_of, problem


def drawn(draw: random.Random, chunks: int) -> StepProblem:
    """With communication inside blocks, and room for some plans."""
    own = problem(draw, chunks)
    costs = tuple(replace(cost, rest_seconds=draw.random() * 0.3) for cost in own.costs)
    return replace(own, costs=costs)


@pytest.mark.parametrize("chunks", [slow(1), 2])
@pytest.mark.parametrize("seed", thinned(range(16), 3))
def test_no_plan_that_fits_has_less_rest_than_the_bound(seed: int, chunks: int) -> None:
    draw = random.Random(f"rest {seed} {chunks}")
    free = drawn(draw, chunks)
    plans = list(itertools.islice(every_plan(free.stage_problem), 400))
    peaks = [max(free.step_costs(plan).peak_bytes) for plan in plans]
    for share in (0.0, 0.3, 1.0):
        own = replace(free, capacity_bytes=min(peaks) + share * (max(peaks) - min(peaks)))
        pairs = zip(plans, peaks, strict=True)
        fitting = [overhead_of(own, plan) for plan, peak in pairs if peak <= own.capacity_bytes]
        outer = OuterChoice(own, None)
        bound, made = OBJECTIVES[RATIO].bounds[-1](outer), OBJECTIVES[RATIO].solved(outer, math.inf)
        assert bound <= min(fitting) * (1 + 1e-12)
        if made is not None and made.fits:
            assert made.peak_bytes <= own.capacity_bytes
            assert made.rest_seconds >= bound
            assert len(plans) == 400 or made.rest_seconds >= min(fitting) * (1 - 1e-9)


@pytest.mark.parametrize("seed", quick_at(range(8), 0, 1, 2, 3, 4, 6, 7))
def test_without_a_limit_the_least_is_found(seed: int) -> None:
    draw = random.Random(f"least {seed}")
    own = drawn(draw, 1)
    plans = list(every_plan(own.stage_problem))
    found = found_of(RATIO, [(own, None)])
    least = min(overhead_of(own, plan) for plan in plans)
    assert found.best.rest_seconds == pytest.approx(least, rel=1e-9)
    assert found.bound <= found.best.rest_seconds
    assert found.gap <= 1e-6
    as_little = [plan for plan in plans if overhead_of(own, plan) <= least * (1 + 1e-9)]
    fastest = min(simulate_step(own.step_costs(plan)).step_seconds for plan in as_little)
    assert found.best.seconds <= 1.01 * fastest


def test_what_is_computed_again_and_sent_is_rest_and_waiting_is_not() -> None:
    own = drawn(random.Random("one"), 1)
    while own.choice.stages < 2:
        own = drawn(random.Random(own.choice.micro_batches), 1)
    plans = list(every_plan(own.stage_problem))
    kept = [
        plan for plan in plans if all(own.keeps[k][p] == "all" for k, p in zip(own.kinds, plan.points, strict=True))
    ]
    inside = own.choice.micro_batches / own.choice.stages * sum(own.costs[kind].rest_seconds for kind in own.kinds)
    for plan in kept:
        sent = sum(2 * own.received_seconds(part.first) for part in plan.parts[1:])
        assert overhead_of(own, plan) == pytest.approx(inside + own.choice.micro_batches / own.choice.stages * sent)
    again = [plan for plan in plans if plan.parts == kept[0].parts and plan.points != kept[0].points]
    assert all(overhead_of(own, plan) >= overhead_of(own, kept[0]) for plan in again)
