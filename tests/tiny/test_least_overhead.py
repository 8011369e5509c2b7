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
    case = problem(draw, chunks)
    costs = tuple(replace(cost, overhead_seconds=draw.random() * 0.3) for cost in case.costs)
    return replace(case, costs=costs)


@pytest.mark.parametrize("chunks", [slow(1), 2])
@pytest.mark.parametrize("seed", thinned(range(16), 3))
def test_no_plan_that_fits_has_less_rest_than_the_bound(seed: int, chunks: int) -> None:
    draw = random.Random(f"rest {seed} {chunks}")
    free = drawn(draw, chunks)
    plans = list(itertools.islice(every_plan(free.stage_problem), 400))
    peaks = [max(free.step_costs(plan).peak_bytes) for plan in plans]
    for share in (0.0, 0.3, 1.0):
        limited = replace(free, capacity_bytes=min(peaks) + share * (max(peaks) - min(peaks)))
        pairs = zip(plans, peaks, strict=True)
        fitting = [overhead_of(limited, plan) for plan, peak in pairs if peak <= limited.capacity_bytes]
        outer = OuterChoice(limited, None)
        bound, solved = OBJECTIVES[RATIO].bounds[-1](outer), OBJECTIVES[RATIO].solved(outer, math.inf)
        assert bound <= min(fitting) * (1 + 1e-12)
        if solved is not None and solved.fits:
            assert solved.peak_bytes <= limited.capacity_bytes
            assert solved.overhead >= bound
            assert len(plans) == 400 or solved.overhead >= min(fitting) * (1 - 1e-9)


@pytest.mark.parametrize("seed", quick_at(range(8), 0, 1, 2, 3, 4, 6, 7))
def test_without_a_limit_the_least_is_found(seed: int) -> None:
    draw = random.Random(f"least {seed}")
    case = drawn(draw, 1)
    plans = list(every_plan(case.stage_problem))
    result = found_of(RATIO, [(case, None)])
    least = min(overhead_of(case, plan) for plan in plans)
    assert result.best.overhead == pytest.approx(least, rel=1e-9)
    assert result.bound <= result.best.overhead
    assert result.gap <= 1e-6
    as_little = [plan for plan in plans if overhead_of(case, plan) <= least * (1 + 1e-9)]
    fastest = min(simulate_step(case.step_costs(plan)).step_seconds for plan in as_little)
    assert result.best.seconds <= 1.01 * fastest


def test_what_is_computed_again_and_sent_is_rest_and_waiting_is_not() -> None:
    case = drawn(random.Random("one"), 1)
    while case.choice.stages < 2:
        case = drawn(random.Random(case.choice.micro_batches), 1)
    plans = list(every_plan(case.stage_problem))
    keep_all = [
        plan for plan in plans if all(case.keeps[k][p] == "all" for k, p in zip(case.kinds, plan.points, strict=True))
    ]
    inside = case.choice.micro_batches / case.choice.stages * sum(case.costs[k].overhead_seconds for k in case.kinds)
    for plan in keep_all:
        sent = sum(2 * case.received_seconds(part.first) for part in plan.parts[1:])
        assert overhead_of(case, plan) == pytest.approx(inside + case.choice.micro_batches / case.choice.stages * sent)
    recomputing = [plan for plan in plans if plan.parts == keep_all[0].parts and plan.points != keep_all[0].points]
    assert all(overhead_of(case, plan) >= overhead_of(case, keep_all[0]) for plan in recomputing)
