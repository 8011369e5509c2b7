"""What the next plan of a graph takes, with another memory limit or level: CPU seconds beside those of the first.

python benchmarks/second_plan.py [--only NAME] [--write]

Models, mesh and profile are those of plan_seconds.py. The first plan finds an empty cache and fills it; that of the
model, its capture included, has a cache of its own.
"""

from __future__ import annotations

import compileall
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import harness
from benchmarks.plan_seconds import HARDWARE, ROWS, timed

OTHERS = (("--memory-limit", "70GiB"), ("--level", "0"), ("--level", "1"))


def line(folder: Path, name: str, model: str, arguments: dict[str, int], mesh: str) -> str:
    graph = folder / "graph.json"
    given = [f"{key}={value}" for key, value in arguments.items()]
    asked = [model, *(["--with", *given] if given else []), "--precision", "bf16-mixed"]
    timed("trace", *asked, "-o", str(graph))
    rest = ["--mesh", mesh, "--hardware", HARDWARE, "--out", str(folder / "out"), "--json"]
    whole, _ = timed("plan", *asked, *rest, cache=str(folder / "another"))
    first, _ = timed("plan", str(graph), *rest, cache=str(folder / "cache"))
    cells = [name, mesh.replace(",", " "), f"{whole:.1f}", f"{first:.1f}"]
    for other in OTHERS:
        seconds, _ = timed("plan", str(graph), *rest, *other, cache=str(folder / "cache"))
        cells.append(f"{seconds:.1f} ({seconds / whole:.0%}, {seconds / first:.0%})")
        print(cells, flush=True)
    return harness.cells(*cells)


def main() -> None:
    parser = harness.options(__doc__, [name for name, *_ in ROWS])
    arguments = parser.parse_args()
    compileall.compile_dir(harness.ROOT / "autoshard", quiet=1)  # as plan_seconds.py, as pip does
    lines = []
    for name, model, given, mesh, _ in ROWS:
        if not arguments.only or name in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(line(Path(folder), name, model, given, mesh))
            print(lines[-1], flush=True)
    text = harness.section("second_plan", "The next plan of a graph", [
        "CPU seconds of `autoshard plan` of a model and of its saved graph, each with an empty cache, then of the",
        "graph with another limit or level, and their parts of the first two. What is kept depends on neither limit",
        "nor level; a level's own problem is solved each time, and at levels 0 and 1 that is most of what they take.",
        "",
        "| model | mesh | first of the model s | of the graph s | `--memory-limit 70GiB` | `--level 0` | `--level 1` |",
        "|---|---|--:|--:|--:|--:|--:|",
        *lines,
    ])  # fmt: skip
    if arguments.write:
        harness.put(text)


if __name__ == "__main__":
    main()
