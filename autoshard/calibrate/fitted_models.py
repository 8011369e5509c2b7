"""Models that are fitted: the formulas of `autoshard.costs.formulas` over many measurements, their constants free.

Each constant is positive and is fitted as its logarithm, drawn towards `centre` with a spread of `width` (of the
logarithm): few measurements then give a sensible value, many overrule it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from autoshard.costs.formulas import pass_seconds, product_overhead, roofline, transfer

Rows = Mapping[str, np.ndarray]  # one array a column, all of one length; `seconds` is what was measured
RING, ALL_REDUCE, EXCHANGE = "ring", "all_reduce", "exchange"
GROUPS = (RING, ALL_REDUCE, EXCHANGE)
SHARED = 0.3  # width of constants that differ little between devices
FREE = 1.0  # and of those that differ much


class Free(NamedTuple):
    """A constant to fit, by its key in a cost model without the leading group."""

    key: str
    centre: float
    width: float
    least: float = 0.0


class Model(Protocol):
    """`group`: the table of the cost model; `free`: its constants."""

    @property
    def group(self) -> str: ...

    @property
    def free(self) -> tuple[Free, ...]: ...

    def seconds(self, constants: Mapping[str, float], rows: Rows) -> np.ndarray: ...


@dataclass(frozen=True)
class Products:
    """Matrix products. Rows: m, n, k, item_bytes. `peak` in FLOP/s and `bandwidth` in bytes/s of the device."""

    peak: float
    bandwidth: float
    fill: float = 128.0
    group: str = "matmul"

    @property
    def free(self) -> tuple[Free, ...]:
        return (
            Free("launch", 3e-6, FREE),
            Free("compute", 0.8, SHARED),
            Free("memory", 0.8, SHARED),
            Free("exponent", 2.2, SHARED, 1.0),
            Free("depth", 3e-6, FREE),
            Free("split", 2000.0, FREE),
        )

    def seconds(self, constants: Mapping[str, float], rows: Rows) -> np.ndarray:
        m, n, k = rows["m"], rows["n"], rows["k"]
        traffic = rows["item_bytes"] * (m * k + k * n + m * n)
        rate, bandwidth = self.peak * constants["compute"], self.bandwidth * constants["memory"]
        kernel = roofline(2 * m * n * (k + self.fill), traffic, rate, bandwidth, constants["exponent"])
        seconds: np.ndarray = constants["launch"] + product_overhead(k, constants["depth"], constants["split"]) + kernel
        return seconds


@dataclass(frozen=True)
class Attention:
    """Fused causal attention, forward. Rows: batch, length, heads, kv_heads, head_dim, item_bytes."""

    peak: float
    bandwidth: float
    group: str = "attention"

    @property
    def free(self) -> tuple[Free, ...]:
        return (
            Free("launch", 10e-6, FREE),
            Free("compute", 0.65, SHARED),
            Free("memory", 0.55, SHARED),
            Free("exponent", 1.3, SHARED, 1.0),
            Free("head", 10.0, SHARED),
            Free("chain", 5e-9, FREE),
        )

    def seconds(self, constants: Mapping[str, float], rows: Rows) -> np.ndarray:
        batch, length, heads, head = rows["batch"], rows["length"], rows["heads"], rows["head_dim"]
        flops = 2 * batch * heads * length**2 * head * (1 + constants["head"] / head)
        traffic = rows["item_bytes"] * batch * length * head * 2 * (heads + rows["kv_heads"])
        rate, bandwidth = self.peak * constants["compute"], self.bandwidth * constants["memory"]
        kernel = roofline(flops, traffic, rate, bandwidth, constants["exponent"])
        seconds: np.ndarray = constants["launch"] + constants["chain"] * length * head / 128 + kernel
        return seconds


MEMORY_KINDS = ("default", "elementwise", "activation", "normalisation", "softmax", "gather")


@dataclass(frozen=True)
class MemoryModel:
    """Operators without matrix products. Rows: kind (index in MEMORY_KINDS), bytes (read and written). `launch` is the
    profile's launch overhead, the other constants are shares of `bandwidth`."""

    bandwidth: float
    group: str = "memory"

    @property
    def free(self) -> tuple[Free, ...]:
        # The gain is 1 + excess, so that it stays above 1.
        cache = (Free("cache_excess", 1.0, FREE), Free("cache_size", 4e6, FREE))
        return (Free("launch", 2e-6, FREE), *(Free(kind, 0.6, FREE) for kind in MEMORY_KINDS), *cache)

    def seconds(self, constants: Mapping[str, float], rows: Rows) -> np.ndarray:
        shares = np.array([constants[kind] for kind in MEMORY_KINDS])[rows["kind"].astype(int)]
        gain = 1 + constants["cache_excess"]
        moved = pass_seconds(rows["bytes"], self.bandwidth * shares, gain, constants["cache_size"])
        seconds: np.ndarray = constants["launch"] + moved
        return seconds


