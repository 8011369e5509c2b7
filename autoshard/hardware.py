"""A cluster as devices and links, read from a TOML profile, with the constants of the cost formulas for its devices.

`Hardware.text` is the whole profile as text (the file, then the constants it names), so that a plan can embed it and
`parse_hardware` gives the same `Hardware` back. All figures are SI: bytes, bytes/s one way per device, seconds, FLOP/s.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from autoshard import units
from autoshard.errors import InvalidFileError, UsageError
from autoshard.mesh import Mesh
from autoshard.profile_file import Table
from autoshard.resources import data_folder

SCHEMA_VERSION = 1
PRECISION_DTYPES = {"fp32": ("float32",), "bf16-mixed": ("bfloat16", "float32")}
_COST_KEYS = {
    "matmul": ("launch", "compute", "memory", "exponent"),
    "attention": ("launch", "compute", "memory", "exponent"),
    "memory": ("default", "elementwise", "activation", "normalisation"),
    "collective": ("launch", "group_exponent"),
}


@dataclass(frozen=True)
class Link:
    """Joins `devices` consecutive ranks (or, above the first level, the groups of the level below).

    `bandwidth` is one device's share, bytes/s one way, before `efficiency`. In a `mesh` topology a group of n
    uses n-1 links of each device; in a `switch` it has the whole bandwidth.
    """

    name: str
    devices: int
    topology: str
    bandwidth: float
    latency_seconds: float
    efficiency: float


@dataclass(frozen=True)
class Figure:
    """Where a number comes from: `kind` is measured, datasheet, derived or default."""

    key: str
    value: str
    kind: str
    source: str


@dataclass(frozen=True)
class Hardware:
    """`links` are innermost (fastest) first; `constants` are those of the formulas, by dotted key."""

    name: str
    summary: str
    text: str
    devices_per_node: int
    memory_bytes: float
    usable_memory: float
    memory_bandwidth: float
    launch_seconds: float
    peaks: tuple[tuple[str, float], ...]
    links: tuple[Link, ...]
    constants: tuple[tuple[str, float], ...]
    error: str
    figures: tuple[Figure, ...]

    def __hash__(self) -> int:
        return hash((self.name, self.text, self.memory_bandwidth, self.launch_seconds, self.peaks, self.links))

    @property
    def usable_memory_bytes(self) -> float:
        """Memory of a device that a plan may use."""
        return self.memory_bytes * self.usable_memory

    @property
    def max_devices(self) -> int:
        return self.links[-1].devices

    @cached_property
    def _constants(self) -> dict[str, float]:
        return dict(self.constants)

    def constant(self, key: str) -> float:
        return self._constants[key]

    @cached_property
    def _peaks(self) -> dict[str, float]:
        return dict(self.peaks)

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of matrix products in `dtype`; UsageError where the device has none."""
        if dtype not in self._peaks:
            have = ", ".join(self._peaks)
            raise UsageError(f"{self.name} can't compute in {dtype}: it has {have}", _precision_hint(self))
        return self._peaks[dtype]


def _precision_hint(hardware: Hardware) -> str:
    fitting = [name for name, dtypes in PRECISION_DTYPES.items() if set(dtypes) <= set(hardware._peaks)]
    return " or ".join(f"--precision {name}" for name in fitting)


def check_precision(hardware: Hardware, precision: str) -> None:
    """UsageError where the devices lack a dtype that `precision` computes in, e.g. bf16-mixed on the Ascend 910A."""
    if precision not in PRECISION_DTYPES:
        raise UsageError(f"unknown precision {precision!r}: expected {', '.join(PRECISION_DTYPES)}")
    missing = [dtype for dtype in PRECISION_DTYPES[precision] if dtype not in hardware._peaks]
    if missing:
        message = f"--precision {precision}: {hardware.name} has no {' and no '.join(missing)}"
        raise UsageError(message, _precision_hint(hardware))


def check_mesh(hardware: Hardware, mesh: Mesh) -> None:
    """UsageError where the mesh is larger than the profile's cluster."""
    if mesh.size > hardware.max_devices:
        raise UsageError(
            f"mesh {mesh} has {mesh.size} devices: {hardware.name} describes at most {hardware.max_devices}"
        )


