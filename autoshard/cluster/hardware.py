"""A cluster as devices and links, read from a TOML profile, with the constants of the cost formulas for its devices.

`Hardware.text` is the whole profile as text (the file, then the constants it names), so that a plan can embed it and
`parse_hardware` gives the same `Hardware` back. All figures are SI: bytes, bytes/s one way per device, seconds, FLOP/s.
A new field of a device's description is one of `Hardware` (`cluster_data.py`), which `_hardware` here reads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from autoshard import units
from autoshard.cluster.cluster_data import (
    PRECISION_DTYPES,
    SCHEMA_VERSION,
    DeviceKind,
    Figure,
    Hardware,
    precision_hint,
)
from autoshard.cluster.device_kinds import read_kinds, spec_kinds
from autoshard.cluster.links_and_constants import (
    Link,
    NodeHost,
    read_constants,
    read_host,
    read_links,
    read_peaks,
)
from autoshard.cluster.profile_reader import PROFILE_HINT, Faults, Silent, Table, figures, line_numbers, line_of
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.system.files import LARGEST_TOML, data_folder, parse_toml, read_text

__all__ = [
    "PRECISION_DTYPES",
    "DeviceKind",
    "Figure",
    "Hardware",
    "Link",
    "NodeHost",
    "check_mesh",
    "check_precision",
    "hardware_text",
    "list_profiles",
    "load_hardware",
    "mixed_precision",
    "parse_hardware",
]  # fmt: skip


SPEC = re.compile(r"[^,]+:\d+(,[^,]+:\d+)+")  # of two kinds at least


def mixed_precision(hardware: Hardware) -> str:
    """Precision that halves activations on these devices: float16 only where there is no bfloat16."""
    known = dict(hardware.peaks)
    return "fp16-mixed" if "float16" in known and "bfloat16" not in known else "bf16-mixed"


def check_precision(hardware: Hardware, precision: str) -> None:
    """UsageError where the devices lack a dtype that `precision` computes in, e.g. bf16-mixed on the Ascend 910A."""
    if precision not in PRECISION_DTYPES:
        raise UsageError(f"unknown precision {precision!r}: expected {', '.join(PRECISION_DTYPES)}", "--precision fp32")
    missing = [dtype for dtype in PRECISION_DTYPES[precision] if dtype not in dict(hardware.peaks)]
    if missing:
        message = f"--precision {precision}: {hardware.name} has no {' and no '.join(missing)}"
        raise UsageError(message, precision_hint(hardware))


def backend_of(hardware: Hardware) -> str:
    """Communication backend of these devices (hccl, gloo or nccl), from the profile's name, summary and links."""
    words = " ".join([hardware.name, hardware.summary, *(link.name for link in hardware.links)]).lower()
    return "hccl" if re.search("ascend|hccs|npu", words) else "gloo" if re.search("cpu|loopback", words) else "nccl"


def check_mesh(hardware: Hardware, mesh: Mesh, whole: bool = False) -> None:
    """UsageError where the mesh is larger than what the profile's links join, or than all its devices."""
    most = hardware.max_devices if whole else hardware.links[-1].devices
    if mesh.size > most:
        raise UsageError(f"mesh {mesh} has {mesh.size} devices: {hardware.name} describes at most {most}", larger())


def check_devices(hardware: Hardware, devices: int) -> None:
    """UsageError where there are more than the profile's cluster has."""
    if devices > hardware.max_devices:
        raise UsageError(f"--devices {devices}: {hardware.name} describes at most {hardware.max_devices}", larger())


def check_one_kind(hardware: Hardware, what: str) -> Hardware:
    """The hardware; UsageError where `what` needs devices of one kind and these are of several."""
    if hardware.kinds:
        raise UsageError(
            f"{what} is of one kind of devices, {hardware.name} has several", hardware.kinds[0].hardware.name
        )
    return hardware


def larger() -> str:
    """Hint for more devices than a profile has."""
    return "fewer devices, or a copy of the profile with larger links: autoshard profiles NAME > mine.toml"


def list_profiles() -> tuple[str, ...]:
    """The names of the profiles that ship with autoshard."""
    return tuple(sorted(path.stem for path in data_folder("hardware_profiles").glob("*.toml")))


def load_hardware(name_or_path: str) -> Hardware:
    """A shipped profile by name, a profile file by path (ends in `.toml`), or several with numbers of devices:
    `a100-80g-sxm:8,v100-32g-sxm2:8`."""
    if SPEC.fullmatch(name_or_path):
        return spec_kinds(name_or_path, _one_kind)
    path = Path(name_or_path)
    if not name_or_path.endswith(".toml"):
        if name_or_path not in list_profiles():
            raise _unknown(name_or_path)
        path = data_folder("hardware_profiles") / f"{name_or_path}.toml"
    return parse_hardware(_read(path), str(path))


def _unknown(name: str) -> UsageError:
    known = list_profiles()
    if re.search(r":\d*(,|$)", name):
        raise UsageError(
            f"--hardware {name}: expected NAME, or NAME:DEVICES,NAME:DEVICES", "a100-80g-sxm:8,v100-32g-sxm2:8"
        )
    near = [profile for profile in known if name and name.lower() in profile]
    near += [profile for profile in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4) if not near]
    hint = " or ".join(near) or "one of these, or a path that ends in .toml"
    return UsageError(f"unknown hardware profile {name!r}: there are {', '.join(known)}", hint)


