"""`autoshard calibrate`: measures this machine, fits, and writes a profile with its cost model.

Started by torchrun on several nodes it measures all of them, the network between them too; the first process writes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from autoshard.calibrate.cost_model_file import costmodel_text
from autoshard.calibrate.fitted_models import MEMORY_KINDS
from autoshard.calibrate.machine_fit import KIND, Calibration, Family, calibrate
from autoshard.calibrate.network_fit import NetworkFit, level_between_nodes, network_fit, with_network
from autoshard.calibrate.profile_text import check_target, costs_path, profile_text
from autoshard.cluster.hardware import Hardware, check_one_kind, load_hardware, parse_hardware
from autoshard.code_text import typed
from autoshard.costs.bands import NAMES
from autoshard.errors import InvalidFileError, UsageError, UserError
from autoshard.system.files import parse_json, read_text, write_text
from autoshard.units import format_bandwidth, format_seconds

DEVICES = ("cpu", "cuda", "npu")


@dataclass(frozen=True)
class Request:
    """`hardware`: the profile to start from. `measured`: a file of earlier measurements instead of measuring."""

    hardware: str
    out: Path
    device: str = "cpu"
    dtype: str = "float32"
    processes: int = 1
    measured: Path | None = None


@dataclass(frozen=True)
class CalibrationFiles:
    """The two files, and what was fitted."""

    profile: Path
    costmodel: Path
    measurements: Path
    families: tuple[Family, ...]
    network: NetworkFit | None = None


def under_torchrun() -> bool:
    """True if this is one of several processes that were started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def run(request: Request) -> CalibrationFiles | None:
    """Runs a calibration. UsageError for a request that can't be met, UserError where a measuring process failed. None
    on all processes of torchrun but the first."""
    hardware = check_one_kind(load_hardware(request.hardware), "a calibration")
    hardware.peak_flops(request.dtype)
    costs = costs_path(request.out)
    measurements = request.out.with_name(f"{request.out.stem}-measured.json")
    _check(request, hardware, (request.out, costs))
    if request.measured:
        measured = _checked(_read(request.measured), request.measured)
    else:
        measured = measure_here(request) if under_torchrun() else measure(request)
    if under_torchrun() and os.environ["RANK"] != "0":
        return None
    source = f"autoshard calibrate, {measured['machine']}, {request.dtype}"
    calibration = calibrate(measured, hardware, request.dtype, source)
    profile, constants = _texts(request, hardware, calibration, costs, source)
    fitted = parse_hardware(f"{profile}\n{constants}", str(request.out))  # before a file is there
    network = network_fit(measured, fitted) if measured.get("between") else None
    if network is not None:
        profile = with_network(profile, network, hardware, source)
        parse_hardware(f"{profile}\n{constants}", str(request.out))
    write_text(costs, constants)
    write_text(request.out, profile)
    if request.measured is None:
        write_text(measurements, json.dumps(measured, indent=1) + "\n")
    return CalibrationFiles(request.out, costs, request.measured or measurements, calibration.families, network)


def _check(request: Request, hardware: Hardware, files: tuple[Path, ...]) -> None:
    check_target(request.out, files)
    if under_torchrun():
        _check_nodes(request, hardware)
    if request.processes > hardware.max_devices:
        most = hardware.max_devices
        raise UsageError(
            f"--processes {request.processes}: {hardware.name} has at most {most} devices", f"--processes {most}"
        )


def _check_nodes(request: Request, hardware: Hardware) -> None:
    """Raises UsageError unless torchrun started what the profile describes."""
    if request.processes > 1:
        raise UsageError("--processes and torchrun both start processes", "one of them")
    local, world = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if world > hardware.max_devices:
        message = f"torchrun started {world} processes: {hardware.name} has at most {hardware.max_devices}"
        raise UsageError(message, "fewer nodes, or a copy of the profile with larger links")
    if world > local:
        level_between_nodes(hardware)
        if local != hardware.devices_per_node:
            raise UsageError(
                f"torchrun started {local} processes a node, {hardware.name} has {hardware.devices_per_node}",
                f"--nproc-per-node {hardware.devices_per_node}, or a copy of the profile with nodes of {local}",
            )


def measure_here(request: Request) -> dict[str, Any]:
    """Measurements on every process of torchrun, each on its own device."""
    from autoshard.calibrate.measure_worker import check_device, measured

    check_device(request.device)
    return measured(("kernels", "collectives"), request.device, request.dtype)


def measure(request: Request) -> dict[str, Any]:
    """Measures kernels, then collectives if there are several processes."""
    from autoshard.calibrate.measure_worker import check_device
    from autoshard.verification.case import TIMEOUT_SECONDS
    from autoshard.verification.ranks.rank_processes import RankFailed, run_processes

    check_device(request.device)
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for what in ("kernels", *["collectives"] * (request.processes > 1)):
            path = str(Path(folder) / f"{what}.json")
            arguments = [what, request.device, request.dtype, path]
            try:
                run_processes("autoshard.calibrate.measure_worker", arguments, request.processes, TIMEOUT_SECONDS)
            except RankFailed as error:
                raise UserError(f"measuring on {request.device} failed: {error}", "--device cpu, or --debug") from error
            tables |= _read(Path(path))
    return tables


