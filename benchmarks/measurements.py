"""Published measurements of kernels, from a folder (nothing of it is in this repository), and the models of them.

Left out, by rules fixed beforehand: collectives that took over 1.25 times as long as the next larger message of the
same kind and group; attention with a window or from other kernels than flash-attention; nothing of the products.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
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


def numbers(path: Path, device: str, column: str = "device") -> np.ndarray:
    """The rows of a device in a table of plain cells, as a structured array."""
    table = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    return table[table[column] == device]


def products(data: Path, device: str) -> Rows:
    """m, n, k, item_bytes, seconds of the bf16 products of a device."""
    return _rows(numbers(data / "gemm_bf16.csv", device), m="m", n="n", k="k")


def attention(data: Path, device: str) -> Rows:
    """batch, length, heads, kv_heads, head_dim, item_bytes, seconds of the causal flash-attentions of a device."""
    table = numbers(data / "attention_prefill_bf16.csv", device)
    flash = np.isin(table["kernel_source"], ("flash_attention", "fa3")) & ~(table["window_size"] > 0)
    return _rows(
        table[flash], batch="batch_size", length="isl", heads="num_heads", kv_heads="num_key_value_heads",
        head_dim="head_dim",
    )  # fmt: skip


def _rows(table: np.ndarray, **names: str) -> Rows:
    columns = {key: table[name].astype(float) for key, name in names.items()}
    return columns | {"item_bytes": np.full(len(table), float(BF16_BYTES)), "seconds": table["latency_ms"] * 1e-3}


def kernels(data: Path, op: str, *systems: str) -> Iterator[tuple[dict[str, str], float, dict[str, str]]]:
    """Shape, FLOP/s and row of each kernel of SimuMax's tables whose operator begins with `op`."""
    for row in read(data / "kernel_efficiency.csv"):
        if row["system"] in systems and row["op"].startswith(op):
            shape = dict(part.split("=") for part in row["shape"].split(", "))
            yield shape, float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12, row


def product_ratios(
    data: Path, system: str, model: Model, constants: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
    """Of each bf16 product of a system its layout, and its measured seconds over those of a model."""
    for shape, rate, _ in kernels(data, "matmul", system):
        sizes = {key: np.array([float(shape[key])]) for key in "mnk"}
        flops = 2 * float(np.prod([sizes[key] for key in "mnk"]))
        predicted = model.seconds(constants, sizes | {"item_bytes": np.array([float(BF16_BYTES)])})
        yield shape["layout"], flops / rate / float(predicted[0])


def collectives(path: Path, device: str, hardware: Hardware) -> tuple[Rows, list[str]]:
    """kind, members, bytes, bandwidth, reduced, seconds; and the name of each row's collective. The group holds the
    first n devices of a node, as the tables' authors ran it."""
    table = numbers(path, device, "dev")
    inliers = table[[not _is_outlier(row, table) for row in table]]
    link, members, names = hardware.links[0], inliers["n"], inliers["op"].tolist()
    kinds = np.array([GROUPS.index(KINDS[name]) for name in names])
    shares = np.array([ring_share(link.graph, (tuple(range(count)),)) for count in members.tolist()])
    reduced = (kinds == GROUPS.index("all_reduce")) & (members >= link.reduces_from)
    rows = {
        "kind": kinds, "members": members, "bytes": inliers["size"], "reduced": reduced, "seconds": inliers["t"],
        "bandwidth": link.bandwidth * link.efficiency * shares,
    }  # fmt: skip
    return {key: column.astype(float) for key, column in rows.items()}, names


def _is_outlier(row: np.void, rows: np.ndarray) -> bool:
    larger = rows[(rows["op"] == row["op"]) & (rows["n"] == row["n"]) & (rows["size"] > row["size"])]
    return bool(len(larger) and row["t"] > OUTLIER * larger[larger["size"].argmin()]["t"])


# --- what a draw holds out --------------------------------------------------------------------------------------------

SHAPES_OUT, ROWS_OUT, SIZES_OUT = 0.5, 0.5, 0.15


def weight_shapes(rows: Rows, generator: np.random.Generator) -> np.ndarray:
    """Half of the weight shapes (n, k), with every m measured for them."""
    shapes = np.stack([rows["n"], rows["k"]], axis=1)
    _, which = np.unique(shapes, axis=0, return_inverse=True)
    chosen = generator.random(which.max() + 1) < SHAPES_OUT
    return chosen[which.ravel()]


def any_rows(rows: Rows, generator: np.random.Generator) -> np.ndarray:
    return generator.random(len(rows["seconds"])) < ROWS_OUT


def inner_sizes(rows: Rows, generator: np.random.Generator) -> np.ndarray:
    """15 % of the (collective, group, size) that lie between the smallest and the largest size."""
    size = rows["bytes"]
    return (generator.random(len(size)) < SIZES_OUT) & (size > size.min()) & (size < size.max())


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
