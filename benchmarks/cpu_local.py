"""Steps of emitted packages, measured and simulated, on this machine: `python -m benchmarks.cpu_local [--write]`.

Calibrates the processor and gloo (`autoshard calibrate`), plans GPT-2 with the profile that this gives, runs every
package in turn, several rounds, each process pinned to a core of its own where there are enough, and compares the
median step with the simulated one.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import ROOT

MODEL = "examples/gpt2.py:build"
SIZES = ["n_layer=4", "n_embd=768", "vocabulary=4096", "batch=8", "sequence=128", "dropout=0.0"]
STEP_LINE = re.compile(r"^step (\d+): .*?, ([\d.]+) ms", re.MULTILINE)
WARM_UP, STEPS, ROUNDS = 2, 6, 4
# The C library keeps the pages that are freed, when measuring and when running: else it takes and clears new ones for
# every large tensor of every step, which no formula knows.
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_TOP_PAD_": str(2**28)}
# Name, mesh, what is asked of the search.
CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("tensor parallel, 2 processes", "dp=1,tp=2", ("--strategy", "megatron")),
    ("data parallel, 2 processes", "dp=2,tp=1", ("--strategy", "megatron")),
    ("search, 2 processes", "dp=1,tp=2", ()),
    ("search, 4 processes", "dp=2,tp=2", ()),
)


@dataclass(frozen=True)
class Measured:
    """Seconds of single steps, all rounds, without the first of each run."""

    name: str
    processes: int
    simulated_seconds: float
    seconds: tuple[float, ...]

    @property
    def row(self) -> str:
        middle = statistics.median(self.seconds)
        low, high = (statistics.quantiles(self.seconds, n=10)[i] for i in (0, -1))
        error = self.simulated_seconds / middle - 1
        spread, simulated = f"{low * 1e3:.0f} to {high * 1e3:.0f}", f"{self.simulated_seconds * 1e3:.0f}"
        return harness.cells(self.name, len(self.seconds), f"{middle * 1e3:.0f}", spread, simulated, f"{error:+.1%}")


def call(*words: str) -> str:
    environment = {**os.environ, **KEEP_PAGES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def autoshard(*words: str) -> str:
    return call(sys.executable, "-m", "autoshard", *words)


def plan(profile: Path, out: Path, mesh: str, wishes: Sequence[str]) -> float:
    """Writes a package; gives the simulated seconds of its step."""
    import json

    words = ["plan", MODEL, "--with", *SIZES, "--mesh", mesh, "--hardware", str(profile), "--out", str(out)]
    made = json.loads(autoshard(*words, *wishes, "--json"))
    return float(made["predicted_seconds"])


def run(out: Path, processes: int) -> list[float]:
    """Seconds of the steps of one run, the first ones left out."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = "taskset -c $((LOCAL_RANK % " + str(len(cores)) + ")) "
    script = f"{pinned}{sys.executable} {out / 'train.py'} --backend gloo --steps {STEPS + WARM_UP}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    printed = call(*torchrun, "--no-python", "bash", "-c", script)
    return [float(ms) * 1e-3 for number, ms in STEP_LINE.findall(printed) if int(number) > WARM_UP]


def measure(folder: Path) -> list[Measured]:
    profile = folder / "machine.toml"
    autoshard("calibrate", "--hardware", "cpu-local", "--processes", "2", "--out", str(profile))
    outs = [folder / f"package{number}" for number in range(len(CASES))]
    simulated = [plan(profile, out, mesh, wishes) for out, (_, mesh, wishes) in zip(outs, CASES, strict=True)]
    counts = [math.prod(int(part.partition("=")[2]) for part in mesh.split(",")) for _, mesh, _ in CASES]
    found: list[list[float]] = [[] for _ in CASES]
    for _ in range(ROUNDS):
        for number, out in enumerate(outs):
            found[number] += run(out, counts[number])
    return [
        Measured(name, count, seconds, tuple(steps))
        for (name, _, _), count, seconds, steps in zip(CASES, counts, simulated, found, strict=True)
    ]


def main() -> None:
    options = harness.options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    header = ("plan", "steps", "measured ms, median", "spread", "simulated ms", "error")
    lines = harness.table(header, (row.row for row in found), 1)
    if options.write:
        harness.put("cpu_local", [harness.machine(), "", *lines])


if __name__ == "__main__":
    main()