def _read(path: Path) -> str:
    hint = "`autoshard profiles` for those that ship, `autoshard profiles NAME > mine.toml` for a copy"
    return read_text(path, "the hardware profile", hint, LARGEST_TOML)


def hardware_text(hardware: Hardware) -> str:
    """The profile with its constants, verbatim TOML: `parse_hardware(hardware_text(hw)) == hw`."""
    return hardware.text


def parse_hardware(text: str, where: str = "hardware profile") -> Hardware:
    """Raises InvalidFileError that names every fault with its line. `where` is what the messages call the text."""
    root = _parse(text, where, _places(text, where))
    if "kinds" in root.data:
        return read_kinds(root, Path(where).parent, _one_kind, _parse_one)
    return _parsed(root, text, where)


def _one_kind(name_or_path: str) -> Hardware:
    """A profile within one of several kinds; it is of one kind itself."""
    if not name_or_path.endswith(".toml"):
        return load_hardware(name_or_path)
    return _parse_one(_read(Path(name_or_path)), name_or_path)


def _parse_one(text: str, where: str = "a profile of [[kinds]]") -> Hardware:
    root = _parse(text, where, _places(text, where))
    if "kinds" in root.data:
        root.fault("kinds", "a kind of devices can't be several")
    return _parsed(root, text, where)


def _parsed(root: Table, text: str, where: str) -> Hardware:
    root.expect("schema", SCHEMA_VERSION)
    root.faults.raise_all()
    if "constants" not in root.data and (path := _costmodel_path(root, where)) is not None:
        profile = text.rstrip()
        text = f"{profile}\n\n{_read(path)}"
        root = _parse(text, where, _places(text, where, profile.count("\n") + 2, str(path)))
    hardware = _hardware(root, text)
    root.faults.raise_all()
    return hardware


def _places(text: str, where: str, own_lines: int = 0, then: str = "") -> Callable[[str], str]:
    """File and line of a key; the lines after the first `own_lines` are of the file `then`."""

    def place(key: str) -> str:
        line = line_of(lines(), key)
        return f"{then}:{line - own_lines}" if then and line > own_lines else f"{where}:{line}"

    @cache
    def lines() -> dict[str, int]:  # only where there is a fault to tell
        return line_numbers(text)

    return place


def _hardware(root: Table, text: str) -> Hardware:
    device = root.table("device")
    constants = root.table("constants") if root.has("constants") else Table({}, Silent(root.faults.place), "constants")
    about = constants.table("about")
    hardware = Hardware(
        name=root.text("name"),
        summary=root.text("summary"),
        text=text,
        devices_per_node=root.integer("devices_per_node"),
        memory_bytes=device.figure("memory", units.parse_bytes),
        usable_memory=device.fraction("usable_memory"),
        memory_bandwidth=device.figure("memory_bandwidth", units.parse_bandwidth),
        launch_seconds=device.figure("launch_overhead", units.parse_seconds, zero=True),
        peaks=read_peaks(device.table("peak")),
        links=read_links(root),
        constants=read_constants(constants),
        error=about.text("error"),
        figures=tuple(Figure(*row) for row in figures(root.data)),
        calibrated=about.text("calibration", ("fitted", "none")) == "fitted" if about.has("calibration") else True,
        l2_bytes=device.figure("l2", units.parse_bytes) if device.has("l2") else 0.0,
        cores=device.number("cores") if device.has("cores") else 0.0,
        fitted_dtypes=tuple(about.text("dtypes").replace(",", " ").split()) if about.has("dtypes") else (),
        host=read_host(root.table("host")) if root.has("host") else None,
    )
    root.expect("schema", SCHEMA_VERSION)
    about.text("name")
    about.text("date")
    root.text("costmodel")
    _check_node(root, hardware)
    for table in (device, about, root):
        table.finish()
    return hardware


def _check_node(root: Table, hardware: Hardware) -> None:
    """Notes a fault unless groups of the innermost links fill nodes, or nodes fill such a group."""
    node, inner = hardware.devices_per_node, hardware.links[0].devices if hardware.links else 0
    if inner and node > hardware.max_devices:
        root.fault("devices_per_node", f"a node of {node}: the links join {hardware.max_devices}")
    elif inner > 0 and node > 0 and inner % node and node % inner:
        root.fault("devices_per_node", f"nodes of {node} and groups of {inner} devices (links[0]) do not fit together")


def _parse(text: str, where: str, place: Callable[[str], str]) -> Table:
    return Table(parse_toml(text, where, PROFILE_HINT), Faults(place))


def _costmodel_path(root: Table, where: str) -> Path | None:
    """The file of the constants: shipped, or a path from the profile's own folder where the name ends in `.toml` (as
    `autoshard calibrate` writes). None after a fault."""
    name = root.text("costmodel")
    if name.endswith(".toml"):
        return Path(where).parent / name
    folder = data_folder("costmodels")
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name in known:
        return folder / f"{name}.toml"
    if root.has("costmodel"):
        near = difflib.get_close_matches(name, known, n=1)
        did = f"; did you mean {near[0]!r}?" if near else ""
        root.fault("costmodel", f"unknown cost model {name!r}: there are {', '.join(known)}{did}")
    return None
