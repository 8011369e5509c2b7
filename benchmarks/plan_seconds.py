"""What a user waits for: CPU seconds of `autoshard plan` from a saved graph to the package, and how near its bound is.

python benchmarks/plan_seconds.py [--only NAME] [--write]

Each command is a process of its own, of modules that are compiled as pip does when it installs; tracing the model is
apart. --write puts the table into benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- plan_seconds: written by the command below -->", "<!-- plan_seconds end -->"
HARDWARE = "h100-80g-sxm"
GPT2, LLAMA = str(ROOT / "examples/gpt2.py:build"), str(ROOT / "benchmarks/llama.py:sized")
WIDE = {"hidden": 4096, "inner": 14336, "heads": 32, "heads_of_keys": 8, "words": 128256, "layers": 32, "batch": 16}
# name, model, its arguments, mesh, the most CPU seconds beyond `autoshard trace`
ROWS: tuple[tuple[str, str, dict[str, int], str, float], ...] = (
    ("GPT-2, 12 layers", GPT2, {"sequence": 1024}, "dp=2,tp=4", 2.5),
    ("Llama, 12 layers of 1024", LLAMA, {}, "dp=2,tp=4", 6.0),
    ("Llama-8B, 32 layers", LLAMA, WIDE, "dp=8,tp=8", 10.0),
    ("Llama-8B on three axes", LLAMA, WIDE, "dp=4,sp=8,tp=8", 30.0),
)


def timed(*words: str, cache: str = "off") -> tuple[float, str]:
    """CPU seconds of an autoshard command, and what it printed. `cache`: the folder of what searches found."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "AUTOSHARD_CACHE": cache}
    command = [sys.executable, "-m", "autoshard", *words]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def line(folder: Path, name: str, model: str, arguments: dict[str, int], mesh: str, limit: float) -> str:
    graph, out = folder / "graph.json", folder / "out"
    given = [f"{key}={value}" for key, value in arguments.items()]
    with_ = ["--with", *given] if given else []
    trace, _ = timed("trace", model, *with_, "--precision", "bf16-mixed", "-o", str(graph))
    plan, printed = timed("plan", str(graph), "--mesh", mesh, "--hardware", HARDWARE, "--out", str(out), "--json")
    found = json.loads(printed)
    step, bound = 1e3 * found["predicted_seconds"], 1e3 * found["level_bound"]
    cells = [name, mesh.replace(",", " "), f"{trace:.1f}", f"{plan:.1f}", f"{limit:.1f}"]
    return "| " + " | ".join([*cells, f"{step:.2f}", f"{bound:.2f}", f"{1 - bound / step:.1%}"]) + " |"


def write(text: str) -> None:
    """Replaces this benchmark's section of benchmarks/README.md, or adds it."""
    path = ROOT / "benchmarks" / "README.md"
    old = path.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    path.write_text(pattern.sub(lambda _: text, old) if pattern.search(old) else f"{old.rstrip()}\n\n{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[name for name, *_ in ROWS], action="append")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    arguments = parser.parse_args()
    compileall.compile_dir(ROOT / "autoshard", quiet=1)
    lines = []
    for row in ROWS:
        if not arguments.only or row[0] in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(line(Path(folder), *row))
            print(lines[-1], flush=True)
    text = "\n".join([
        BEGIN,
        "## The whole command",
        "",
        "`python benchmarks/plan_seconds.py --write`",
        "",
        "CPU seconds of one thread: `autoshard trace`, and `autoshard plan` of the saved graph to the written package;",
        "autoshard's modules are compiled beforehand, as pip does when it installs.",
        f"Profile {HARDWARE}, bf16-mixed, load average {os.getloadavg()[0]:.1f} at the end, which adds to them.",
        "*bar*: the most that a plan should take. The step is simulated; no plan's step is below *bound*.",
        "",
        "| model | mesh | trace s | plan s | bar s | step ms | bound ms | gap |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
        *lines,
        END,
    ])  # fmt: skip
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