_AGAIN = "measure again, without --measured"
COLUMNS = {
    "matmul": {"m", "n", "k", "item_bytes", "seconds", "dgrad_seconds", "wgrad_seconds"},
    "attention": {"batch", "length", "heads", "kv_heads", "head_dim", "item_bytes", "seconds", "backward_seconds"},
    "memory": {"kind", "bytes", "seconds"},
}

ACROSS = {"kind", "nodes", "bytes", "seconds"}
COLLECTIVES = {"collective": {"kind", "members", "bytes", "seconds"}, "between": ACROSS, "whole": ACROSS}
KINDS = (*MEMORY_KINDS, *KIND)


def _read(path: Path) -> dict[str, Any]:
    """Measurements that the worker wrote to `path`."""
    measured = parse_json(read_text(path, "the measurements", _AGAIN), f"the file of measurements {path}", _AGAIN)
    if not isinstance(measured, dict):
        raise InvalidFileError(f"{path} holds no measurements: expected an object", _AGAIN)
    return measured


def _checked(measured: dict[str, Any], path: Path) -> dict[str, Any]:
    """InvalidFileError names the table or column that is missing."""
    for key in (*COLUMNS, "machine", "dispatch_seconds"):
        if not measured.get(key) and measured.get(key) != 0:
            raise InvalidFileError(f"{path}: {key} is missing", _AGAIN)
    if measured["dispatch_seconds"] != 0 and not _is_number(measured["dispatch_seconds"]):
        raise InvalidFileError(f"{path}: dispatch_seconds: expected a number of seconds", _AGAIN)
    if ("between" in measured) != ("whole" in measured):
        raise InvalidFileError(f"{path}: between and whole belong together", _AGAIN)
    for table in (*COLUMNS, *(name for name in COLLECTIVES if name in measured)):
        rows = measured[table]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InvalidFileError(f"{path}: {table}: expected a list of rows", _AGAIN)
        for number, row in enumerate(rows):
            if fault := _row_fault(row, (COLUMNS | COLLECTIVES)[table]):
                raise InvalidFileError(f"{path}: {table}[{number}]: {fault}", _AGAIN)
    return measured


def _row_fault(row: Mapping[str, Any], columns: set[str]) -> str:
    """Fault of a row, "" if there is none."""
    if missing := columns - row.keys():
        return f"{', '.join(sorted(missing))} is missing"
    for column in sorted(columns - {"kind"}):
        if not _is_number(row[column]):
            return f"{column} is {row[column]!r}, expected a number above zero"
    if "kind" in columns and row["kind"] not in KINDS:
        return f"kind is {row['kind']!r}, expected one of {', '.join(KINDS)}"
    return ""


def _is_number(value: Any) -> bool:
    """True for finite numbers above zero."""
    return type(value) in (int, float) and 0 < value < float("inf")


def _texts(request: Request, hardware: Hardware, calibration: Calibration, costs: Path, source: str) -> tuple[str, str]:
    """The profile and its cost model."""
    today = date.today().isoformat()
    message = "; ".join(f"{NAMES[family.name]} {family.error:.1%}" for family in calibration.families)
    error = f"mean absolute error on held-out rows: {message}"
    constants = costmodel_text(
        costs.stem, f"fitted by {source}", error, today, calibration.entries, dtypes=request.dtype
    )
    return profile_text(hardware, request.out, calibration.launch_seconds, source), constants


def summary(written: CalibrationFiles) -> str:
    """Text on what was fitted, and how to use it."""
    from autoshard.text.tables import table

    rows = [("", "rows", "error on held-out rows"), *(
        (NAMES[family.name], str(family.rows), f"{family.error:.1%}") for family in written.families
    )]  # fmt: skip
    network = [_network_words(written.network)] if written.network else []
    return "\n".join([*table(rows), *network, f"written to {written.profile} and {written.costmodel}",
                      f"next: autoshard plan … --hardware {typed(written.profile)}"])  # fmt: skip


def _network_words(fit: NetworkFit) -> str:
    speed = f"{format_bandwidth(fit.bandwidth)} a device, {format_seconds(fit.latency_seconds, 3)} a message"
    return (
        f"{fit.link} between nodes: {speed}; {fit.rows} rows, error {fit.error:.1%} on held-out ones, "
        f"{fit.whole_error:.1%} on collectives over all devices"
    )


def as_dict(written: CalibrationFiles) -> Mapping[str, Any]:
    """The written files for `--json`."""
    return {
        "profile": str(written.profile),
        "costmodel": str(written.costmodel),
        "measurements": str(written.measurements),
        "held_out_error": {family.name: family.error for family in written.families},
        "rows": {family.name: family.rows for family in written.families},
        "network": asdict(written.network) if written.network else None,
    }
