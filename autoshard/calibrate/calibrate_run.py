"""`autoshard calibrate`: measures this machine, fits, and writes a profile with its cost model."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from autoshard.calibrate.cost_model_file import costmodel_text
from autoshard.calibrate.fitted_models import MEMORY_KINDS
from autoshard.calibrate.machine_fit import KIND, Calibration, Family, calibrate
from autoshard.cluster.hardware import Hardware, load_hardware, parse_hardware
from autoshard.costs.bands import NAMES
from autoshard.errors import InvalidFileError, UsageError, UserError
from autoshard.system.files import parse_json, read_text, write_text

LIMIT_SECONDS = 1200.0
DEVICES = ("cpu", "cuda", "npu")
_COSTS = re.compile(r"^(# Constants of the cost formulas|\[constants)", re.MULTILINE)


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


def run(request: Request) -> CalibrationFiles:
    """Raises UsageError for a request that can't be met, UserError where a measuring process failed."""
    hardware = load_hardware(request.hardware)
    hardware.peak_flops(request.dtype)
    costs = request.out.with_name(f"{request.out.stem}-costs.toml")
    kept = request.out.with_name(f"{request.out.stem}-measured.json")
    _check(request, hardware, (request.out, costs))
    measured = _checked(_read(request.measured), request.measured) if request.measured else measure(request)
    source = f"autoshard calibrate, {measured['machine']}, {request.dtype}"
    made = calibrate(measured, hardware, request.dtype, source)
    profile, constants = _texts(request, hardware, made, costs, source)
    parse_hardware(f"{profile}\n{constants}", str(request.out))  # before a file is there
    write_text(costs, constants)
    write_text(request.out, profile)
    if request.measured is None:
        write_text(kept, json.dumps(measured, indent=1) + "\n")
    return CalibrationFiles(request.out, costs, request.measured or kept, made.families)


def _check(request: Request, hardware: Hardware, files: tuple[Path, ...]) -> None:
    if request.out.suffix != ".toml":
        raise UsageError(f"--out {request.out}: expected a name that ends in .toml", f"--out {request.out}.toml")
    there = [str(path) for path in files if path.exists()]
    if there:
        raise UsageError(f"{there[0]} exists already", "--out with another name")
    if not request.out.absolute().parent.is_dir():
        raise UsageError(
            f"--out {request.out}: there is no folder {request.out.parent}", f"mkdir -p {request.out.parent}"
        )
    if request.processes > hardware.max_devices:
        most = hardware.max_devices
        raise UsageError(
            f"--processes {request.processes}: {hardware.name} has at most {most} devices", f"--processes {most}"
        )


def measure(request: Request) -> dict[str, Any]:
    """Kernels, then collectives where there are several processes."""
    from autoshard.calibrate.measure_worker import check_device
    from autoshard.verify.ranks.rank_processes import RankFailed, run_processes

    check_device(request.device)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for what in ("kernels", *["collectives"] * (request.processes > 1)):
            path = str(Path(folder) / f"{what}.json")
            arguments = [what, request.device, request.dtype, path]
            try:
                run_processes("autoshard.calibrate.measure_worker", arguments, request.processes, LIMIT_SECONDS)
            except RankFailed as error:
                raise UserError(f"measuring on {request.device} failed: {error}", "--device cpu, or --debug") from error
            found |= _read(Path(path))
    return found


_AGAIN = "measure again, without --measured"
COLUMNS = {
    "matmul": {"m", "n", "k", "item_bytes", "seconds", "dgrad_seconds", "wgrad_seconds"},
    "attention": {"batch", "length", "heads", "kv_heads", "head_dim", "item_bytes", "seconds", "backward_seconds"},
    "memory": {"kind", "bytes", "seconds"},
}

COLLECTIVE = {"kind", "members", "bytes", "seconds"}
KINDS = (*MEMORY_KINDS, *KIND)


def _read(path: Path) -> dict[str, Any]:
    """What the worker wrote."""
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
    for table in (*COLUMNS, *["collective"] * ("collective" in measured)):
        rows = measured[table]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InvalidFileError(f"{path}: {table}: expected a list of rows", _AGAIN)
        for number, row in enumerate(rows):
            if fault := _row_fault(row, COLUMNS.get(table, COLLECTIVE)):
                raise InvalidFileError(f"{path}: {table}[{number}]: {fault}", _AGAIN)
    return measured


def _row_fault(row: Mapping[str, Any], columns: set[str]) -> str:
    """What is wrong with a row, "" if nothing."""
    if missing := columns - row.keys():
        return f"{', '.join(sorted(missing))} is missing"
    for column in sorted(columns - {"kind"}):
        if not _is_number(row[column]):
            return f"{column} is {row[column]!r}, expected a number above zero"
    if "kind" in columns and row["kind"] not in KINDS:
        return f"kind is {row['kind']!r}, expected one of {', '.join(KINDS)}"
    return ""


def _is_number(value: Any) -> bool:
    """Finite and above zero."""
    return type(value) in (int, float) and 0 < value < float("inf")


def _texts(request: Request, hardware: Hardware, made: Calibration, costs: Path, source: str) -> tuple[str, str]:
    """The profile and its cost model."""
    today = date.today().isoformat()
    told = "; ".join(f"{NAMES[family.name]} {family.error:.1%}" for family in made.families)
    error = f"mean absolute error on held-out rows: {told}"
    constants = costmodel_text(costs.stem, f"fitted by {source}", error, today, made.entries, dtypes=request.dtype)
    own = _COSTS.split(hardware.text)[0].rstrip() + "\n"
    launch = f"{made.launch_seconds * 1e6:.4g} us"
    figure = f'{{ value = "{launch}", kind = "measured", source = "{source}" }}'
    for key, value in (
        ("name", f'"{request.out.stem}"'),
        ("costmodel", f'"{costs.name}"'),
        ("launch_overhead", figure),
    ):
        own = re.sub(rf"^{key} = .*$", lambda _, key=key, value=value: f"{key} = {value}", own, count=1, flags=re.M)
    return own, constants


def summary(written: CalibrationFiles) -> str:
    """What was fitted, and how to use it."""
    from autoshard.text.tables import table

    rows = [("", "rows", "error on held-out rows"), *(
        (NAMES[family.name], str(family.rows), f"{family.error:.1%}") for family in written.families
    )]  # fmt: skip
    return "\n".join([*table(rows), f"written to {written.profile} and {written.costmodel}",
                      f"next: autoshard plan … --hardware {written.profile}"])  # fmt: skip


def as_dict(written: CalibrationFiles) -> Mapping[str, Any]:
    """The same for `--json`."""
    return {
        "profile": str(written.profile),
        "costmodel": str(written.costmodel),
        "measurements": str(written.measurements),
        "held_out_error": {family.name: family.error for family in written.families},
        "rows": {family.name: family.rows for family in written.families},
    }
