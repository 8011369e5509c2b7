"""Whole steps of large models searched: CPU seconds and memory of the search, the step, and both gaps.

python benchmarks/joint_search.py [--only gpt3] [--write]      (--write puts the table into benchmarks/README.md)

Each case is a process of its own: the model is captured without values, then the search is timed from the graph.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import harness  # noqa: E402


@dataclass(frozen=True)
class Case:
    """`most_seconds`: CPU seconds that the search may take."""

    title: str
    model: str
    sizes: tuple[tuple[str, int], ...]
    hardware: str
    devices: int
    batch: int
    most_seconds: float
    precision: str = "bf16-mixed"


def on_both(hardware: str, devices: int, most_seconds: float) -> Case:
    """Of two kinds of devices, which one or both have."""
    sizes = (("batch", 4), ("sequence", 1024), ("layers", 32), ("hidden", 2560), ("inner", 6912), ("heads", 20),
             ("heads_of_keys", 20))  # fmt: skip
    return Case("Llama 3B, sequence 1024", LLAMA, sizes, hardware, devices, 512, most_seconds, "fp16-mixed")


GPT, LLAMA = "examples/gpt2.py:build", "benchmarks/llama.py:sized"
CASES = {
    "gpt3": Case(
        "GPT-3 175B, sequence 2048", GPT,
        (("batch", 4), ("sequence", 2048), ("n_layer", 96), ("n_embd", 12288), ("n_head", 96)),
        "a100-80g-sxm", 1024, 1536, 60.0,
    ),
    "llama-70b": Case(
        "Llama 70B, sequence 4096", LLAMA,
        (("batch", 4), ("sequence", 4096), ("layers", 80), ("hidden", 8192), ("inner", 28672), ("heads", 64),
         ("heads_of_keys", 8)),
        "h100-80g-sxm", 256, 1024, 60.0,
    ),
    "1t": Case(
        "GPT 1T, sequence 2048", GPT,
        (("batch", 4), ("sequence", 2048), ("n_layer", 128), ("n_embd", 25600), ("n_head", 160)),
        "a100-80g-sxm", 3072, 3072, 120.0,
    ),
    "both": on_both("a100-80g-sxm:8,v100-32g-sxm2:8", 16, 120.0),
    "a100": on_both("a100-80g-sxm", 8, 60.0),
    "v100": on_both("v100-32g-sxm2", 8, 60.0),
    "as-v100": on_both("v100-32g-sxm2", 16, 60.0),
}  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """In this process."""
    from autoshard.cluster.device_kinds import orders
    from autoshard.cluster.hardware import load_hardware
    from autoshard.graph_capture.capture import capture
    from autoshard.joint.blocks.block_line import block_line
    from autoshard.joint.joint_search import joint_search
    from autoshard.joint.outer_space import OuterSpace

    case = CASES[name]
    graph = capture(str(ROOT / case.model), dict(case.sizes), case.precision)
    hardware, line = load_hardware(case.hardware), block_line(graph)
    begun = time.process_time()
    space = OuterSpace(case.devices, case.batch, len(line.blocks), max(map(len, line.runs())))
    every = [joint_search(graph, own, space, own.usable_memory_bytes) for own in orders(hardware)]
    found = replace(min(every, key=lambda own: own.best.seconds), bound_seconds=min(own.bound_seconds for own in every))
    seconds = time.process_time() - begun
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return {
        "cpu_seconds": seconds,
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit,
        "choice": f"{found.best.problem.choice}{_shares(found.best.problem.batch_shares(found.best.plan))}",
        "step_seconds": found.best.seconds,
        "gap": found.gap,
        "model_gap": found.model_gap,
        "considered": found.considered,
        "solved": found.solved,
        "fronts": found.fronts,
    }


def _shares(counts: tuple[int, ...]) -> str:
    return f", {' or '.join(map(str, dict.fromkeys(counts)))} slices a replica" if counts else ""


def row(name: str, made: dict[str, Any]) -> str:
    case = CASES[name]
    return (
        f"| {case.title}, batch {case.batch}, {case.devices} x {case.hardware} | {made['cpu_seconds']:.0f} s "
        f"(limit {case.most_seconds:.0f}) | {made['GiB']:.1f} GiB | {made['considered']:,} / {made['solved']:,} / "
        f"{made['fronts']} | {made['choice']} | {made['step_seconds']:.4g} s | {made['gap']:.2%} | "
        f"{made['model_gap']:.2%} |"
    )


def section(rows: list[str]) -> str:
    return harness.section("joint_search", "Whole steps searched", [
        "CPU seconds of the search after capture, one thread; the process's peak memory, capture included. Counts:",
        "outer choices with a split of the blocks, those solved exactly, searches of a split. The first gap is of the",
        "simulated step to the bound on any order of undivided forwards and backwards that fits the memory, the",
        "second of the form $T$ to the least possible; both are of the costs of blocks. Other work on the machine adds",
        "to CPU seconds. The last four rows: two kinds of devices together, each alone, and as many of the slower.",
        f"{platform.machine()}, no accelerator.",
        "",
        "| case | search | memory | counts | chosen | step | gap | gap of the form |",
        "|---|--:|--:|--:|---|--:|--:|--:|",
        *rows,
    ])  # fmt: skip


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    rows, late = [], False
    for name in [options.only] if options.only else CASES:
        made = harness.measured(__file__, name)
        late |= made["cpu_seconds"] > CASES[name].most_seconds
        rows.append(row(name, made))
        print(rows[-1], flush=True)
    if options.write:
        harness.put(section(rows))
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
