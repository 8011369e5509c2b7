"""Levels 0 and 1 of whole steps on a captured model: against every plan of a small space."""

from __future__ import annotations

import pytest

from autoshard.simulation.step_timeline import simulate_step
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.whole_step_search.step_overhead import overhead_of
from tests.single.test_joint_search import every_plan_of, every_step, gpt2, hardware, space


@pytest.mark.slow
def test_at_level_0_no_plan_of_the_space_has_less_beside_useful_work() -> None:
    graph = gpt2(2)
    own = space(graph, 4, 8, micro_batch=(2,), stages=(1, 2), tensor=(1, 2), zero=(0, 1), virtual_stages=(1,))
    found = joint_search(graph, hardware(), own, 8e10, level=0)
    every = list(every_plan_of(own, graph))
    least = min(overhead_of(problem, plan) for problem, plan in every)
    assert found.bound <= least * (1 + 1e-9) and found.best.rest_seconds <= 1.0001 * least
    assert found.gap < 0.01 and found.best.problem.choice.stages == 2
    problem, fastest = min(every, key=lambda own: simulate_step(own[0].step_costs(own[1])).step_seconds)
    assert overhead_of(problem, fastest) > least


def test_at_level_1_no_plan_of_the_space_holds_less() -> None:
    graph = gpt2(3)
    own = space(graph, 4, 8, micro_batch=(2,), stages=(1, 2), tensor=(1, 2), zero=(0, 1, 3), virtual_stages=(1, 3))
    found = joint_search(graph, hardware(), own, 8e10, level=1)
    every = list(every_step(own, graph))
    least = min(peak for _, peak in every)
    assert found.bound <= least * (1 + 1e-9) and found.best.peak_bytes <= 1.0001 * least
    assert found.gap < 0.01
    fastest = min(seconds for seconds, peak in every if peak <= found.best.peak_bytes * (1 + 1e-9))
    assert found.best.seconds <= 1.005 * fastest
