"""Captures a GPT-3 of 175 billion parameters (96 layers, 12288 wide) on the meta device: seconds and peak memory.

python benchmarks/capture_gpt3.py [--write]      (--write puts the figures into benchmarks/README.md)
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import harness  # noqa: E402

SIZES = {"batch": 1, "sequence": 2048, "n_layer": 96, "n_embd": 12288, "n_head": 96}
LIMIT_SECONDS, LIMIT_GIB = 60.0, 4.0


def measure() -> dict[str, float]:
    """Wall seconds of the capture, imports included, the process's peak resident GiB, and the size of what came out."""
    load = os.getloadavg()[0]
    start = time.perf_counter()
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.graph_json import dumps

    graph = capture(str(ROOT / "examples/gpt2.py:build"), SIZES, "bf16-mixed")
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    parameters = sum(graph.tensor(parameter.tensor).numel for parameter in graph.parameters)
    return {
        "seconds": seconds,
        "GiB": peak,
        "parameters": parameters,
        "ops": len(graph.ops),
        "bytes": len(dumps(graph)),
        "load": load,
    }


def section(figures: dict[str, float]) -> str:
    """The README's section, with the command and the kind of machine."""
    import torch
    import transformers

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return harness.section("capture_gpt3", "Capturing GPT-3 (175B)", [
        "Hugging Face GPT-2 with GPT-3's sizes (96 layers, 12288 wide, 96 heads, sequence 2048, batch 1), bf16-mixed;",
        f"nothing is allocated. One run, imports included; {platform.machine()}, {cores} cores, no accelerator,",
        f"load average {figures['load']:.1f} at the start;",
        f"torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        "| | measured | limit |",
        "|---|--:|--:|",
        f"| wall time | {figures['seconds']:.1f} s | {LIMIT_SECONDS:.0f} s |",
        f"| peak resident memory | {figures['GiB']:.2f} GiB | {LIMIT_GIB:.0f} GiB |",
        f"| parameters | {figures['parameters'] / 1e9:.1f} billion | |",
        f"| operators in the graph | {figures['ops']} | |",
        f"| graph file | {figures['bytes'] / 1e6:.1f} MB | |",
    ])  # fmt: skip


def main() -> int:
    parser = harness.options(__doc__)
    options = parser.parse_args()
    figures = measure()
    print(section(figures))
    if options.write:
        harness.put(section(figures))
    return int(figures["seconds"] > LIMIT_SECONDS or figures["GiB"] > LIMIT_GIB)


if __name__ == "__main__":
    sys.exit(main())
