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
    configs = space(graph, 4, 8, micro_batch=(2,), stages=(1, 2), tensor=(1, 2), zero=(0, 1), virtual_stages=(1,))
    result = joint_search(graph, hardware(), configs, 8e10, level=0)
    every = list(every_plan_of(configs, graph))
    least = min(overhead_of(problem, plan) for problem, plan in every)
    assert result.bound <= least * (1 + 1e-9) and result.best.overhead <= 1.0001 * least
    assert result.gap < 0.01 and result.best.problem.choice.stages == 2
    problem, fastest = min(every, key=lambda pair: simulate_step(pair[0].step_costs(pair[1])).step_seconds)
    assert overhead_of(problem, fastest) > least


def test_at_level_1_no_plan_of_the_space_holds_less() -> None:
    graph = gpt2(3)
    configs = space(graph, 4, 8, micro_batch=(2,), stages=(1, 2), tensor=(1, 2), zero=(0, 1, 3), virtual_stages=(1, 3))
    result = joint_search(graph, hardware(), configs, 8e10, level=1)
    every = list(every_step(configs, graph))
    least = min(peak for _, peak in every)
    assert result.bound <= least * (1 + 1e-9) and result.best.peak_bytes <= 1.0001 * least
    assert result.gap < 0.01
    fastest = min(seconds for seconds, peak in every if peak <= result.best.peak_bytes * (1 + 1e-9))
    assert result.best.seconds <= 1.005 * fastest