def list_profiles() -> tuple[str, ...]:
    """The names of the profiles that ship with autoshard."""
    return tuple(sorted(path.stem for path in data_folder("hardware_profiles").glob("*.toml")))


def load_hardware(name_or_path: str) -> Hardware:
    """A shipped profile by name, or a profile file by path (ends in `.toml`)."""
    path = Path(name_or_path)
    if not name_or_path.endswith(".toml"):
        if name_or_path not in list_profiles():
            raise _unknown(name_or_path)
        path = data_folder("hardware_profiles") / f"{name_or_path}.toml"
    return parse_hardware(_read(path), str(path))


def _unknown(name: str) -> UsageError:
    known = list_profiles()
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    near += [profile for profile in known if name.lower() in profile and profile not in near]
    hint = " or ".join(f"--hardware {profile}" for profile in near) or "--hardware path/to/profile.toml"
    return UsageError(f"unknown hardware profile {name!r}: there are {', '.join(known)}", hint)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"can't read the hardware profile {path}: {error}") from error


def hardware_text(hardware: Hardware) -> str:
    """The profile with its constants, verbatim TOML: `parse_hardware(hardware_text(hw)) == hw`."""
    return hardware.text


def parse_hardware(text: str, where: str = "hardware profile") -> Hardware:
    """Raises InvalidFileError that names the damaged key. `where` is what the message calls the text."""
    root = _parse(text, where)
    root.expect("schema", SCHEMA_VERSION)
    if "constants" not in root.data:
        text = f"{text.rstrip()}\n\n{_read(_costmodel_path(root))}"
        root = _parse(text, where)
    device, constants = root.table("device"), root.table("constants")
    return Hardware(
        root.text("name"),
        root.text("summary"),
        text,
        root.integer("devices_per_node"),
        device.figure("memory", units.parse_bytes),
        device.fraction("usable_memory"),
        device.figure("memory_bandwidth", units.parse_bandwidth),
        device.figure("launch_overhead", units.parse_seconds, zero=True),
        _peaks(device.table("peak")),
        _links(root),
        tuple(_constants(constants)),
        constants.table("about").text("error"),
        tuple(Figure(*row) for row in root.figures()),
    )


def _parse(text: str, where: str) -> Table:
    try:
        return Table(tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as error:
        raise InvalidFileError(f"{where} is not TOML: {error}") from error


def _costmodel_path(root: Table) -> Path:
    name = root.text("costmodel")
    folder = data_folder("costmodels")
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise root.error("costmodel", f"unknown cost model {name!r}: there are {', '.join(known)}")
    return folder / f"{name}.toml"


def _peaks(peak: Table) -> tuple[tuple[str, float], ...]:
    if not peak.data:
        raise peak.error("", "expected at least one dtype with its FLOP/s")
    return tuple((dtype, peak.figure(dtype, units.parse_flop_rate)) for dtype in peak.data)


def _links(root: Table) -> tuple[Link, ...]:
    links = tuple(_link(table) for table in root.tables("links"))
    sizes = [1, *(link.devices for link in links)]
    if not links or any(outer <= inner or outer % inner for inner, outer in pairwise(sizes)):
        raise root.error("links", "`devices` must grow from link to link, each a multiple of the one before")
    return links


def _link(table: Table) -> Link:
    topology = table.text("topology")
    if topology not in ("switch", "mesh"):
        raise table.error("topology", f"expected switch or mesh, got {topology!r}")
    return Link(
        table.text("name"),
        table.integer("devices"),
        topology,
        table.figure("bandwidth", units.parse_bandwidth),
        table.figure("latency", units.parse_seconds, zero=True),
        table.fraction("efficiency"),
    )


def _constants(table: Table) -> list[tuple[str, float]]:
    result = []
    for group, keys in _COST_KEYS.items():
        for key in keys:
            inner = table.table(group)
            value = inner.figure(key, units.parse_seconds, zero=True) if key == "launch" else inner.number(key)
            result.append((f"{group}.{key}", value))
    return result
