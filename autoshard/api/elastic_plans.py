"""Plans of one model for several numbers of devices, in one package: a job goes on with the devices that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autoshard.api import verbs
from autoshard.api.planned import CapturedModel, PlannedModel
from autoshard.api.step_answer import planned_step
from autoshard.cluster.hardware import Hardware
from autoshard.errors import InfeasibleError, UsageError
from autoshard.search.search_request import SearchRequest
from autoshard.units import counted


def numbers_of_devices(devices: int | Sequence[int] | None) -> tuple[int, ...]:
    """Numbers of devices, the largest first. UsageError for one given twice."""
    numbers = (devices,) if isinstance(devices, int) else tuple(devices or ())
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise UsageError(f"--devices names {twice} twice", "each number of devices once, as --devices 8,6,4")
    return tuple(sorted(numbers, reverse=True))


def check_elastic(wanted: SearchRequest, others: Sequence[int]) -> None:
    """UsageError where one job can't also have plans for `others`."""
    if others and wanted.mesh is not None:
        raise UsageError(f"--mesh {wanted.mesh} is one number of devices", "--devices alone, and pins")
    if others and wanted.pareto:
        raise UsageError("--pareto: the front is of one number of devices", f"--devices {wanted.devices} --pareto")


def planned_for(
    model: CapturedModel, hardware: Hardware, wanted: SearchRequest, devices: int, cache: str | Path | bool | None
) -> PlannedModel:
    """The plan of the same request for another number of devices. Errors name that number."""
    request = replace(wanted, devices=devices)
    try:
        if request.searches_step:
            return planned_step(model, hardware, request).plan
        return verbs.planned(model, hardware, request, cache, whole_plans=False)
    except (UsageError, InfeasibleError) as error:
        error.message = f"for {counted(devices, 'device')}: {error.message}"
        raise
