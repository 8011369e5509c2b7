"""Predictions beside published measurements: `python -m benchmarks.validate --data DIR [--write]`.

Prints the tables of docs/validation.md; `--write` puts them there. Reads DIR, copies nothing of it. One function for
each table: it takes the folder and gives what its part of validation.md.j2 says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from autoshard.calibrate import Rows, fit
from autoshard.calibrate.fitted_models import GROUPS
from autoshard.calibrate.least_squares import take
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.costs import collective_seconds
from autoshard.costs.compute import one_product_seconds
from autoshard.ir.mesh import Mesh
from benchmarks import harness, megatron_steps, published_tables, step_bands
from benchmarks import measurements as m
from benchmarks.published_rows import Figures, section

PAGE = Path(__file__).resolve().parents[1] / "docs" / "validation.md"
NODES = ("a100", "h100", "h200", "b200")
CONSTANT_EFFICIENCY = 0.5  # of the peak: the baseline of kernels
LINK_EFFICIENCY = 0.8  # of the datasheet's bandwidth: the baseline of collectives
BANDS = ((0.0, 2.0**20), (2.0**20, 2.0**24 + 1), (2.0**24 + 1, np.inf))  # of bytes
LARGE_BYTES = 400e6
NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce",
         "alltoall": "all-to-all"}  # fmt: skip


def signed(errors: np.ndarray) -> str:
    return f"{errors.mean():+.1%}" if len(errors) else "–"


def absolute(errors: np.ndarray) -> str:
    return f"{np.abs(errors).mean():.1%}" if len(errors) else "–"


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernels(data: Path, kind: str, devices: Sequence[str], size: str, name: str, least: int) -> Figures:
    """Of shapes below and from `least` on; `size`: the column, shown as `name`. Each draw holds out half of the weight
    shapes of products, half of the rows of causal attention."""
    cells = []
    for device in devices:
        measured = m.measured(kind, data, device)
        peak, bandwidth = measured.hardware.peak_flops("bfloat16"), measured.hardware.memory_bandwidth
        flops, traffic = m.work(kind, measured.rows)
        places, errors = measured.cross_validated()
        roofline = np.maximum(flops / peak, traffic / bandwidth) / measured.rows["seconds"] - 1
        constant = flops / (peak * CONSTANT_EFFICIENCY) / measured.rows["seconds"] - 1
        for words, chosen in (
            (f"{name} < {least}", measured.rows[size] < least),
            (f"{name} >= {least}", measured.rows[size] >= least),
        ):
            held = errors[chosen[places]]
            shown = (absolute(held), signed(held), absolute(roofline[chosen]), absolute(constant[chosen]))
            cells.append((device.upper(), words, len(held), *shown))
    return {"rows": cells}


LAYOUTS = {"TN": "", "NN": "dgrad", "NT": "wgrad"}  # of the forward, the gradients of input and weight
HOSTS = {"a100_pcie": "a100", "b200_bf16_ceperm": "b200"}


def backward_products(data: Path) -> Figures:
    """Products by layout on two other hosts: nothing but the rates of the backward beside the forward is from there."""
    cells = []
    for system, device in HOSTS.items():
        hardware = load_hardware(m.PROFILES[device])
        errors: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        for shape, measured, _ in m.kernels(data, "matmul", system):
            rows, columns, inner = (float(shape[key]) for key in "mnk")
            flops, size = 2 * rows * columns * inner, 2 * (rows * inner + inner * columns + rows * columns)
            relative = LAYOUTS[shape["layout"]]
            rate = hardware.constant(f"matmul.{relative}") if relative else 1.0
            predicted = one_product_seconds(hardware, "bfloat16", flops, inner, size, rate)
            errors[shape["layout"]].append(predicted / (flops / measured) - 1)
        cells.append((device.upper(), *(f"{signed(np.array(some))} ({len(some)})" for some in errors.values())))
    return {"rows": cells}


# --- collectives ------------------------------------------------------------------------------------------------------


def _bands(errors: np.ndarray, sizes: np.ndarray, shown: Callable[[np.ndarray], str] = absolute) -> list[str]:
    return [shown(errors[(sizes >= low) & (sizes < high)]) for low, high in BANDS]


def _baseline(rows: Rows, hardware: Hardware) -> np.ndarray:
    """Bytes over 0.8 of the datasheet's bandwidth, no latency, no protocols, no graph."""
    passes = np.where(rows["kind"] == GROUPS.index("all_reduce"), 2, 1)
    share = passes * (rows["members"] - 1) / rows["members"]
    return rows["bytes"] * share / (hardware.links[0].bandwidth * LINK_EFFICIENCY) / rows["seconds"] - 1


