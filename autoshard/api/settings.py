"""Settings of a search as a program gives them (texts, numbers and tables), read into requests."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.cluster.hardware import Hardware, load_hardware, parse_hardware
from autoshard.constraints import size_histogram
from autoshard.constraints.axis_names import check_axis_names
from autoshard.constraints.fusion_request import read_fusion
from autoshard.constraints.pins import pin_file_texts
from autoshard.constraints.step_request import NO_PLACES, PINNED, PLACE_PIN, StepRequest, read_stage_pins
from autoshard.constraints.verify_request import Backend, VerifyRequest
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.search.objectives import parse_level
from autoshard.search.search_request import SearchRequest
from autoshard.servers.server_request import ServerRequest
from autoshard.styles.parallel_mode import BEST, STAND_ALONE, of_mode, read_mode
from autoshard.units import parse_quantity

_APART = ("mesh", "devices", "level", "pins", "memory_limit_bytes", "time_limit_seconds", "origin", "step", "servers",
          "cache")  # fields of a request with an argument, or an option, of another name  # fmt: skip
FURTHER = tuple(field.name for field in dataclasses.fields(SearchRequest) if field.name not in _APART)
SERVERS = ("parameter_servers", "workers", "asynchronous", "staleness", "table_optimizer")
STEP = tuple(field.name for field in dataclasses.fields(StepRequest) if field.name not in PINNED)


@dataclass(frozen=True)
class Words:
    """Spellings of the mesh and the devices in this interface, and what to try."""

    missing: tuple[str, str]
    unequal: tuple[str, str]


IN_PROGRAM = Words(
    ("neither a mesh nor a number of devices is given", 'mesh="dp=2,tp=2", or devices=4'),
    ("but devices={devices}", 'mesh="{mesh}" alone'),
)
ON_COMMAND_LINE = Words(
    ("the following arguments are required: --mesh, or --devices to search for one", "--devices 8"),
    ("but --devices says {devices}", "--mesh {mesh} alone, or --devices {devices} alone to search for a mesh"),
)


_WHOLE = {
    one.name
    for owner in (StepRequest, SearchRequest)
    for one in dataclasses.fields(owner)
    if one.type in ("int", "int | None")
}


def search_request(
    mesh: str | Mesh | Mapping[str, int] | None,
    devices: int | None,
    level: int | str,
    pins: Sequence[str] | Mapping[str, Any] | None,
    memory_limit: str | float | None,
    time_limit: str | float | None,
    further: Mapping[str, Any],
    mode: str = "auto",
) -> SearchRequest:
    """Search request from a program's settings. UsageError names a setting that is not valid."""
    if devices is not None and (type(devices) is not int or devices < 1):
        several = "a plan for each number, then write(first, folder, also=others)"
        raise UsageError(
            f"devices={devices!r}: expected a whole number, 1 or more", f"devices=4; for several: {several}"
        )
    known = {*FURTHER, *STEP, *SERVERS}
    for name in further:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1) or sorted(known)
            raise UsageError(f"plan has no setting {name!r}", " or ".join(near))
        if name in _WHOLE and further[name] is not None and type(further[name]) is not int:
            raise UsageError(f"{name}={further[name]!r}: expected a whole number", f"{name}=4")
    parsed = read_mesh(mesh)
    said = {name: value for name, value in further.items() if name in STEP}
    file = Path(further["pins_file"]) if further.get("pins_file") else None
    step = step_request(said, pin_texts(pins), file)
    if step.open_ or (step.global_batch is not None and parsed is None):
        message = "a program has a fixed step: how many stages and micro-batches is searched by the command line"
        raise UsageError(message, "autoshard plan MODEL --devices 8 --global-batch 256, then autoshard.load_plan")
    fields = {name: value for name, value in further.items() if name not in (*STEP, *SERVERS)}
    fields |= {"servers": server_request(further), "pins_file": file}
    return wanted(
        parsed,
        devices,
        mode,
        step,
        IN_PROGRAM,
        level=level,
        pins=pin_texts(pins),
        memory_limit_bytes=_quantity(memory_limit, "bytes"),
        time_limit_seconds=_quantity(time_limit, "seconds"),
        **fields,
    )


