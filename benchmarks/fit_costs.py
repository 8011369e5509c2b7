"""Fits the constants of `costmodels/` to published measurements: `python -m benchmarks.fit_costs --data DIR [--write]`.

Prints the constants with their held-out errors (ten seeded draws); `--write` writes the TOML files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np

from autoshard.calibrate import Attention, Collectives, Products, Rows, cross_validate, fit
from autoshard.calibrate.cost_model_file import Entry, costmodel_text, entries_of
from autoshard.calibrate.fitted_models import Model
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.transformer import TrainingRun
from autoshard.estimate.transformer_program import build
from autoshard.system.files import data_folder
from benchmarks import harness
from benchmarks import measurements as m
from benchmarks.megatron_steps import head_slope
from benchmarks.published_rows import FITTED_WIDTH, single_rows

TABLES = "aiconfigurator's measured tables (ai-dynamo/aiconfigurator, Apache-2.0)"
NCCL = "aiconfigurator's NCCL table, 2 and 8 GPUs, 512 B to 512 MiB"
VTRAIN = "vTrain's all-reduce table (VIA-Research/vTrain, MIT), 2 to 8 GPUs, 1 MiB to 1 GiB"
SIMUMAX = "SimuMax's kernel tables (MooreThreads/SimuMax, Apache-2.0)"
DTYPES = "bfloat16"  # what the tables are of
VIDUR = "Vidur A100 and H100 profiles"
SOFTMAX_SOURCE = (
    "FlashAttention (Dao et al. 2022, figure 2): standard attention moves 40.3 GB in 41.7 ms on an A100-40GB, "
    "0.62 of 1555 GB/s"
)


@dataclass(frozen=True)
class Part:
    """What was fitted: the constants, and the mean absolute held-out error (of ten draws) with a text on it."""

    model: Model
    constants: Mapping[str, float]
    error: float
    source: str


def fit_part(model: Model, rows: Rows, held_out: Callable[[np.random.Generator], np.ndarray], source: str) -> Part:
    _, errors = cross_validate(model, rows, held_out)
    constants = fit(model, rows).constants
    error = float(np.abs(errors).mean())
    return Part(model, constants, error, f"fit to {len(rows['seconds'])} rows of {source}; held-out error {error:.1%}")


def products(data: Path, device: str, hardware: Hardware) -> Part:
    rows = m.products(data, device)
    model = Products(hardware.peak_flops("bfloat16"), hardware.memory_bandwidth)
    return fit_part(model, rows, partial(m.weight_shapes, rows), f"{TABLES}, bf16, weight shapes held out")


def attention(data: Path, device: str, hardware: Hardware) -> Part:
    rows = m.attention(data, device)
    model = Attention(hardware.peak_flops("bfloat16"), hardware.memory_bandwidth)
    return fit_part(model, rows, partial(m.any_rows, rows), f"{TABLES}, causal flash-attention in bf16")


def collectives(data: Path, device: str, hardware: Hardware) -> Part:
    link = hardware.links[0]
    if device == "v100":
        rows, _ = m.collectives(data / "nccl_allreduce_v100_a100.csv", device, hardware)
        model = Collectives(link.latency_seconds, ("all_reduce",), ramps=False)
        return fit_part(model, rows, partial(m.inner_sizes, rows), VTRAIN)
    rows, _ = m.collectives(data / "nccl_collectives.csv", device, hardware)
    model = Collectives(link.latency_seconds, in_network=bool(rows["reduced"].any()))
    return fit_part(model, rows, partial(m.inner_sizes, rows), NCCL)


def layouts(data: Path, forward: Part) -> dict[str, float]:
    """How fast the two products of the backward are beside the forward's: the median over shapes of measured rate over
    predicted rate, by layout (TN forward, NN gradient of the input, NT gradient of the weight)."""
    found: dict[str, list[float]] = {"TN": [], "NN": [], "NT": []}
    for shape, rate, _ in m.kernels(data, "matmul", "a100_pcie"):
        sizes = m.sizes_of(shape)
        predicted = 2 * np.prod([sizes[key] for key in "mnk"]) / forward.model.seconds(forward.constants, sizes)[0]
        found[shape["layout"]].append(rate / predicted)
    medians = {layout: float(np.median(ratios)) for layout, ratios in found.items()}
    return {"dgrad": medians["NN"] / medians["TN"], "wgrad": medians["NT"] / medians["TN"]}


def misaligned(data: Path) -> float:
    """The rate of products whose rows do not start at multiples of 16 bytes, beside that of others: what is left of the
    head's seconds over 50,257 words (vTrain's single-node steps at TP 1, of the narrower models) without the rest."""
    rows, width, size = single_rows(data), FITTED_WIDTH, 4
    model = next(r.model for r in rows if (r.model.hidden, r.run.tp) == (width, 1))

    def predicted(share: float) -> float:
        hardware = load_hardware("a100-80g-sxm")
        constants = dict(hardware.constants) | {"matmul.misaligned": share}
        hardware = replace(hardware, constants=tuple(constants.items()))
        made = pieces(build(model, TrainingRun(size, size), hardware), hardware)
        return sum(piece.forward_seconds + piece.backward_seconds for piece in (made.head, made.embedding)) / size

    aligned = predicted(1.0)
    product_seconds = predicted(0.5) - aligned  # half as fast adds them once more
    return product_seconds / (product_seconds + head_slope(rows, width, 1) - aligned)


def attention_backward(data: Path) -> float:
    """Rate of the backward (2.5 times the forward's FLOPs) beside the forward's: median over shapes."""
    rates: dict[str, dict[tuple[str, str], float]] = {"sdp_fwd": {}, "sdp_bwd": {}}
    for row in m.read(data / "kernel_efficiency.csv"):
        if row["op"] in rates:
            rates[row["op"]][row["system"], row["shape"]] = float(row["efficiency"])
    pairs = [rates["sdp_bwd"][key] / rate for key, rate in rates["sdp_fwd"].items() if key in rates["sdp_bwd"]]
    return float(np.median(pairs))


def entries(part: Part) -> list[Entry]:
    return entries_of(part.model.group, part.constants, "measured", part.source)


def memory_entries(device: str) -> list[Entry]:
    kind = "measured" if device in ("a100", "h100") else "default"
    source = VIDUR if kind == "measured" else f"as on A100 and H100 ({VIDUR})"
    return [
        Entry("memory.default", 0.78, "default", "generic"),
        Entry("memory.elementwise", 0.95, kind, f"{source}: residual add 0.95 to 1.10"),
        Entry("memory.activation", 0.5, kind, f"{source}: 0.49 to 0.58"),
        Entry("memory.normalisation", 0.4, kind, f"{source}: layer norm 0.36 to 0.43"),
        Entry("memory.softmax", 0.62, "derived", SOFTMAX_SOURCE),
        Entry("memory.gather", 0.5, "default", "whole rows are read, in no order: between activation and copy"),
        Entry("host.dispatch", "10 us", "default", "an eager operator of torch; more under hooks"),
        Entry("error.memory", 0.15, kind, f"{source}: a bandwidth and a launch fit them within 8 to 15 %"),
    ]


def costmodel(data: Path, device: str, a100: Part) -> tuple[list[Entry], str]:
    """The entries of a cost model, and a sentence on its errors."""
    hardware = load_hardware(m.PROFILES[device])
    parts = {"collective": collectives(data, device, hardware)}
    if device != "v100":
        parts["matmul"] = products(data, device, hardware)
    if device in ("a100", "h100"):
        parts["attention"] = attention(data, device, hardware)
    found = [entry for name in ("matmul", "attention") for entry in _or_default(name, parts.get(name))]
    back = layouts(data, a100)
    for key, value in back.items():
        where = "" if device == "a100" else "as on A100: "
        kind = "measured" if device == "a100" else "default"
        source = f"{where}median over the products of an A100-PCIe in {SIMUMAX}, beside the forward"
        found.append(Entry(f"matmul.{key}", round(value, 3), kind, source))
    if device != "v100":
        where = "" if device == "a100" else "as on A100: "
        source = f"{where}the head over 50,257 words in {FITTED_WIDTH} wide models of vTrain's single-node steps"
        kind = "measured" if device == "a100" else "default"
        found.append(Entry("matmul.misaligned", round(misaligned(data), 2), kind, source))
    fill = "start and end of the loop over k; between 94 and 133 fit best on four GPUs"
    found.append(Entry("matmul.fill", 128.0, "default", fill))
    source = f"median over A100-PCIe and B200 in {SIMUMAX}, beside the forward"
    own = device in ("a100", "b200")
    source = source if own else f"as on A100 and B200: {source}"
    found.append(
        Entry("attention.backward", round(attention_backward(data), 3), "measured" if own else "default", source)
    )
    found += memory_entries(device) + entries(parts["collective"])
    if device == "v100":  # only all-reduces were measured
        found += _as_all_reduce(entries(parts["collective"]))
    for name in ("matmul", "attention", "collective"):
        if name in parts:
            found.append(Entry(f"error.{name}", round(parts[name].error, 3), "measured", "held out, ten seeded draws"))
    told = "; ".join(f"{name} {part.error:.1%}" for name, part in sorted(parts.items()))
    return found, f"mean absolute error on held-out rows, ten seeded draws: {told}"


GENERIC: dict[str, list[Entry]] = {
    "matmul": [
        Entry("matmul.launch", "3 us", "default", "between the fits of A100 (2.9 us) and B200 (2.0 us)"),
        Entry("matmul.compute", 0.8, "default", "fits of A100, H100, H200, B200: 0.72 to 0.85"),
        Entry("matmul.memory", 0.8, "default", "fits of A100, H100, H200, B200: 0.79 to 0.89"),
        Entry("matmul.exponent", 2.2, "default", "between the same fits"),
        Entry("matmul.depth", "3 us", "default", "between the same fits"),
        Entry("matmul.split", 2000.0, "default", "between the same fits"),
    ],
    "attention": [
        Entry("attention.launch", "11 us", "default", "between the fits of A100 and H100"),
        Entry("attention.compute", 0.65, "default", "fits of A100 and H100: 0.70, beside generic 0.6"),
        Entry("attention.memory", 0.53, "default", "between the fits of A100 and H100"),
        Entry("attention.exponent", 1.3, "default", "between the same fits"),
        Entry("attention.head", 10.0, "default", "between the same fits"),
        Entry("attention.chain", "3 ns", "default", "as on H100"),
    ],
}


def _or_default(name: str, part: Part | None) -> list[Entry]:
    return GENERIC[name] if part is None else entries(part)


def _as_all_reduce(found: list[Entry]) -> list[Entry]:
    own = [entry for entry in found if entry.key.startswith("collective.all_reduce.")]
    return [
        Entry(entry.key.replace("all_reduce", kind), entry.value, "default", "as the all-reduce of this device")
        for kind in ("ring", "exchange")
        for entry in own
    ]


def main() -> None:
    options = harness.options(__doc__, data=True).parse_args()
    a100 = products(options.data, "a100", load_hardware(m.PROFILES["a100"]))
    for device in m.PROFILES:
        found, error = costmodel(options.data, device, a100)
        print(f"nvidia-{device}: {error}")
        for entry in found:
            print(f"  {entry.key} = {entry.value} ({entry.kind})")
        if options.write:
            fitted = {"matmul", "attention"} if device == "v100" else set()
            note = f"fitted by benchmarks/fit_costs.py to {TABLES if device != 'v100' else VTRAIN}"
            if fitted:
                note += "; products and attention are generic"
            path = data_folder("costmodels") / f"nvidia-{device}.toml"
            today, dtypes = date.today().isoformat(), "" if fitted else DTYPES
            path.write_text(costmodel_text(f"nvidia-{device}", note, error, today, found, "fitted", dtypes), "utf-8")


if __name__ == "__main__":
    main()
