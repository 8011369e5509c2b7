"""Published measurements of kernels, from a folder (nothing of it is in this repository), and the models of them.

Left out, by rules fixed beforehand: collectives that took over 1.25 times as long as the next larger message of the
same kind and group; attention with a window or from other kernels than flash-attention; nothing of the products.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from autoshard.calibrate import Attention, Collectives, Products, Rows, cross_validate
from autoshard.calibrate.fitted_models import GROUPS, Model
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.cluster.topology import ring_share

PROFILES = {
    "a100": "a100-80g-sxm",
    "h100": "h100-80g-sxm",
    "h200": "h200-141g-sxm",
    "b200": "b200-180g-sxm",
    "v100": "v100-32g-sxm2",
}
KINDS = {"all_gather": "ring", "reduce_scatter": "ring", "all_reduce": "all_reduce", "alltoall": "exchange"}
OUTLIER = 1.25  # times the seconds of the next larger message
BF16_BYTES = 2


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table, without the line of comment that says what they are."""
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(line for line in lines if not (line.startswith("# ") and ": " in line)))


def columns(table: list[dict[str, float]]) -> Rows:
    return {key: np.array([row[key] for row in table], dtype=float) for key in table[0]}


def products(data: Path, device: str) -> Rows:
    """m, n, k, item_bytes, seconds of the bf16 products of a device."""
    found = (row for row in read(data / "gemm_bf16.csv") if row["device"] == device)
    return columns(
        [
            {"m": float(r["m"]), "n": float(r["n"]), "k": float(r["k"]), "item_bytes": BF16_BYTES,
             "seconds": float(r["latency_ms"]) * 1e-3}
            for r in found
        ]
    )  # fmt: skip


def attention(data: Path, device: str) -> Rows:
    """batch, length, heads, kv_heads, head_dim, item_bytes, seconds of the causal flash-attentions of a device."""
    found = (
        row
        for row in read(data / "attention_prefill_bf16.csv")
        if row["device"] == device
        and row["kernel_source"] in ("flash_attention", "fa3")
        and float(row["window_size"] or 0) == 0
    )
    names = {"batch_size": "batch", "isl": "length", "num_heads": "heads", "num_key_value_heads": "kv_heads",
             "head_dim": "head_dim"}  # fmt: skip
    return columns(
        [
            {own: float(row[name]) for name, own in names.items()}
            | {"item_bytes": BF16_BYTES, "seconds": float(row["latency_ms"]) * 1e-3}
            for row in found
        ]
    )


def kernels(data: Path, op: str, *systems: str) -> Iterator[tuple[dict[str, str], float, dict[str, str]]]:
    """Shape, FLOP/s and row of each kernel of SimuMax's tables whose operator begins with `op`."""
    for row in read(data / "kernel_efficiency.csv"):
        if row["system"] in systems and row["op"].startswith(op):
            shape = dict(part.split("=") for part in row["shape"].split(", "))
            yield shape, float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12, row


def sizes_of(shape: dict[str, str]) -> Rows:
    """Of a product in bfloat16."""
    return {key: np.array([float(shape[key])]) for key in "mnk"} | {"item_bytes": np.array([2.0])}


def collectives(path: Path, device: str, hardware: Hardware, least_bytes: float = 0) -> tuple[Rows, list[str]]:
    """kind, members, bytes, bandwidth, reduced, seconds; and the name of each row's collective."""
    found = [row for row in read(path) if row["dev"] == device and float(row["size"]) >= least_bytes]
    kept = list(_without_outliers(found))
    return columns([_collective(row, hardware) for row in kept]), [row["op"] for row in kept]


