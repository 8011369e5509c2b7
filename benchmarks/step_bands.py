"""Bands of whole steps, from published steps that nothing was fitted to.

    python -m benchmarks.step_bands --data DIR [--write]

Steps are sorted by kind (device generation, style, software, one node or many, calibrated or not). A kind has a band
where steps of two releases or frameworks were measured, and neighbouring kinds one together. It is judged on what it
was not made from: each release's steps by the band that all others make. `--write` puts the bands into
costmodels/whole_steps/bands.toml; docs/validation.md has the table.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import style_of
from autoshard.step_corrections.software import priced_as
from autoshard.step_corrections.step_bands import ANY, UNMEASURED, StepKind, nearest, step_kind
from autoshard.system.files import data_folder
from benchmarks import harness, megatron_steps
from benchmarks import published_rows as runs
from benchmarks.published_rows import Figures, Step, seconds_of, section, with_software
from benchmarks.published_tables import calibrated_steps

# Half-widths of one release: so many mean errors (85 % of errors lie within them if they are normal, 83 % if they are
# exponential), but no wider than what this share of the next errors stays within, whatever their distribution (a rank
# of those seen, as in conformal prediction): where all err to one side.
SPREAD, SHARE = 1.8, 0.875
FEW = 8  # steps: fewer make no band of a kind, and no width of a release of their own
LEAST_RELEASES = 2  # of a band
LOW = 0.80  # of the steps of a release that a band was not made from, what should lie inside


@dataclass(frozen=True)
class StepCase:
    """One step: `error` is measured / predicted - 1, what a band around a prediction should hold. `release`: of the
    framework that made it."""

    kind: StepKind
    release: str
    error: float


@lru_cache(maxsize=2)
def cases(data: Path) -> tuple[StepCase, ...]:
    """Of all tables; rows that a rate was fitted to are left out."""
    all_cases = []
    for rows, host, calibrated in _groups(data):
        for row, seconds in zip(rows, seconds_of(rows, host), strict=True):
            style, software = style_of(row.model, row.run), priced_as(row.run.software)
            kind = step_kind(row.hardware, style, software, row.run.devices, calibrated)
            all_cases.append(StepCase(kind, row.release, row.measured_seconds / float(seconds) - 1))
    return tuple(all_cases)


def _groups(data: Path) -> Iterator[tuple[Sequence[Step], Host | None, bool]]:
    """Rows, the host where one was fitted, and whether they are calibrated. With nothing measured there, and with the
    numbers of their software, but for what those were fitted to."""
    single, multi = runs.single_rows(data), runs.multi_rows(data)
    bloom = [row for row in runs.bloom(data) if not row.full]
    draw = megatron_steps.draws_of(data)[0]
    yield single, None, False
    yield with_software([row for row in single if not row.fitted], runs.MEGATRON), None, False
    yield [single[i] for i in draw.held_out], draw.host, True
    for rows in (multi, runs.published("scaling"), runs.published("selective")):
        yield rows, None, False
        yield with_software(rows, runs.MEGATRON), None, False
        if rows is multi:
            yield rows, draw.host, True
    yield bloom, None, False
    yield with_software(bloom, runs.MEGATRON), None, False
    yield runs.b200(data), None, False
    yield runs.published("megatron_core"), None, False
    for software in (runs.ASCEND, "kernels"):
        yield _held_out(runs.ascend(software), software), None, False
        yield runs.mindspeed(data, software), None, False
    yield [row for row in runs.nvidia(data) if row.run.precision == "bf16"], None, False
    yield calibrated_steps(data, 0), None, True
    for software in ("kernels", runs.FSDP_SOFTWARE):
        yield _held_out(runs.mpt(data, software), software), None, False
    yield [row for row in runs.fsdp_runs() if runs.is_known(row)], None, False


def _held_out(rows: Sequence[Step], software: str) -> list[Step]:
    return [row for row in rows if software == "kernels" or not row.fitted]


@dataclass(frozen=True)
class MadeBand:
    """A half-width, with how many steps of how many releases it is from."""

    error: float
    steps: int
    releases: int


def made(all_cases: Sequence[StepCase]) -> dict[StepKind, MadeBand]:
    """Of kinds with two releases and not few steps, on one node, on many, on either. Then of neighbours: of a style
    and its software on all devices, and of a style on one generation with all software."""
    pools: dict[StepKind, list[StepCase]] = defaultdict(list)
    for case in all_cases:
        either = replace(case.kind, nodes=ANY)
        for pool in (case.kind, either, replace(either, generation=ANY), replace(either, software=ANY)):
            pools[pool].append(case)
    enough = {kind: group for kind, group in pools.items() if len(group) >= FEW}
    bands = {k: _made(group) for k, group in enough.items() if len({case.release for case in group}) >= LEAST_RELEASES}
    # of neighbours a band wider than that of no step at all says nothing
    return {k: b for k, b in bands.items() if b.error <= UNMEASURED or ANY not in (k.generation, k.software)}


def _made(group: Sequence[StepCase]) -> MadeBand:
    """What the next release stays within: the rank of the widths of those seen, the largest where they are few. Those
    with few steps have the width of all steps together."""
    releases: dict[str, list[float]] = defaultdict(list)
    for case in group:
        releases[case.release].append(case.error)
    groups = [errors for errors in releases.values() if len(errors) >= FEW]
    if len(groups) < len(releases):
        groups.append([case.error for case in group])
    widths = sorted(half_width(np.array(errors)) for errors in groups)
    rank = min(len(widths), math.ceil((len(widths) + 1) * LOW))
    return MadeBand(widths[rank - 1], len(group), len(releases))


@dataclass(frozen=True)
class Judged:
    """Which share of the steps of a kind lies `inside` of the bands that steps of other releases make."""

    kind: StepKind
    steps: int
    releases: int
    inside: float

    @property
    def keeps_its_word(self) -> bool:
        return self.inside >= LOW


def judged(all_cases: Sequence[StepCase]) -> list[Judged]:
    """One for each kind, a release held out at a time."""
    others = {r: made([case for case in all_cases if case.release != r]) for r in {case.release for case in all_cases}}
    groups: dict[StepKind, list[StepCase]] = defaultdict(list)
    for case in all_cases:
        groups[case.kind].append(case)
    return [_judge(kind, group, others) for kind, group in groups.items()]


def _judge(kind: StepKind, group: Sequence[StepCase], others: Mapping[str, Mapping[StepKind, MadeBand]]) -> Judged:
    bands = [nearest(others[case.release], kind) for case in group]
    widths = np.array([UNMEASURED if band is None else band.error for band in bands])
    inside = float((np.abs([case.error for case in group]) <= widths).mean())
    return Judged(kind, len(group), len({case.release for case in group}), inside)


def half_width(errors: np.ndarray) -> float:
    """What most of the next steps stay within, if they are like these of which the errors are given."""
    ranked = np.sort(np.abs(errors))
    rank = math.ceil((len(ranked) + 1) * SHARE)
    width = min([SPREAD * ranked.mean(), *ranked[rank - 1 : rank]])
    return float(np.round(width, 3))


def tables(data: Path) -> Figures:
    """Kinds with the band that a prediction shows, then those of neighbours."""
    all_cases = cases(data)
    bands, kinds = made(all_cases), judged(all_cases)
    shown = [(one, band) for one in kinds if (band := nearest(bands, one.kind)) is not None]
    total = sum(one.steps for one in kinds)
    return {
        "rows": [
            (_words(one.kind), one.steps, one.releases, f"±{band.error:.0%}",
             f"{one.inside:.0%}" if one.keeps_its_word else f"**{one.inside:.0%}**")
            for one, band in shown
        ],
        "without": len(kinds) - len(shown),
        "kept": sum(one.keeps_its_word for one in kinds),
        "kinds": len(kinds),
        "low": LOW,
        "share": sum(one.inside * one.steps for one in kinds) / total,
        "total": total,
        "mean": np.mean([one.inside for one in kinds]),
    }  # fmt: skip


def _words(kind: StepKind) -> str:
    named = (kind.generation, kind.style, f"`{kind.software}`", f"{kind.nodes} node{'s' * (kind.nodes == 'many')}")
    return ", ".join((*named, *["measured host"] * kind.calibrated))


TITLE = "Bands of whole steps"
TABLES = {TITLE: tables}


def main() -> None:
    options = harness.options(__doc__, data=True).parse_args()
    print("\n".join(section(TITLE, tables(options.data))))
    if options.write:
        path = data_folder("costmodels") / "whole_steps" / "bands.toml"
        text = harness.rendered("bands.toml.j2", bands=made(cases(options.data)))
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
