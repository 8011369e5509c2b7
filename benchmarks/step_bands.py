"""Bands of whole steps, from published steps that nothing was fitted to.

    python -m benchmarks.step_bands --data DIR [--write]

Steps are sorted by kind (device generation, style, software, one node or many, calibrated or not). A kind has a band
where steps of two releases or frameworks were measured, and neighbouring kinds one together. It is judged on what it
was not made from: each release's steps by the band that all others make. `--write` puts the bands into
costmodels/whole_steps/bands.toml; docs/validation.md has the table.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import style_of
from autoshard.system.files import data_folder
from autoshard.whole_steps.software import priced_as
from autoshard.whole_steps.step_bands import ANY, UNMEASURED, StepKind, nearest, step_kind
from benchmarks import bloom_steps, cluster_steps, fsdp_runs, fsdp_steps, published, recipe_steps, steps

# Half-widths of one release: so many mean errors (85 % of errors lie within them if they are normal, 83 % if they are
# exponential), but no wider than what this share of the next errors stays within, whatever their distribution (a rank
# of those seen, as in conformal prediction): where all err to one side.
SPREAD, SHARE = 1.8, 0.875
FEW = 8  # steps: fewer make no band of a kind, and no width of a release of their own
LEAST_RELEASES = 2  # of a band
LOW = 0.80  # of the steps of a release that a band was not made from, what should lie inside
A100, CLUSTER = "a100-80g-sxm", "a100-80g-sxm-4hdr"


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
    return tuple(case for source in SOURCES for case in source(data))


def _case(row: steps.Row, release: str, seconds: float, hardware: Hardware, calibrated: bool = False) -> StepCase:
    kind = step_kind(hardware, style_of(row.model, row.run), priced_as(row.run.software), row.run.devices, calibrated)
    return StepCase(kind, release, row.measured_seconds / seconds - 1)


VTRAIN, SC21, KORTHIKANTI = "Megatron-LM, vTrain's fork", "Megatron-LM 2021", "Megatron-LM 2022"


def _cases(
    rows: Sequence[steps.Row], hardware: Hardware, host: Host, calibrated: bool, release: str = VTRAIN
) -> Iterator[StepCase]:
    for row, seconds in zip(rows, steps.predict(rows, hardware, host), strict=True):
        yield _case(row, release, float(seconds), hardware, calibrated)


def _plain(rows: Sequence[steps.Row], hardware: Hardware, release: str = VTRAIN) -> Iterator[StepCase]:
    """With nothing measured there; and with the host of `--software megatron`, but for what that was fitted to."""
    yield from _cases(rows, hardware, steps.host_of(hardware), False, release)
    own = steps.with_software(rows, "megatron")
    yield from _cases(own, hardware, steps.host_of(hardware, "megatron"), False, release)


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
    for release, rows in ((SC21, published.scaling_rows()), (KORTHIKANTI, published.selective_rows())):
        yield from _plain([row for _, row in rows], load_hardware(A100), release)


def _named(data: Path) -> Iterator[StepCase]:
    bloom = [row for row, _, full in bloom_steps.bloom(data) if not full]
    tables = [
        ("Megatron-DeepSpeed, BLOOM", bloom),
        ("Megatron-DeepSpeed, BLOOM", [replace(r, run=replace(r.run, software="megatron")) for r in bloom]),
        ("Megatron-Core, SimuMax 1.2", cluster_steps.b200(data)),
        ("Megatron-Core, its README", cluster_steps.megatron_core()),
    ]
    for release, rows in tables:
        yield from _at(rows, [release] * len(rows))
    for software in (cluster_steps.ASCEND_SOFTWARE, "kernels"):
        own = [
            row for row in cluster_steps.ascend(software) if software == "kernels" or not cluster_steps.is_fitted(row)
        ]
        yield from _at(
            own, ["MindFormers 1.0" if r.hardware.name == "ascend-910a" else "MindSpeed-LLM 1.0.RC1" for r in own]
        )
        yield from _at(*zip(*recipe_steps.mindspeed(data, software), strict=True))
    recipes = [(row, release) for row, release in recipe_steps.nvidia(data) if row.run.precision == "bf16"]
    yield from _at(*zip(*recipes, strict=True))
    there = [replace(r, hardware=cluster_steps.calibrated_b200(data, 0)) for r in cluster_steps.b200(data)]
    yield from _at(there, ["Megatron-Core, SimuMax 1.2"] * len(there), calibrated=True)


def _at(rows: Sequence[steps.NamedRow], releases: Sequence[str], calibrated: bool = False) -> Iterator[StepCase]:
    for row, release, seconds in zip(rows, releases, steps.seconds_of(rows), strict=True):
        yield _case(row, release, float(seconds), row.hardware, calibrated)


def _fsdp(data: Path) -> Iterator[StepCase]:
    for software in ("kernels", fsdp_steps.SOFTWARE):
        rows = [r for r in fsdp_steps.rows(data, software) if software == "kernels" or not r.fitted]
        for row, seconds in zip(rows, fsdp_steps.predict(rows), strict=True):
            yield _case(row, "llm-foundry", float(seconds), load_hardware(fsdp_steps.PROFILES[row.gpu]))
    for own in fsdp_runs.fsdp_runs():
        if fsdp_runs.is_known(own):
            yield _case(own.row, own.row.name.partition(" ")[0], own.seconds, own.row.hardware)


SOURCES = (_single_node, _multi_node, _papers, _named, _fsdp)


@dataclass(frozen=True)
class MadeBand:
    """A half-width, with how many steps of how many releases it is from."""

    error: float
    steps: int
    releases: int


def made(found: Sequence[StepCase]) -> dict[StepKind, MadeBand]:
    """Of kinds with two releases and not few steps, on one node, on many, on either. Then of neighbours: of a style
    and its software on all devices, and of a style on one generation with all software."""
    pools: dict[StepKind, list[StepCase]] = defaultdict(list)
    for case in found:
        either = replace(case.kind, nodes=ANY)
        for pool in (case.kind, either, replace(either, generation=ANY), replace(either, software=ANY)):
            pools[pool].append(case)
    enough = {kind: own for kind, own in pools.items() if len(own) >= FEW}
    bands = {k: _made(own) for k, own in enough.items() if len({case.release for case in own}) >= LEAST_RELEASES}
    return {k: band for k, band in bands.items() if band.error <= UNMEASURED or not _is_beside(k)}


def _is_beside(kind: StepKind) -> bool:
    """Of neighbours, of which a band wider than that of no step at all says nothing."""
    return ANY in (kind.generation, kind.software)


def _made(own: Sequence[StepCase]) -> MadeBand:
    """What the next release stays within: the rank of the widths of those seen, the largest where they are few. Those
    with few steps have the width of all steps together."""
    releases: dict[str, list[float]] = defaultdict(list)
    for case in own:
        releases[case.release].append(case.error)
    groups = [errors for errors in releases.values() if len(errors) >= FEW]
    if len(groups) < len(releases):
        groups.append([case.error for case in own])
    widths = sorted(half_width(np.array(errors)) for errors in groups)
    rank = min(len(widths), math.ceil((len(widths) + 1) * LOW))
    return MadeBand(widths[rank - 1], len(own), len(releases))


@dataclass(frozen=True)
class Judged:
    """How the steps of a kind lie in the bands that steps of other releases make: the share inside, the mean of those
    bands, the mean error; `alone`: the share of steps for which no other release makes a band of any neighbour."""

    kind: StepKind
    steps: int
    releases: int
    inside: float
    width: float
    mean_error: float
    alone: float

    @property
    def keeps_its_word(self) -> bool:
        return self.inside >= LOW


def judged(found: Sequence[StepCase]) -> list[Judged]:
    """One for each kind, a release held out at a time."""
    others = {r: made([case for case in found if case.release != r]) for r in {case.release for case in found}}
    groups: dict[StepKind, list[StepCase]] = defaultdict(list)
    for case in found:
        groups[case.kind].append(case)
    return [_judge(kind, own, others) for kind, own in groups.items()]


def _judge(kind: StepKind, own: Sequence[StepCase], others: Mapping[str, Mapping[StepKind, MadeBand]]) -> Judged:
    bands = [nearest(others[case.release], kind) for case in own]
    widths = np.array([UNMEASURED if band is None else band.error for band in bands])
    errors = np.array([abs(case.error) for case in own])
    alone = float(np.mean([band is None for band in bands]))
    releases = len({case.release for case in own})
    inside = float((errors <= widths).mean())
    return Judged(kind, len(own), releases, inside, float(widths.mean()), float(errors.mean()), alone)


def half_width(errors: np.ndarray) -> float:
    """What most of the next steps stay within, if they are like these of which the errors are given."""
    ranked = np.sort(np.abs(errors))
    rank = math.ceil((len(ranked) + 1) * SHARE)
    width = min([SPREAD * ranked.mean(), *ranked[rank - 1 : rank]])
    return float(np.round(width, 3))


def tables(data: Path) -> list[str]:
    """Kinds with the band that a prediction shows, then those of neighbours."""
    found = cases(data)
    bands, kinds = made(found), judged(found)
    lines = ["| kind | steps | releases | band | inside |", "|---|--:|--:|--:|--:|"]
    without = 0
    for one in kinds:
        band = nearest(bands, one.kind)
        if band is None:
            without += 1
            continue
        share = f"{one.inside:.0%}" if one.keeps_its_word else f"**{one.inside:.0%}**"
        lines.append(f"| {_words(one.kind)} | {one.steps} | {one.releases} | ±{band.error:.0%} | {share} |")
    total = sum(one.steps for one in kinds)
    share = sum(one.inside * one.steps for one in kinds) / total
    return [
        *lines,
        "",
        f"{without} further kinds have no band. {sum(one.keeps_its_word for one in kinds)} of all {len(kinds)} kinds",
        f"hold what they promise: {LOW:.0%} of the steps of a release that they were not made from are inside.",
        f"{share:.0%} of their {total} steps are inside, {np.mean([one.inside for one in kinds]):.0%} of a kind on",
        "average.",
    ]


def _words(kind: StepKind) -> str:
    named = (kind.generation, kind.style, f"`{kind.software}`", f"{kind.nodes} node{'s' * (kind.nodes == 'many')}")
    return ", ".join((*named, *["measured host"] * kind.calibrated))


def text(bands: Mapping[StepKind, MadeBand]) -> str:
    """TOML."""
    lines = [
        "# Half-widths of whole steps by kind, from published steps of two releases or frameworks at least; one of any",
        "# generation or software is of neighbouring kinds. Written by benchmarks/step_bands.py, read by",
        "# autoshard/whole_steps/step_bands.py; how the steps of other releases lie in them is in docs/validation.md.",
        "schema = 1",
    ]
    for kind, own in bands.items():
        lines += [
            "",
            "[[band]]",
            *(f'{key} = "{value}"' for key, value in vars(kind).items() if isinstance(value, str)),
            f"calibrated = {str(kind.calibrated).lower()}",
            f"error = {own.error:.3f}",
            f"steps = {own.steps}",
            f"releases = {own.releases}",
        ]
    return "\n".join([*lines, ""])


TABLES = {
    "Bands of whole steps": tables,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    print("\n".join(tables(options.data)))
    if options.write:
        path = data_folder("costmodels") / "whole_steps" / "bands.toml"
        path.write_text(text(made(cases(options.data))), encoding="utf-8")


if __name__ == "__main__":
    main()