@dataclass(frozen=True)
class Collectives:
    """Collectives within one level of links. Rows: kind (index in GROUPS), members, bytes (of the whole message),
    bandwidth (bytes/s that the graph gives a device, link efficiency included), reduced (1 where the switch reduces),
    scattered (1 for a reduce-scatter; where `scatters`, its rate relative to an all-gather's is free). `latency`:
    seconds of a step. `kinds`: the groups that the rows have."""

    latency: float
    kinds: tuple[str, ...] = GROUPS
    ramps: bool = True  # False where the graph of the links already tells small groups from large
    in_network: bool = False
    scatters: bool = False
    group: str = "collective"

    @property
    def free(self) -> tuple[Free, ...]:
        params = [Free("launch", 6e-6, FREE)]
        for kind in self.kinds:
            protocol = _PROTOCOLS[kind]
            params += [Free(f"{kind}.{free.key}", free.centre, free.width) for free in protocol if self._has(free.key)]
        if self.in_network:
            params.append(Free("all_reduce.in_network", 1.3, 0.15))
        if self.scatters:
            params.append(Free("ring.scatter", 1.0, SHARED))
        return tuple(params)

    def _has(self, key: str) -> bool:
        return self.ramps or key != "ramp"

    def seconds(self, constants: Mapping[str, float], rows: Rows) -> np.ndarray:
        result = np.zeros_like(rows["bytes"])
        for index, kind in enumerate(GROUPS):
            chosen = rows["kind"] == index
            if chosen.any():
                part = {key: column[chosen] for key, column in rows.items()}
                result[chosen] = self._of_kind(constants, part, kind)
        return result

    def _of_kind(self, constants: Mapping[str, float], rows: Rows, kind: str) -> np.ndarray:
        terms = {key: constants.get(f"{kind}.{key}", 0.0) for key in ("step", "setup", "setup_step", "switch", "ramp")}
        passes, members = 2.0 if kind == ALL_REDUCE else 1.0, rows["members"]
        latency = self.latency * passes * (members - 1)
        bandwidth = rows["bandwidth"] * constants[f"{kind}.efficiency"] * (1 - 1 / members) ** terms["ramp"]
        bandwidth = bandwidth * np.where(rows["reduced"] > 0, constants.get("all_reduce.in_network", 1.0), 1.0)
        if self.scatters:
            bandwidth = bandwidth * np.where(rows["scattered"] > 0, constants["ring.scatter"], 1.0)
        seconds: np.ndarray = transfer(
            rows["bytes"],
            members,
            constants["launch"] + terms["step"] * latency,
            terms["setup"] + terms["setup_step"] * latency,
            terms["switch"],
            passes * (members - 1) / members / bandwidth,
        )
        return seconds


_PROTOCOLS: dict[str, tuple[Free, ...]] = {
    RING: (
        Free("step", 1.0, 0.5),
        Free("setup", 20e-6, 0.5),
        Free("setup_step", 0.5, 0.7),
        Free("switch", 400e3, 0.7),
        Free("efficiency", 0.97, 0.15),
        Free("ramp", 0.5, 0.25),
    ),
    ALL_REDUCE: (
        Free("step", 1.0, 0.5),
        Free("setup", 25e-6, 0.5),
        Free("setup_step", 0.8, 0.7),
        Free("switch", 400e3, 0.7),
        Free("efficiency", 1.05, 0.15),
        Free("ramp", 0.28, 0.25),
    ),
    EXCHANGE: (
        Free("step", 0.4, 0.7),
        Free("setup", 10e-6, 0.7),
        Free("setup_step", 0.3, 0.7),
        Free("switch", 20e3, 1.5),
        Free("efficiency", 0.87, 0.2),
        Free("ramp", 0.3, 0.3),
    ),
}
