"""Whole steps of large models searched: CPU seconds and memory of the search, the step, and both gaps.

python -m benchmarks.joint_search [--only gpt3] [--write]

Each case is a process of its own: the model is captured without values, then the search is timed from the graph.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cluster.device_kinds import orders
from autoshard.cluster.hardware import load_hardware
from autoshard.graph_capture.capture import capture
from autoshard.whole_step_search.blocks.block_line import block_line
from autoshard.whole_step_search.config_space import ConfigSpace
from autoshard.whole_step_search.joint_search import joint_search
from benchmarks import harness


@dataclass(frozen=True)
class Case:
    """`most_seconds`: CPU seconds that the search may take."""

    title: str
    model: str
    sizes: dict[str, int]
    hardware: str
    devices: int
    batch: int
    most_seconds: float
    precision: str = "bf16-mixed"


CASES = {key: Case(**entry) for key, entry in harness.rows_of("joint_search.toml").items()}


def measure(name: str) -> dict[str, Any]:
    """In this process."""
    case = CASES[name]
    graph = capture(str(harness.ROOT / case.model), case.sizes, case.precision)
    hardware, line = load_hardware(case.hardware), block_line(graph)
    begun = time.process_time()
    space = ConfigSpace(case.devices, case.batch, len(line.blocks), max(map(len, line.runs())))
    every = [joint_search(graph, variant, space, variant.usable_memory_bytes) for variant in orders(hardware)]
    outcome = replace(min(every, key=lambda result: result.best.seconds), bound=min(result.bound for result in every))
    seconds = time.process_time() - begun
    return {
        "cpu_seconds": seconds,
        "GiB": harness.peak_gib(),
        "choice": f"{outcome.best.problem.choice}{_shares(outcome.best.problem.batch_shares(outcome.best.plan))}",
        "step_seconds": outcome.best.seconds,
        "gap": outcome.gap,
        "considered": outcome.considered,
        "solved": outcome.solved,
        "fronts": outcome.fronts,
    }


def _shares(counts: tuple[int, ...]) -> str:
    return f", {' or '.join(map(str, dict.fromkeys(counts)))} slices a replica" if counts else ""


HEADER = ("case", "search", "memory", "counts", "chosen", "step", "gap")


def row(name: str, figures: dict[str, Any]) -> str:
    case = CASES[name]
    return harness.cells(
        f"{case.title}, batch {case.batch}, {case.devices} x {case.hardware}",
        f"{figures['cpu_seconds']:.0f} s (limit {case.most_seconds:.0f})",
        f"{figures['GiB']:.1f} GiB",
        f"{figures['considered']:,} / {figures['solved']:,} / {figures['fronts']}",
        figures["choice"],
        f"{figures['step_seconds']:.4g} s",
        f"{figures['gap']:.2%}",
    )


def main() -> int:
    options = harness.options(__doc__, tuple(CASES)).parse_args()
    late = False

    def rows() -> Iterator[str]:
        nonlocal late
        for name in options.only or CASES:
            figures = harness.measured("joint_search", name)
            late |= figures["cpu_seconds"] > CASES[name].most_seconds
            yield row(name, figures)

    harness.publish(options, "joint_search", HEADER, rows(), 1)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
