"""Bands of whole steps, from published steps that nothing was fitted to.

    python benchmarks/step_bands.py --data DIR [--write]

Steps are sorted by kind (device generation, style, software, one node or many, calibrated or not). A band is the error
that nine of ten steps stayed within, of every second model of the kind; it is judged on the other models. `--write`
puts the bands into costmodels/whole_steps/bands.toml; docs/validation.md has the table.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.costs.step_bands import StepKind, step_kind
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import style_of
from autoshard.system.data_files import data_folder
from benchmarks import cluster_steps, fsdp_steps, published, steps

INSIDE = 0.9  # of the steps that a band is made from
A100, CLUSTER = "a100-80g-sxm", "a100-80g-sxm-4hdr"


@dataclass(frozen=True)
class StepCase:
    """One step: `error` is measured / predicted - 1, what a band around a prediction should hold."""

    kind: StepKind
    model: str
    error: float


@lru_cache(maxsize=2)
def cases(data: Path) -> tuple[StepCase, ...]:
    """Of all tables; rows that a rate was fitted to are left out."""
    return tuple(case for source in SOURCES for case in source(data))


def _case(row: steps.Row, name: str, seconds: float, hardware: Hardware, calibrated: bool = False) -> StepCase:
    kind = step_kind(hardware, style_of(row.run), row.run.software, row.run.devices, calibrated)
    return StepCase(kind, name, row.measured_seconds / seconds - 1)


def _cases(rows: Sequence[steps.Row], hardware: Hardware, host: Host, calibrated: bool) -> Iterator[StepCase]:
    for row, seconds in zip(rows, steps.predict(rows, hardware, host), strict=True):
        yield _case(row, f"{row.model.layers}x{row.model.hidden}", float(seconds), hardware, calibrated)


def _single_node(data: Path) -> Iterator[StepCase]:
    """vTrain's single-node steps with the host of the profile, and of each calibration those that it did not see."""
    hardware, rows = load_hardware(A100), steps.vtrain(data / "vtrain_a100_single_node.csv")
    yield from _cases(rows, hardware, steps.host_of(hardware), False)
    for draw in steps.draws_of(data):
        yield from _cases([rows[i] for i in draw.held_out], hardware, draw.host, True)


def _multi_node(data: Path) -> Iterator[StepCase]:
    hardware, rows = load_hardware(CLUSTER), steps.vtrain(data / "vtrain_a100_multi_node.csv")
    yield from _cases(rows, hardware, steps.host_of(hardware), False)
    yield from _cases(rows, hardware, steps.draws_of(data)[0].host, True)


def _papers(data: Path) -> Iterator[StepCase]:
    hardware = load_hardware(A100)
    for row in published.megatron_rows():
        yield from _cases([row], hardware, steps.host_of(hardware), False)


def _named(data: Path) -> Iterator[StepCase]:
    rows = [row for row in cluster_steps.all_rows(data) if not _is_fitted(row)]
    rows += cluster_steps.ascend("kernels")
    for row, seconds in zip(rows, cluster_steps.seconds_of(rows), strict=True):
        yield _case(row, row.name, float(seconds), row.hardware)
    for seed in range(cluster_steps.KERNEL_DRAWS):
        own = [replace(r, hardware=cluster_steps.calibrated_b200(data, seed)) for r in cluster_steps.b200(data)]
        for row, seconds in zip(own, cluster_steps.seconds_of(own), strict=True):
            yield _case(row, row.name, float(seconds), row.hardware, True)


def _is_fitted(row: cluster_steps.NamedRow) -> bool:
    return row.hardware.name in cluster_steps.ASCEND_FITTED and cluster_steps.is_fitted(row)


def _fsdp(data: Path) -> Iterator[StepCase]:
    for software in ("kernels", fsdp_steps.SOFTWARE):
        rows = [r for r in fsdp_steps.rows(data, software) if software == "kernels" or not r.fitted]
        for row, seconds in zip(rows, fsdp_steps.predict(rows), strict=True):
            yield _case(row, row.name, float(seconds), load_hardware(fsdp_steps.PROFILES[row.gpu]))
    for named, own in cluster_steps.fsdp_runs():
        yield _case(named, named.name, own, named.hardware)


