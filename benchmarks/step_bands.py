"""Bands of whole steps, from published steps that nothing was fitted to.

    python benchmarks/step_bands.py --data DIR [--write]

Steps are sorted by kind (device generation, style, software, one node or many, calibrated or not). A band is a multiple
of the mean error of the kind's steps. It is judged on what it was not made from: each model's steps by the band that
the other models' make. `--write` puts the bands into costmodels/whole_steps/bands.toml; docs/validation.md has the
table.
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
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import style_of
from autoshard.system.data_files import data_folder
from autoshard.whole_steps.software import priced_as
from autoshard.whole_steps.step_bands import ANY, MANY, ONE, UNMEASURED, StepKind, step_kind
from benchmarks import bloom_steps, cluster_steps, fsdp_runs, fsdp_steps, named_rows, published, steps

# Half-widths: so many mean errors (85 % of errors lie within them if they are normal, 83 % if they are exponential;
# twice the mean is the most that is asked for), but no wider than what this share of the next errors stays within,
# whatever their distribution (a rank of those seen, as in conformal prediction): where all err to one side.
SPREAD, SHARE = 1.8, 0.875
FEW = 8  # steps of a kind with one node or with many: below, both make one band
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
    kind = step_kind(hardware, style_of(row.model, row.run), priced_as(row.run.software), row.run.devices, calibrated)
    return StepCase(kind, name, row.measured_seconds / seconds - 1)


def _cases(rows: Sequence[steps.Row], hardware: Hardware, host: Host, calibrated: bool) -> Iterator[StepCase]:
    for row, seconds in zip(rows, steps.predict(rows, hardware, host), strict=True):
        yield _case(row, f"{row.model.hidden} wide, tp {row.run.tp}", float(seconds), hardware, calibrated)


def _plain(rows: Sequence[steps.Row], hardware: Hardware) -> Iterator[StepCase]:
    """With nothing measured there; and with the host of `--software megatron`, but for what that was fitted to."""
    yield from _cases(rows, hardware, steps.host_of(hardware), False)
    own = steps.with_software(rows, "megatron")
    yield from _cases(own, hardware, steps.host_of(hardware, "megatron"), False)


def _single_node(data: Path) -> Iterator[StepCase]:
    """vTrain's single-node steps, and those that the first calibration of the host did not see."""
    hardware, rows = load_hardware(A100), steps.single_rows(data)
    yield from _cases(rows, hardware, steps.host_of(hardware), False)
    others = steps.with_software([row for row in rows if not steps.is_fitted(row)], "megatron")
    yield from _cases(others, hardware, steps.host_of(hardware, "megatron"), False)
    draw = steps.draws_of(data)[0]
    yield from _cases([rows[i] for i in draw.held_out], hardware, draw.host, True)


def _multi_node(data: Path) -> Iterator[StepCase]:
    hardware, rows = load_hardware(CLUSTER), steps.vtrain(data / "vtrain_a100_multi_node.csv")
    yield from _plain(rows, hardware)
    yield from _cases(rows, hardware, steps.draws_of(data)[0].host, True)


def _papers(data: Path) -> Iterator[StepCase]:
    yield from _plain(published.megatron_rows(), load_hardware(A100))


def _named(data: Path) -> Iterator[StepCase]:
    rows = [row for row in cluster_steps.all_rows(data) if not _is_fitted(row)]
    rows += cluster_steps.ascend("kernels")
    rows += [replace(r, run=replace(r.run, software="megatron")) for r, _, full in bloom_steps.bloom(data) if not full]
    for row, seconds in zip(rows, named_rows.seconds_of(rows), strict=True):
        yield _case(row, row.name, float(seconds), row.hardware)
    own = [replace(r, hardware=cluster_steps.calibrated_b200(data, 0)) for r in cluster_steps.b200(data)]
    for row, seconds in zip(own, named_rows.seconds_of(own), strict=True):
        yield _case(row, row.name, float(seconds), row.hardware, True)


def _is_fitted(row: named_rows.NamedRow) -> bool:
    return row.hardware.name in cluster_steps.ASCEND_FITTED and cluster_steps.is_fitted(row)


def _fsdp(data: Path) -> Iterator[StepCase]:
    for software in ("kernels", fsdp_steps.SOFTWARE):
        rows = [r for r in fsdp_steps.rows(data, software) if software == "kernels" or not r.fitted]
        for row, seconds in zip(rows, fsdp_steps.predict(rows), strict=True):
            yield _case(row, row.name, float(seconds), load_hardware(fsdp_steps.PROFILES[row.gpu]))
    for own in fsdp_runs.fsdp_runs():
        if fsdp_runs.is_known(own):
            yield _case(own.row, own.row.name, own.seconds, own.row.hardware)


SOURCES = (_single_node, _multi_node, _papers, _named, _fsdp)


@dataclass(frozen=True)
class Judged:
    """A band, the steps and models it was made from, and how steps lie in the bands that other models make: the share
    inside, the mean of those bands, the mean error."""

    kind: StepKind
    error: float
    steps: int
    models: int
    inside: float
    width: float
    mean_error: float

    @property
    def keeps_its_word(self) -> bool:
        return LOW <= self.inside <= HIGH and self.width <= 2 * self.mean_error


