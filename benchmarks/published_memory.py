"""Published runs that ran must fit: `python -m benchmarks.published_memory --data DIR`.

Every row of every table of measured steps, its bytes as `autoshard estimate` has them beside what the device's profile
lets be used. Exit status 1 where a row that ran is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.estimate.stage_memory import StageMemory
from autoshard.estimate.step_bound import fullest, program_of
from autoshard.estimate.transformer import TrainingRun, Transformer, check
from benchmarks import bloom_steps, cluster_steps, float8_steps, fsdp_runs, fsdp_steps, published, recipe_steps, steps
from benchmarks.steps import NamedRow

Run = tuple[str, Transformer, TrainingRun, Hardware]


def runs(data: Path) -> Iterator[tuple[str, list[Run]]]:
    """(table, its runs that ran)."""
    for title, rows in (
        ("NVIDIA's recipes", [row for row, _ in recipe_steps.nvidia(data)]),
        ("MindSpeed-LLM 1.0.RC3, 910B", [row for row, _ in recipe_steps.mindspeed(data)]),
        ("MindSpeed-LLM 1.0.RC1, MindFormers", cluster_steps.ascend()),
        ("Megatron-Core on B200", cluster_steps.b200(data)),
        ("Megatron-Core on H100", cluster_steps.megatron_core()),
        ("BLOOM's plans", [row for row, _, full in bloom_steps.bloom(data) if not full]),
        ("torchtitan and fms-fsdp", [_again(own.row, own.again) for own in fsdp_runs.fsdp_runs()]),
        ("torchtitan in float8", [_again(row, again) for row, again in float8_steps.torchtitan()]),
    ):
        yield title, [(row.name, row.model, row.run, row.hardware) for row in rows]
    mpt = fsdp_steps.rows(data)
    yield "MPT by FSDP", [(r.name, r.model, r.run, load_hardware(fsdp_steps.PROFILES[r.gpu])) for r in mpt]
    a100 = load_hardware("a100-80g-sxm")
    megatron = [*steps.single_rows(data), *published.megatron_rows()]
    yield "Megatron-LM on A100", [(f"{r.model.hidden} wide", r.model, r.run, a100) for r in megatron]


def _again(row: NamedRow, again: str) -> NamedRow:
    """Half of the layers computed again lies between none and all: all is what is known to fit."""
    return replace(row, run=replace(row.run, recompute="full" if again == "half" else again))  # type: ignore[arg-type]


def memory_of(run: Run) -> StageMemory:
    """Of the fullest device."""
    _, model, own, hardware = run
    check(model, own)
    return fullest(model, own, program_of(model, own, hardware))


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
        shares = [memory.peak / run[3].usable_memory_bytes for run, memory in held]
        refused = [(run, s) for (run, memory), s in zip(held, shares, strict=True) if not memory.fits(run[3])]
        lines.append(f"| {title} | {len(own)} | {len(refused)} | {max(shares):.0%} |")
        told += [f"{title}: {_words(run)} {share:.1%}" for run, share in refused]
    return [*lines, "", f"Refused: {'; '.join(told) if told else 'none'}."]


def _words(run: Run) -> str:
    name, _, own, _ = run
    return f"{name}, micro-batch {own.micro_batch}, dp {own.dp} tp {own.tp} pp {own.pp} cp {own.cp}"


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