SOURCES = (_single_node, _multi_node, _papers, _named, _fsdp)


@dataclass(frozen=True)
class Judged:
    """A band, what it was made from, and how the other models' steps lie in it."""

    kind: StepKind
    error: float
    made: int
    others: int
    inside: float
    mean_error: float


def judged(found: Sequence[StepCase]) -> list[Judged]:
    """One for each kind; where there is one model only, nothing is left to judge by."""
    groups: dict[StepKind, list[StepCase]] = defaultdict(list)
    for case in found:
        groups[case.kind].append(case)
    return [_judge(kind, own) for kind, own in groups.items()]


def _judge(kind: StepKind, own: Sequence[StepCase]) -> Judged:
    models = sorted({case.model for case in own})
    making = set(models[::2])
    made = np.array([abs(case.error) for case in own if case.model in making])
    others = np.array([abs(case.error) for case in own if case.model not in making])
    error = quantile(made)
    inside, mean = (float((others <= error).mean()), float(others.mean())) if len(others) else (math.nan, math.nan)
    return Judged(kind, error, len(made), len(others), inside, mean)


def quantile(errors: np.ndarray) -> float:
    """The error that `INSIDE` of the next steps stay within, if they are like these; the largest of few."""
    rank = min(math.ceil((len(errors) + 1) * INSIDE), len(errors))
    return float(np.ceil(np.sort(errors)[rank - 1] * 100) / 100)


def tables(data: Path) -> list[str]:
    found = judged(cases(data))
    lines = [
        "## Bands of whole steps",
        "",
        "What a prediction shows as its band, by kind of step: the error that nine of ten measured steps of",
        "every second",
        "model of the kind stayed within. *Inside* is the share of the steps of the other models that lie in",
        "it. Errors",
        "here are measured / predicted - 1. Steps that a rate was fitted to are in neither half. Of few steps the band",
        "is the largest error. A step of any other kind, an emitted package among them, says that none was measured",
        "and has the widest band of this table, at least ±50%.",
        "",
        "| device | style | rates | nodes | calibrated | made from | band | judged by | inside | band / mean error |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for one in found:
        kind = one.kind
        word = "yes" if kind.calibrated else "no"
        shown = (f"{one.inside:.0%}", f"{one.error / one.mean_error:.1f}") if one.others else ("–", "–")
        lines.append(
            f"| {kind.generation} | {kind.style} | {kind.software} | {kind.nodes} | {word} | {one.made} | "
            f"±{one.error:.0%} | {one.others} | {' | '.join(shown)} |"
        )
    kept = [one for one in found if one.others >= LEAST]
    good = [one for one in kept if LOW <= one.inside <= HIGH and one.error <= 2 * one.mean_error]
    total = sum(one.others for one in kept)
    share = sum(one.inside * one.others for one in kept) / total
    return [
        *lines,
        "",
        f"Of the {len(kept)} kinds with at least {LEAST} steps to judge by, {len(good)} have {LOW:.0%} to",
        f"{HIGH:.0%} inside",
        f"with a band of at most twice the mean error; of all their {total} steps {share:.0%} lie inside.",
    ]


LEAST, LOW, HIGH = 5, 0.80, 0.95


def text(found: Sequence[Judged]) -> str:
    """TOML."""
    lines = [
        "# Half-widths of whole steps by kind: the relative error that nine of ten published steps of every second",
        "# model stayed within. Written by benchmarks/step_bands.py, read by autoshard/costs/step_bands.py; how the steps",
        "# of the other models lie in them is in docs/validation.md.",
        "schema = 1",
    ]
    for one in found:
        kind = one.kind
        lines += [
            "",
            "[[band]]",
            *(f'{key} = "{value}"' for key, value in vars(kind).items() if isinstance(value, str)),
            f"calibrated = {str(kind.calibrated).lower()}",
            f"error = {one.error:.2f}",
            f"steps = {one.made}",
        ]
    return "\n".join([*lines, ""])


TABLES = (tables,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    print("\n".join(tables(options.data)))
    if options.write:
        path = data_folder("costmodels") / "whole_steps" / "bands.toml"
        path.write_text(text(judged(cases(options.data))), encoding="utf-8")


if __name__ == "__main__":
    main()
