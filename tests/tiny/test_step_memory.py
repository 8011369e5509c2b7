"""The memory limit of a whole step: the search's own limit follows what the step of its plan needs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoshard.cluster.hardware import hardware_text, load_hardware
from autoshard.errors import InfeasibleError
from autoshard.ir.plan import Plan, StepPlan
from autoshard.search.memory_fit import ROUNDS, fitting_step
from tests.tiny.test_plan_io import a_plan

GIB = 2.0**30


def micro_batch(size: float) -> Plan:
    """Plans of 10 GiB and below, the faster the larger; none below 2 GiB."""
    size = min(size, 10 * GIB)
    if size < 2 * GIB:
        raise InfeasibleError("too small")
    text = hardware_text(load_hardware("a100-80g-sxm"))
    return replace(a_plan(), hardware_text=text, predicted_peak_bytes=size, predicted_seconds=20.0 - size / GIB)


def halved(plan: Plan) -> Plan:
    """On two stages each has half of the memory, and 1 GiB beside it."""
    size = plan.predicted_peak_bytes / 2 + GIB
    return replace(plan, step=StepPlan(8, predicted_seconds=8 * plan.predicted_seconds, predicted_peak_bytes=size))


@pytest.mark.parametrize("limit", [6.5, 5.0, 4.0, 3.0])
def test_what_fits_on_its_stage_is_kept(limit):
    tried: list[float] = []

    def searched(size: float) -> Plan:
        tried.append(size)
        return micro_batch(size)

    plan = fitting_step(searched, halved, limit * GIB, math.inf)
    assert plan.step.predicted_peak_bytes <= limit * GIB and plan.capacity_bytes == limit * GIB
    assert plan.step.predicted_peak_bytes >= 0.9 * min(6.0, limit) * GIB  # not half empty
    assert len(tried) <= ROUNDS and tried[0] == math.inf
    assert bool(plan.search.notes) == (limit < 6)


def test_what_fits_nowhere_says_how_much_it_needs():
    with pytest.raises(
        InfeasibleError, match=r"no plan was found whose step fits in 1\.5 GiB a device: the smallest"
    ) as e:
        fitting_step(micro_batch, halved, 1.5 * GIB, math.inf)
    assert not e.value.proven


def test_a_model_without_a_plan_says_so_itself():
    with pytest.raises(InfeasibleError, match="too small"):
        fitting_step(micro_batch, halved, GIB, GIB)