def judged(found: Sequence[StepCase]) -> list[Judged]:
    """One for each kind; one node and many are one where either has few."""
    groups: dict[StepKind, list[StepCase]] = defaultdict(list)
    for case in found:
        groups[case.kind].append(case)
    pooled: dict[StepKind, list[StepCase]] = defaultdict(list)
    for kind, own in groups.items():
        both = [case for nodes in (ONE, MANY) for case in groups.get(replace(kind, nodes=nodes), [])]
        few = min(len(groups.get(replace(kind, nodes=nodes), [])) for nodes in (ONE, MANY)) < FEW
        pooled[replace(kind, nodes=ANY) if few and len(both) > len(own) else kind] = both if few else own
    return [_judge(kind, own) for kind, own in pooled.items()]


def _judge(kind: StepKind, own: Sequence[StepCase]) -> Judged:
    errors, models = np.array([abs(case.error) for case in own]), np.array([case.model for case in own])
    names = np.unique(models)
    if len(names) == 1:
        return Judged(kind, lone_width(errors), len(own), 1, math.nan, math.nan, float(errors.mean()))
    bands = np.zeros(len(own))
    for name in names:
        bands[models == name] = half_width(errors[models != name])
    inside = float((errors <= bands).mean())
    return Judged(kind, half_width(errors), len(own), len(names), inside, float(bands.mean()), float(errors.mean()))


def half_width(errors: np.ndarray) -> float:
    """What most of the next steps stay within, if they are like these of which the errors are given."""
    ranked = np.sort(np.abs(errors))
    rank = math.ceil((len(ranked) + 1) * SHARE)
    width = min([SPREAD * ranked.mean(), *ranked[rank - 1 : rank]])
    return float(np.round(width, 3))


def lone_width(errors: np.ndarray) -> float:
    """The same of one model's steps, which no other model judges: where `n` exponential errors are all that is known of
    their mean, five of six of the next lie within n (6^(1/n) - 1) times it (5 of one, 2.9 of two, 1.8 of many)."""
    count = len(errors)
    return float(np.round(count * (6 ** (1 / count) - 1) * np.abs(errors).mean(), 3))


def tables(data: Path) -> list[str]:
    found = judged(cases(data))
    lines = [
        "## Bands of whole steps",
        "",
        f"What a prediction shows as its band, by kind of step: {SPREAD} times the mean error of measured steps of the",
        "kind, within which five of six errors lie if they are normal or exponential, or the rank of their errors",
        f"within which {SHARE:.1%} of the next ones lie, where that is less; of a kind with one model's n steps, which",
        "no other judges, n (6^(1/n) - 1) times it: 5 mean errors of one step. It is judged on what it was not made",
        "from: the steps of each model by the band that the other models of the kind make. *Inside* is the share",
        "of them that lie in it, *width* the mean of those bands beside the mean error. Errors here are measured /",
        "predicted - 1; steps that a rate was fitted to are in no band. A step of any other kind, of an emitted",
        f"package for one, says that none was measured, and has ±{UNMEASURED:.0%}.",
        "",
        "| device | style | rates | nodes | calibrated | steps | models | band | inside | width / mean error | holds |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for one in found:
        kind = one.kind
        shown = ("–", "–", "one model") if one.models == 1 else (
            f"{one.inside:.0%}", f"{one.width / one.mean_error:.1f}", "yes" if one.keeps_its_word else "**no**"
        )  # fmt: skip
        lines.append(
            f"| {kind.generation} | {kind.style} | {kind.software} | {kind.nodes} | "
            f"{'yes' if kind.calibrated else 'no'} | {one.steps} | {one.models} | ±{one.error:.0%} | "
            f"{' | '.join(shown)} |"
        )
    kept = [one for one in found if one.models > 1]
    total = sum(one.steps for one in kept)
    share = sum(one.inside * one.steps for one in kept) / total
    return [
        *lines,
        "",
        f"Of {len(kept)} kinds with more than one model, {sum(one.keeps_its_word for one in kept)} hold what",
        "they promise:",
        f"{LOW:.0%} to {HIGH:.0%} inside, at most twice the mean error wide. Of all their {total} steps",
        f"{share:.0%} lie",
        "inside.",
    ]


LOW, HIGH = 0.80, 0.95


def text(found: Sequence[Judged]) -> str:
    """TOML."""
    lines = [
        f"# Half-widths of whole steps by kind: {SPREAD} times the mean relative error of published steps, or the",
        f"# rank of their errors within which {SHARE:.1%} of the next lie, where that is less.",
        "# Written by benchmarks/step_bands.py, read by autoshard/whole_steps/step_bands.py; how the steps of",
        "# other models lie in them is in docs/validation.md.",
        "schema = 1",
    ]
    for one in found:
        kind = one.kind
        lines += [
            "",
            "[[band]]",
            *(f'{key} = "{value}"' for key, value in vars(kind).items() if isinstance(value, str)),
            f"calibrated = {str(kind.calibrated).lower()}",
            f"error = {one.error:.3f}",
            f"steps = {one.steps}",
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
