"""The devices and links of a cluster, as `hardware` reads them from a profile. SI: bytes, bytes/s one way per device,
seconds, FLOP/s."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoshard.cluster.links_and_constants import OTHERWISE, Link, NodeHost
from autoshard.errors import UsageError

SCHEMA_VERSION = 1
PRECISION_DTYPES = {
    "fp32": ("float32",), "bf16-mixed": ("bfloat16", "float32"), "fp16-mixed": ("float16", "float32"),
    "fp8-mixed": ("float8", "bfloat16", "float32"),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """Origin of a number: `kind` is measured, datasheet, derived or default."""

    key: str
    value: str
    kind: str
    source: str


@dataclass(frozen=True)
class DeviceKind:
    """A number of devices of one kind, with consecutive ranks. `joined`: with links to all others, where its profile
    ends before."""

    devices: int
    hardware: Hardware
    joined: Hardware | None = None


@dataclass(frozen=True)
class Hardware:
    """`links` are innermost (fastest) first; `constants` are those of the formulas, by dotted key.

    `calibrated`: the constants were fitted to measurements of this device; `error` says how well. `cores` are units
    that compute on their own (streaming multiprocessors, AI cores); it and `l2_bytes` are 0 where unknown.
    `fitted_dtypes`: of the products and attention that the constants were fitted to. `host`: of a node, where the
    profile says what it has; else nothing can be placed there. `kinds`: of a cluster with several kinds of devices, in
    the order of ranks; the other figures are then those of what spans kinds (`device_kinds`).
    """

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
    calibrated: bool = True
    l2_bytes: float = 0.0
    cores: float = 0.0
    fitted_dtypes: tuple[str, ...] = ()
    host: NodeHost | None = None
    kinds: tuple[DeviceKind, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.text, self.memory_bandwidth, self.launch_seconds, self.peaks, self.links))

    def of_ranks(self, first: int, count: int) -> Hardware:
        """Hardware of these ranks: one kind if all are of it, else what spans kinds."""
        start = 0
        for kind in self.kinds:
            if start <= first and first + count <= start + kind.devices:
                return kind.joined or kind.hardware
            start += kind.devices
        return self

    def nodes(self, devices: int) -> tuple[int, ...]:
        """Number of the first `devices` ranks on each node, in the order of nodes."""
        counts: list[int] = []
        for kind in self.kinds or (DeviceKind(devices, self),):
            size, used = kind.hardware.devices_per_node, min(kind.devices, devices - sum(counts))
            counts += [min(size, used - before) for before in range(0, used, size)]
        return tuple(counts)

    @property
    def usable_memory_bytes(self) -> float:
        """Memory of a device that a plan may use."""
        return self.memory_bytes * self.usable_memory

    @property
    def host_memory_bytes(self) -> float:
        """Bytes of the host's memory that a plan may use for one device of its node."""
        return self.host.memory_bytes * self.host.usable_memory / self.devices_per_node if self.host else 0.0

    @property
    def max_devices(self) -> int:
        return sum(kind.devices for kind in self.kinds) or self.links[-1].devices

    @cached_property
    def _constants(self) -> dict[str, float]:
        return dict(self.constants)

    def constant(self, key: str) -> float:
        return self._constants[key]

    def share(self, key: str) -> float:
        """Share of the memory bandwidth: the constant, or the one that replaces it where it is 0."""
        return self._constants[key] or self._constants[OTHERWISE[key]]

    @cached_property
    def _peaks(self) -> dict[str, float]:
        return dict(self.peaks)

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of matrix products in `dtype`; UsageError where the device has none."""
        if dtype not in self._peaks:
            have = ", ".join(self._peaks)
            hint = precision_hint(self) if "float" in dtype else f"floats at the operator that multiplies {dtype}"
            raise UsageError(f"{self.name} can't compute in {dtype}: it has {have}", hint)
        return self._peaks[dtype]


def precision_hint(hardware: Hardware) -> str:
    fitting = [name for name, dtypes in PRECISION_DTYPES.items() if set(dtypes) <= set(hardware._peaks)]
    return " or ".join(f"--precision {name}" for name in fitting)