def wanted(
    mesh: Mesh | None,
    devices: int | None,
    mode: str,
    step: StepRequest,
    words: Words,
    *,
    level: int | str,
    pins: tuple[str, ...],
    pins_file: Path | None,
    strategy: str = BEST,
    **settings: Any,
) -> SearchRequest:
    """The request of a program or of a command; `settings` are fields of it, those of FURTHER as a user says them.
    UsageError where they contradict."""
    settings |= {"fuse": _fuse_texts(settings.get("fuse", ())), "sizes": sizes(settings.get("sizes"))}
    read_fusion(settings["fuse"])
    servers = settings.get("servers", ServerRequest())
    if servers.said and mesh is None and devices is None:
        devices = 1  # a worker
    strategy, mesh = of_mode(read_mode(mode), strategy, mesh, devices, bool(pins or pins_file))
    if read_mode(mode) == STAND_ALONE and step.place is None:
        step = dataclasses.replace(step, place=NO_PLACES)
    step.check(searched=mesh is None and step.global_batch is not None, captured=False)
    if mesh is None and devices is None:
        raise UsageError(*words.missing)
    stages = step.fixed_stages()
    if step.place_meshes and mesh is None:
        raise UsageError("--place-mesh needs --mesh, for places without one", "--mesh dp=1")
    if mesh is not None and not step.place_mesh and devices not in (None, mesh.size * stages):
        of = f" on each of {stages} stages" if stages > 1 else ""
        message, hint = (text.format(mesh=mesh, devices=devices) for text in words.unequal)
        raise UsageError(f"the mesh {mesh} has {mesh.size} devices{of}, {message}", hint)
    of_search: dict[str, Any] = {"pins": pins, "pins_file": pins_file, "level": parse_level(str(level))}
    request = SearchRequest(mesh=mesh, devices=devices, strategy=strategy, step=step, **of_search | settings)
    request.check_buckets()
    request.check_servers()
    return request


def sizes(points: Any) -> tuple[size_histogram.SizePoint, ...]:
    """Histogram of dynamic sizes from the text of --sizes or from rows; empty without any."""
    return size_histogram.histogram(points) if points else ()


def server_request(said: Mapping[str, Any]) -> ServerRequest:
    """Server request with the settings `said`, some of SERVERS."""
    fields = {name: said[name] for name in SERVERS[1:] if said.get(name) is not None}
    if "workers" in fields:
        fields["workers"] = str(fields["workers"])
    return ServerRequest(said.get("parameter_servers"), **fields)


def step_request(said: Mapping[str, Any], pins: tuple[str, ...], file: Path | None = None) -> StepRequest:
    """Step request with the settings `said`, fields of STEP; `file`: further pins."""
    texts = (*(pin_file_texts(file) if file else ()), *pins)
    meshes = said.get("place_mesh") or ()
    if isinstance(meshes, Mapping):
        meshes = [f"{place}:{mesh}" for place, mesh in meshes.items()]
    said = {**said, "place_mesh": (meshes,) if isinstance(meshes, str) else tuple(meshes)}
    return StepRequest(**said, pins=read_stage_pins(texts), places=read_stage_pins(texts, PLACE_PIN))


def verify_request(
    verify: bool, backend: Backend | None, full: bool, arguments: Mapping[str, str | int | float | bool]
) -> VerifyRequest | None:
    """Request to verify; None where nothing asks for it (arguments that say how to verify do ask for it)."""
    return VerifyRequest(backend or "gloo", full, arguments) if verify or backend or full or arguments else None


def read_mesh(mesh: str | Mesh | Mapping[str, int] | None) -> Mesh | None:
    """Mesh from what a user wrote. UsageError for one that is not valid, or whose names mean what other options do."""
    if mesh is None:
        return None
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{name}={size}" for name, size in mesh.items())
    if not isinstance(mesh, str | Mesh):
        raise UsageError(f"mesh={mesh!r}: expected names and sizes of its axes", 'mesh="dp=2,tp=2", or {"dp": 2}')
    return check_axis_names(Mesh.parse(mesh) if isinstance(mesh, str) else mesh)


def read_hardware(hardware: str | Hardware) -> Hardware:
    """A profile by name or file, or its text."""
    if isinstance(hardware, Hardware):
        return hardware
    return parse_hardware(hardware) if "\n" in hardware else load_hardware(hardware)


def pin_texts(pins: Sequence[str] | Mapping[str, Any] | None) -> tuple[str, ...]:
    """`{"fc1": ((4, 1), (1, 2))}` as `fc1=((4, 1), (1, 2))`."""
    if isinstance(pins, Mapping):
        return tuple(f"{what}={how}" for what, how in pins.items())
    return (pins,) if isinstance(pins, str) else tuple(pins or ())


def _fuse_texts(fuse: str | Sequence[str] | Mapping[str, str]) -> tuple[str, ...]:
    """`{"all_reduce": "25MiB"}` as `all_reduce=25MiB`."""
    if isinstance(fuse, Mapping):
        return tuple(f"{collective}={how}" for collective, how in fuse.items())
    return (fuse,) if isinstance(fuse, str) else tuple(fuse)


def _quantity(value: str | float | None, dimension: str) -> float | None:
    return parse_quantity(value, dimension) if isinstance(value, str) else None if value is None else float(value)
