"""Fits the constants of `costmodels/` to published measurements: `python -m benchmarks.fit_costs --data DIR [--write]`.

Prints the constants with their held-out errors (ten seeded draws); `--write` writes the TOML files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np

from autoshard.calibrate import fit
from autoshard.calibrate.cost_model_file import Entry, costmodel_text, entries_of
from autoshard.calibrate.fitted_models import Model
from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.transformer import TrainingRun
from autoshard.estimate.transformer_program import build
from autoshard.system.files import data_folder
from benchmarks import harness
from benchmarks import measurements as m
from benchmarks.megatron_steps import head_slope
from benchmarks.published_rows import FITTED_WIDTH, single_rows

DTYPES = "bfloat16"  # what the tables are of
DEFAULTS = harness.rows_of("default_constants.toml")
SOURCES = DEFAULTS["sources"]


@dataclass(frozen=True)
class Part:
    """What was fitted: the constants, and the mean absolute held-out error (of ten draws) with a text on it."""

    model: Model
    constants: Mapping[str, float]
    error: float
    source: str


def part(kind: str, data: Path, device: str) -> Part:
    """Fitted to all rows of `measurements.measured`."""
    measured = m.measured(kind, data, device)
    error = float(np.abs(measured.cross_validated()[1]).mean())
    source = SOURCES["all_reduce" if (kind, device) == ("collective", "v100") else kind]
    note = f"fit to {len(measured.rows['seconds'])} rows of {source}; held-out error {error:.1%}"
    return Part(measured.model, fit(measured.model, measured.rows).constants, error, note)


def layouts(data: Path, forward: Part) -> dict[str, float]:
    """How fast the two products of the backward are beside the forward's: the median over shapes of measured rate over
    predicted rate, by layout (TN forward, NN gradient of the input, NT gradient of the weight)."""
    by_layout: dict[str, list[float]] = {"TN": [], "NN": [], "NT": []}
    for layout, ratio in m.product_ratios(data, "a100_pcie", forward.model, forward.constants):
        by_layout[layout].append(1 / ratio)
    medians = {layout: float(np.median(ratios)) for layout, ratios in by_layout.items()}
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
        parts = pieces(build(model, TrainingRun(size, size), hardware), hardware)
        return sum(piece.forward_seconds + piece.backward_seconds for piece in (parts.head, parts.embedding)) / size

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


def defaults(name: str, device: str = "") -> list[Entry]:
    """Of default_constants.toml; what was measured on A100 and H100 is a default elsewhere."""
    kinds = {"A100 and H100": ("measured" if device in ("a100", "h100") else "default", "")}
    table = []
    for key, value, kind, source in DEFAULTS[name]:
        entry_kind, words = (kinds[kind][0], SOURCES["vidur"]) if kind in kinds else (kind, "")
        words = words if entry_kind == "measured" or not words else f"as on A100 and H100 ({words})"
        table.append(Entry(key, value, entry_kind, f"{words}: {source}" if words else source))
    return table


def measured_on(devices: Sequence[str], device: str, key: str, value: float, source: str) -> Entry:
    """What was measured on some devices, and is a default elsewhere."""
    if device in devices:
        return Entry(key, round(value, 3), "measured", source)
    return Entry(key, round(value, 3), "default", f"as on {' and '.join(map(str.upper, devices))}: {source}")


def costmodel(data: Path, device: str, a100: Part) -> tuple[list[Entry], str]:
    """The entries of a cost model, and a sentence on its errors."""
    kinds = ["collective", *["matmul"] * (device != "v100"), *["attention"] * (device in ("a100", "h100"))]
    parts = {kind: part(kind, data, device) for kind in kinds}
    table = [e for name in ("matmul", "attention") for e in (entries(parts[name]) if name in parts else defaults(name))]
    where = f"in {SOURCES['simumax']}, beside the forward"
    table += [
        measured_on(("a100",), device, f"matmul.{key}", value, f"median over the products of an A100-PCIe {where}")
        for key, value in layouts(data, a100).items()
    ]
    if device != "v100":
        source = f"the head over 50,257 words in {FITTED_WIDTH} wide models of vTrain's single-node steps"
        table.append(measured_on(("a100",), device, "matmul.misaligned", round(misaligned(data), 2), source))
    fill = "start and end of the loop over k; between 94 and 133 fit best on four GPUs"
    table.append(Entry("matmul.fill", 128.0, "default", fill))
    source = f"median over A100-PCIe and B200 {where}"
    table.append(measured_on(("a100", "b200"), device, "attention.backward", attention_backward(data), source))
    table += defaults("memory", device) + entries(parts["collective"])
    if device == "v100":  # only all-reduces were measured
        table += _as_all_reduce(entries(parts["collective"]))
    for name in ("matmul", "attention", "collective"):
        if name in parts:
            table.append(Entry(f"error.{name}", round(parts[name].error, 3), "measured", "held out, ten seeded draws"))
    errors = "; ".join(f"{name} {part.error:.1%}" for name, part in sorted(parts.items()))
    return table, f"mean absolute error on held-out rows, ten seeded draws: {errors}"


def _as_all_reduce(table: list[Entry]) -> list[Entry]:
    all_reduces = [entry for entry in table if entry.key.startswith("collective.all_reduce.")]
    return [
        Entry(entry.key.replace("all_reduce", kind), entry.value, "default", "as the all-reduce of this device")
        for kind in ("ring", "exchange")
        for entry in all_reduces
    ]


def main() -> None:
    options = harness.options(__doc__, data=True).parse_args()
    a100 = part("matmul", options.data, "a100")
    for device in m.PROFILES:
        table, error = costmodel(options.data, device, a100)
        print(f"nvidia-{device}: {error}")
        for entry in table:
            print(f"  {entry.key} = {entry.value} ({entry.kind})")
        if options.write:
            fitted = {"matmul", "attention"} if device == "v100" else set()
            note = f"fitted by benchmarks/fit_costs.py to {SOURCES['all_reduce' if device == 'v100' else 'tables']}"
            if fitted:
                note += "; products and attention are generic"
            path = data_folder("costmodels") / f"nvidia-{device}.toml"
            today, dtypes = date.today().isoformat(), "" if fitted else DTYPES
            path.write_text(costmodel_text(f"nvidia-{device}", note, error, today, table, "fitted", dtypes), "utf-8")


if __name__ == "__main__":
    main()
