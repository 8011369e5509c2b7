"""Captures a GPT-3 of 175 billion parameters (96 layers, 12288 wide) on the meta device: seconds and peak memory.

python -m benchmarks.capture_gpt3 [--write]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from benchmarks import harness

SIZES = {"batch": 1, "sequence": 2048, "n_layer": 96, "n_embd": 12288, "n_head": 96}
LIMIT_SECONDS, LIMIT_GIB = 60.0, 4.0


def measure() -> dict[str, float]:
    """Wall seconds of the capture, imports included, the process's peak resident GiB, and the size of what came out."""
    start = time.perf_counter()
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.graph_json import dumps

    graph = capture(harness.GPT2, SIZES, "bf16-mixed")
    seconds, peak = time.perf_counter() - start, harness.peak_gib()
    billions = sum(graph.tensor(parameter.tensor).numel for parameter in graph.parameters) / 1e9
    return {"seconds": seconds, "GiB": peak, "billions": billions, "ops": len(graph.ops), "MB": len(dumps(graph)) / 1e6}


def rows(found: dict[str, float]) -> Iterator[str]:
    yield harness.cells("wall time", f"{found['seconds']:.1f} s", f"{LIMIT_SECONDS:.0f} s")
    yield harness.cells("peak resident memory", f"{found['GiB']:.2f} GiB", f"{LIMIT_GIB:.0f} GiB")
    yield harness.cells("parameters", f"{found['billions']:.1f} billion", "")
    yield harness.cells("operators in the graph", f"{found['ops']:.0f}", "")
    yield harness.cells("graph file", f"{found['MB']:.1f} MB", "")


def main() -> int:
    options = harness.options(__doc__).parse_args()
    found = measure()
    lines = harness.table(("", "measured", "limit"), rows(found), 1)
    if options.write:
        import torch
        import transformers

        versions = f"torch {torch.__version__}, transformers {transformers.__version__}."
        harness.put("capture_gpt3", [f"{harness.machine()[:-1]}; {versions}", "", *lines])
    return int(found["seconds"] > LIMIT_SECONDS or found["GiB"] > LIMIT_GIB)


if __name__ == "__main__":
    sys.exit(main())
