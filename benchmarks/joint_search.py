"""Whole steps of large models searched: CPU seconds and memory of the search, the step, and both gaps.

python -m benchmarks.joint_search [--only gpt3] [--write]

Each case is a process of its own: the model is captured without values, then the search is timed from the graph.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import harness
from benchmarks.harness import GPT2, LLAMA


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


CASES = {
    "gpt3": Case(
        "GPT-3 175B, sequence 2048", GPT2,
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
        "GPT 1T, sequence 2048", GPT2,
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
    from autoshard.joint.config_space import ConfigSpace
    from autoshard.joint.joint_search import joint_search

    case = CASES[name]
    graph = capture(case.model, dict(case.sizes), case.precision)
    hardware, line = load_hardware(case.hardware), block_line(graph)
    begun = time.process_time()
    space = ConfigSpace(case.devices, case.batch, len(line.blocks), max(map(len, line.runs())))
    every = [joint_search(graph, own, space, own.usable_memory_bytes) for own in orders(hardware)]
    found = replace(min(every, key=lambda own: own.best.seconds), bound_seconds=min(own.bound_seconds for own in every))
    seconds = time.process_time() - begun
    return {
        "cpu_seconds": seconds,
        "GiB": harness.peak_gib(),
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


HEADER = ("case", "search", "memory", "counts", "chosen", "step", "gap", "gap of the form")


def row(name: str, made: dict[str, Any]) -> str:
    case = CASES[name]
    return harness.cells(
        f"{case.title}, batch {case.batch}, {case.devices} x {case.hardware}",
        f"{made['cpu_seconds']:.0f} s (limit {case.most_seconds:.0f})",
        f"{made['GiB']:.1f} GiB",
        f"{made['considered']:,} / {made['solved']:,} / {made['fronts']}",
        made["choice"],
        f"{made['step_seconds']:.4g} s",
        f"{made['gap']:.2%}",
        f"{made['model_gap']:.2%}",
    )


def main() -> int:
    parser = harness.options(__doc__, tuple(CASES))
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    late = False

    def rows() -> Iterator[str]:
        nonlocal late
        for name in options.only or CASES:
            made = harness.measured("joint_search", name)
            late |= made["cpu_seconds"] > CASES[name].most_seconds
            yield row(name, made)

    lines = harness.table(HEADER, rows(), 1)
    if options.write:
        harness.put("joint_search", [harness.machine(), "", *lines])
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
