"""Captures a GPT-3 of 175 billion parameters (96 layers, 12288 wide) on the meta device: seconds and peak memory.

python benchmarks/capture_gpt3.py [--write]      (--write puts the figures into benchmarks/README.md)
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"batch": 1, "sequence": 2048, "n_layer": 96, "n_embd": 12288, "n_head": 96}
LIMIT_SECONDS, LIMIT_GIB = 60.0, 4.0
BEGIN, END = "<!-- capture_gpt3: written by the command below -->", "<!-- capture_gpt3 end -->"


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
    return "\n".join([
        BEGIN,
        "## Capturing GPT-3 (175B)",
        "",
        "`python benchmarks/capture_gpt3.py --write`",
        "",
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
        END,
    ])  # fmt: skip


def write(text: str) -> None:
    """Replaces this benchmark's section of benchmarks/README.md, or adds it."""
    path = ROOT / "benchmarks" / "README.md"
    old = path.read_text() if path.exists() else "# Benchmarks\n"
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    path.write_text(pattern.sub(lambda _: text, old) if pattern.search(old) else f"{old.rstrip()}\n\n{text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="put the figures into benchmarks/README.md")
    options = parser.parse_args()
    figures = measure()
    print(section(figures))
    if options.write:
        write(section(figures))
    return int(figures["seconds"] > LIMIT_SECONDS or figures["GiB"] > LIMIT_GIB)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
