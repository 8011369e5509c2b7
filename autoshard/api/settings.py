"""What a program says of a search, as the search reads it: texts, numbers and tables instead of options."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.cluster.hardware import Hardware, load_hardware, parse_hardware
from autoshard.constraints.step_request import StepRequest, read_stage_pins
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.search.objectives import parse_level
from autoshard.search.search_request import SearchRequest
from autoshard.styles.parallel_mode import BEST, of_mode, read_mode
from autoshard.units import parse_quantity

FURTHER = ("strategy", "solver", "ilp_engine", "pins_file", "pareto", "all_to_all")
STEP = tuple(field.name for field in dataclasses.fields(StepRequest) if field.name != "pins")


def search_request(
    mesh: str | Mesh | Mapping[str, int] | None,
    devices: int | None,
    level: int | str,
    pins: Sequence[str] | Mapping[str, Any],
    memory_limit: str | float | None,
    time_limit: str | float | None,
    further: Mapping[str, Any],
    mode: str = "auto",
) -> SearchRequest:
    """UsageError names the setting that can't be."""
    known = {*FURTHER, *STEP}
    for name in further:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1) or sorted(known)
            raise UsageError(f"plan has no setting {name!r}", " or ".join(near))
    has_pins = bool(pins or further.get("pins_file"))
    strategy, own = of_mode(read_mode(mode), further.get("strategy", BEST), read_mesh(mesh), devices, has_pins)
    if own is None and devices is None:
        raise UsageError("neither a mesh nor a number of devices is given", 'mesh="dp=2,tp=2", or devices=4')
    step = _step_request({name: value for name, value in further.items() if name in STEP}, pin_texts(pins), own)
    stages = step.fixed_stages()
    if own is not None and devices not in (None, own.size * stages):
        of = f" on each of {stages} stages" if stages > 1 else ""
        raise UsageError(f"the mesh {own} has {own.size} devices{of}, but devices={devices}", f'mesh="{own}" alone')
    given: dict[str, Any] = {
        name: Path(value) if name == "pins_file" and value else value
        for name, value in further.items()
        if name not in STEP
    }
    return SearchRequest(
        mesh=own,
        devices=devices,
        level=parse_level(str(level)),
        pins=pin_texts(pins),
        memory_limit_bytes=_quantity(memory_limit, "bytes"),
        time_limit_seconds=_quantity(time_limit, "seconds"),
        step=step,
        **given | {"strategy": strategy},
    )


def _step_request(said: Mapping[str, Any], pins: tuple[str, ...], mesh: Mesh | None) -> StepRequest:
    step = StepRequest(**said, pins=read_stage_pins(pins))
    step.check()
    if step.open_ or (step.global_batch is not None and mesh is None):
        told = "a program has a fixed step: how many stages and micro-batches is searched by the command line"
        raise UsageError(told, "autoshard plan MODEL --devices 8 --global-batch 256, then autoshard.load_plan")
    return step


def read_mesh(mesh: str | Mesh | Mapping[str, int] | None) -> Mesh | None:
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    return Mesh.parse(mesh if isinstance(mesh, str) else ",".join(f"{name}={size}" for name, size in mesh.items()))


def read_hardware(hardware: str | Hardware) -> Hardware:
    """A profile by name or file, or its text."""
    if isinstance(hardware, Hardware):
        return hardware
    return parse_hardware(hardware) if "\n" in hardware else load_hardware(hardware)


def pin_texts(pins: Sequence[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """`{"fc1": ((4, 1), (1, 2))}` as `fc1=((4, 1), (1, 2))`."""
    if isinstance(pins, Mapping):
        return tuple(f"{what}={how}" for what, how in pins.items())
    return (pins,) if isinstance(pins, str) else tuple(pins)


def _quantity(value: str | float | None, dimension: str) -> float | None:
    return parse_quantity(value, dimension) if isinstance(value, str) else None if value is None else float(value)