def collectives(data: Path) -> Figures:
    """NCCL in one node: 15 % of the inner sizes held out in each draw."""
    cells, everything = [], []
    for device in NODES:
        measured = m.measured("collective", data, device)
        rows, kinds = measured.rows, np.array(measured.names)
        places, errors = measured.cross_validated()
        base = _baseline(rows, measured.hardware)
        for name, shown in NAMES.items():
            chosen = kinds[places] == name
            cells.append([device.upper(), shown, *_bands(errors[chosen], rows["bytes"][places[chosen]])])
        everything.append((errors, base, rows["bytes"][places], rows["bytes"]))
    errors, base, sizes, base_sizes = (np.concatenate(parts) for parts in zip(*everything, strict=True))
    cells.append(["all", "**error**", *_bands(errors, sizes)])
    cells.append(["all", "bias", *_bands(errors, sizes, signed)])
    cells.append(["all", "baseline", *_bands(base, base_sizes)])
    return {"rows": cells}


def other_host(data: Path) -> Figures:
    """A100 all-reduces of another server: nothing was fitted to them."""
    hardware = load_hardware(m.PROFILES["a100"])
    rows, _ = m.collectives(data / "nccl_allreduce_v100_a100.csv", "a100", hardware)
    cells = []
    for members in np.unique(rows["members"]):
        group = take(rows, rows["members"] == members)
        mesh = Mesh((("tp", int(members)),))
        errors = collective_seconds(hardware, mesh, 0, "all_reduce", group["bytes"]) / group["seconds"] - 1
        cells.append([str(int(members)), *_bands(errors, group["bytes"], signed)[1:]])
    return {"rows": cells}


def link_graph(data: Path) -> Figures:
    """V100: constants fitted to groups of 8 only; the graph of the links gives the others."""
    measured = m.measured("collective", data, "v100")
    hardware, rows, model = measured.hardware, measured.rows, measured.model
    constants = fit(model, take(rows, rows["members"] == 8)).constants
    errors = model.seconds(constants, rows) / rows["seconds"] - 1
    link = hardware.links[0].bandwidth / hardware.links[0].graph.degree * hardware.links[0].efficiency
    whole = rows["bandwidth"][rows["members"] == 8][0]
    flat = {**rows, "bandwidth": np.full_like(rows["bandwidth"], whole)}
    base = model.seconds(constants, flat) / rows["seconds"] - 1
    cells = []
    for members in np.unique(rows["members"]):
        chosen = rows["members"] == members
        large = chosen & (rows["bytes"] >= LARGE_BYTES)
        bus = 2 * (members - 1) / members * rows["bytes"][large] / rows["seconds"][large]
        links = f"{rows['bandwidth'][chosen][0] / link:.1f} of 6"
        each = (absolute(some) for some in (errors[large], base[large], errors[chosen]))
        cells.append(
            (f"{members:.0f}{' (fitted)' if members == 8 else ''}", links, f"{(bus / link).mean():.2f}", *each)
        )
    return {"rows": cells}


TABLES: dict[str, Callable[[Path], Figures]] = {
    "Matmuls": lambda data: kernels(data, "matmul", NODES, "m", "m", 1024),
    "Matmuls of a backward, other servers": backward_products,
    "Attention": lambda data: kernels(data, "attention", NODES[:2], "length", "s", 2048),
    "Collectives in a node": collectives,
    "The same GPU in another server": other_host,
    "Bandwidth from the graph of the links": link_graph,
    **megatron_steps.TABLES,
    **published_tables.TABLES,
    **step_bands.TABLES,
}


def page(text: str, data: Path, only: Sequence[str] = ()) -> str:
    """`text` with everything from the first table of each of these sections to the next heading written again."""
    for title, make in TABLES.items():
        if not only or title in only:
            place = rf"(\n## {re.escape(title)}\n[^#|]*\n)\|[^#]*"
            content = "\n".join([*section(title, make(data)), "", ""])
            text, count = re.subn(place, lambda match, content=content: match[1] + content, text)
            assert count == 1, title
    return text


def main() -> None:
    options = harness.options(__doc__, tuple(TABLES), data=True).parse_args()
    text = page(PAGE.read_text(encoding="utf-8"), options.data, options.only or ())
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