def _without_outliers(rows: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    for row in rows:
        larger = [
            (float(other["size"]), float(other["t"]))
            for other in rows
            if (other["op"], other["n"]) == (row["op"], row["n"]) and float(other["size"]) > float(row["size"])
        ]
        if not larger or float(row["t"]) <= OUTLIER * min(larger)[1]:
            yield row


def _collective(row: dict[str, str], hardware: Hardware) -> dict[str, float]:
    """The group holds the first n devices of a node, as the tables' authors ran it."""
    link, members = hardware.links[0], int(row["n"])
    share = ring_share(link.graph, (tuple(range(members)),))
    kind = KINDS[row["op"]]
    return {
        "kind": GROUPS.index(kind),
        "members": members,
        "bytes": float(row["size"]),
        "bandwidth": link.bandwidth * link.efficiency * share,
        "reduced": float(kind == "all_reduce" and members >= link.reduces_from),
        "seconds": float(row["t"]),
    }


# --- what a draw holds out --------------------------------------------------------------------------------------------

SHAPES_OUT, ROWS_OUT, SIZES_OUT = 0.5, 0.5, 0.15


def weight_shapes(rows: Rows, generator: np.random.Generator) -> np.ndarray:
    """Half of the weight shapes (n, k), with every m measured for them."""
    shapes = np.stack([rows["n"], rows["k"]], axis=1)
    _, which = np.unique(shapes, axis=0, return_inverse=True)
    chosen = generator.random(which.max() + 1) < SHAPES_OUT
    held: np.ndarray = chosen[which.ravel()]
    return held


def any_rows(rows: Rows, generator: np.random.Generator) -> np.ndarray:
    held: np.ndarray = generator.random(len(rows["seconds"])) < ROWS_OUT
    return held


def inner_sizes(rows: Rows, generator: np.random.Generator) -> np.ndarray:
    """15 % of the (collective, group, size) that lie between the smallest and the largest size."""
    size = rows["bytes"]
    held: np.ndarray = (generator.random(len(size)) < SIZES_OUT) & (size > size.min()) & (size < size.max())
    return held


# --- models of them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measured:
    """Rows of one device, the model that is fitted to them, and what a draw holds out; of collectives their `names`."""

    hardware: Hardware
    rows: Rows
    model: Model
    held_out: Callable[[Rows, np.random.Generator], np.ndarray]
    names: tuple[str, ...] = ()

    def cross_validated(self) -> tuple[np.ndarray, np.ndarray]:
        """Over ten draws: places of the rows held out, and their errors."""
        return cross_validate(self.model, self.rows, partial(self.held_out, self.rows))


def measured(kind: str, data: Path, device: str) -> Measured:
    """`kind`: matmul, attention or collective, as in a cost model."""
    hardware = load_hardware(PROFILES[device])
    if kind == "matmul":
        model: Model = Products(hardware.peak_flops("bfloat16"), hardware.memory_bandwidth)
        return Measured(hardware, products(data, device), model, weight_shapes)
    if kind == "attention":
        model = Attention(hardware.peak_flops("bfloat16"), hardware.memory_bandwidth)
        return Measured(hardware, attention(data, device), model, any_rows)
    latency, only_sums = hardware.links[0].latency_seconds, device == "v100"
    file = "nccl_allreduce_v100_a100.csv" if only_sums else "nccl_collectives.csv"
    rows, names = collectives(data / file, device, hardware)
    whole = Collectives(latency, in_network=bool(rows["reduced"].any()))
    model = Collectives(latency, ("all_reduce",), ramps=False) if only_sums else whole
    return Measured(hardware, rows, model, inner_sizes, tuple(names))


def work(kind: str, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs and bytes of products, or of causal attention."""
    if kind == "matmul":
        size, n, k = rows["m"], rows["n"], rows["k"]
        return 2 * size * n * k, rows["item_bytes"] * (size * k + k * n + size * n)
    batch, length, heads, head = rows["batch"], rows["length"], rows["heads"], rows["head_dim"]
    traffic = rows["item_bytes"] * batch * length * head * 2 * (heads + rows["kv_heads"])
    return 2 * batch * heads * length**2 * head, traffic
