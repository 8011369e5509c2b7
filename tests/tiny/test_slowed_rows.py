"""Computations beside communication take longer: how long a step surely is for that, by the simulator's own streams."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.formulation.resource_tables import COMPUTE, HIDDEN, HOST, IN_ROW, PATH
from autoshard.formulation.slowed_rows import SLOWED, SlowedRows
from autoshard.formulation.step_resources import follows, pair_seconds, step_resources
from autoshard.ir.mesh import Mesh
from autoshard.simulation.stream_schedule import Schedule, StreamTask
from tests.slow import quick_at
from tests.step_times import step_seconds
from tests.tiny.test_step_bound import style_choice

SLOWDOWN, LINK = 0.15, "link"
NAMES = (COMPUTE, PATH, IN_ROW, HOST, LINK, HIDDEN + LINK)


def computation(seconds: float) -> StreamTask:
    return StreamTask("product", ("compute",), seconds, "backward", 0.0, "", "")


def talk(seconds: float) -> StreamTask:
    return StreamTask("sum", ("communication",), seconds, "backward", 0.0, "", "", collective="all_reduce", axes=("a",))


def slowed(computed: float, in_row: float, link: float, hidden: float) -> float:
    rows = SlowedRows(NAMES, SLOWDOWN)
    values = np.array([[computed], [0.0], [in_row], [0.0], [link], [hidden]])
    return float(rows.of(np.concatenate([np.zeros_like(values), values]))[-1, 0])


def test_computations_beside_a_link_are_as_slow_as_in_the_simulation() -> None:
    schedule = Schedule(0.0, SLOWDOWN)
    schedule.start(talk(4.0))
    schedule.run_in_order([computation(3.0), talk(1.0), computation(7.0)])
    assert schedule.now == pytest.approx(12.0)  # the second sum waits for the first, until 4, and ends at 5
    alone = Schedule(0.0, SLOWDOWN)
    alone.start(talk(4.0))
    alone.run_in_order([computation(10.0)])
    assert alone.now == pytest.approx(slowed(10.0, 10.0, 4.0, 0.0)) == pytest.approx(10.0 + 4.0 * 0.15 / 1.15)
    assert slowed(10.0, 11.0, 5.0, 0.0) <= schedule.now


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_is_shorter(seed: int) -> None:
    """Sums of gradients beside everything, collectives in a row, and sums beside a weight product alone."""
    draw, schedule = random.Random(seed), Schedule(0.0, SLOWDOWN)
    computed = link = hidden = idle = 0.0
    for _ in range(30):
        kind, seconds = draw.choice(("compute", "in a row", "bucket", "early")), draw.expovariate(1.0)
        if kind == "compute":
            schedule.run_in_order([computation(seconds)])
            computed += seconds
        elif kind == "in a row":
            schedule.run_in_order([talk(seconds)])
            idle += seconds
        elif kind == "bucket":
            schedule.start(talk(seconds))
        else:
            product = draw.expovariate(1.0)
            sent = schedule.start(talk(seconds))
            schedule.run_in_order([computation(product)])
            schedule.wait_for(sent)
            computed += product
            idle += max(0.0, seconds - product)
            hidden += max(0.0, seconds - product) - max(0.0, seconds - (1 + SLOWDOWN) * product)
        link += 0.0 if kind == "compute" else seconds
    end = max(event.end_seconds for event in schedule.events)
    assert slowed(computed, computed + idle, link, hidden) <= end * (1 + 1e-9)


def test_a_sum_beside_a_shorter_product_leaves_less_idle_as_that_is_slower() -> None:
    schedule = Schedule(0.0, SLOWDOWN)
    sent = schedule.start(talk(2.0))
    schedule.run_in_order([computation(1.0)])
    schedule.wait_for(sent)
    assert schedule.now == pytest.approx(2.0) == pytest.approx(slowed(1.0, 2.0, 2.0, 0.15))
    assert slowed(1.0, 2.0, 2.0, 0.0) > 2.0  # what is taken off matters


def test_the_update_is_slowed_by_no_link() -> None:
    assert slowed(3.0, 3.0, 3.0, 3.0 * SLOWDOWN) == pytest.approx(3.0)
    assert not any(name.startswith((SLOWED, HIDDEN)) for name in SlowedRows(NAMES, 0.0).names)


@pytest.mark.parametrize("style", quick_at(["fsdp", "dp"], 1))
def test_it_says_more_of_a_step_than_any_other_resource(style: str) -> None:
    graph = transformer_graph(Transformer(3, 4096, 8, 2048, 512), 16, "bf16-mixed", "adamw").graph
    formulation = formulate(PlanningContext(graph, Mesh.parse("dp=8"), load_hardware("h100-80g-sxm")))
    resources, choice = step_resources(formulation), style_choice(formulation, style)
    used = resources.least_used(choice)
    others = np.array([not name.startswith(SLOWED) for name in resources.names])
    without = np.where(follows(resources.names) & others & others[:, None], pair_seconds(used), 0.0).max()
    assert without * 1.005 < resources.longest(used) <= step_seconds(formulation, choice) * (1 + 1e-9)
    likely = resources.roughly_used(choice)
    assert not likely[np.tile(~others, 2)].any()  # an estimate has its own part of it
