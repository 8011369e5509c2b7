"""Published runs that ran must fit: `python -m benchmarks.published_memory --data DIR`.

Every row of every table of measured steps, its bytes as `autoshard estimate` has them beside what the device's profile
lets be used. Exit status 1 where a row that ran is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from autoshard.estimate.stage_memory import StageMemory
from autoshard.estimate.step_bound import fullest, program_of
from autoshard.estimate.transformer import check
from benchmarks.published_rows import (
    Step,
    ascend,
    b200,
    bloom,
    fsdp_runs,
    mindspeed,
    mpt,
    nvidia,
    published,
    single_rows,
)
from benchmarks.steps import both_ways


def runs(data: Path) -> Iterator[tuple[str, list[Step]]]:
    """(table, its runs that ran). Half of the layers computed again lies between none and all: all is what is known to
    fit."""
    for title, rows in (
        ("NVIDIA's recipes", nvidia(data)),
        ("MindSpeed-LLM 1.0.RC3, 910B", mindspeed(data)),
        ("MindSpeed-LLM 1.0.RC1, MindFormers", ascend()),
        ("Megatron-Core on B200", b200(data)),
        ("Megatron-Core on H100", published("megatron_core")),
        ("BLOOM's plans", [row for row in bloom(data) if not row.full]),
        ("torchtitan and fms-fsdp", [both_ways(row)[-1] for row in fsdp_runs()]),
        ("torchtitan in float8", published("float8")),
        ("MPT by FSDP", mpt(data)),
        ("Megatron-LM on A100", [*single_rows(data), *published("scaling"), *published("selective")]),
    ):
        yield title, list(rows)


def memory_of(row: Step) -> StageMemory:
    """Of the fullest device."""
    check(row.model, row.run)
    return fullest(row.model, row.run, program_of(row.model, row.run, row.hardware))


def tables(data: Path) -> list[str]:
    lines, told = [
        "## Published runs that ran fit",
        "",
        "Each row's memory as `estimate` has it, beside what its profile lets be used. All of them ran.",
        "",
        "| table | rows | refused | fullest, share of what may be used |",
        "|---|--:|--:|--:|",
    ], []  # fmt: skip
    for title, own in runs(data):
        held = [(run, memory_of(run)) for run in own]
        shares = [memory.peak / run.hardware.usable_memory_bytes for run, memory in held]
        refused = [(run, s) for (run, memory), s in zip(held, shares, strict=True) if not memory.fits(run.hardware)]
        lines.append(f"| {title} | {len(own)} | {len(refused)} | {max(shares):.0%} |")
        told += [f"{title}: {_words(run)} {share:.1%}" for run, share in refused]
    return [*lines, "", f"Refused: {'; '.join(told) if told else 'none'}."]


def _words(row: Step) -> str:
    own = row.run
    return f"{row.name}, micro-batch {own.micro_batch}, dp {own.dp} tp {own.tp} pp {own.pp} cp {own.cp}"


def refused(lines: Sequence[str]) -> bool:
    return not lines[-1].endswith("none.")


TABLES = (tables,)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    lines = tables(parser.parse_args().data)
    print("\n".join(lines))
    return int(refused(lines))


if __name__ == "__main__":
    sys.exit(main())
