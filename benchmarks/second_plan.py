"""What the next plan of a graph takes, with another memory limit or level: CPU seconds beside those of the first.

python benchmarks/second_plan.py [--only NAME] [--write]

Models, mesh and profile are those of plan_seconds.py. The first plan finds an empty cache and fills it; that of the
model, its capture included, has a cache of its own.
"""

from __future__ import annotations

import argparse
import compileall
import re
import tempfile
from pathlib import Path

from plan_seconds import HARDWARE, ROOT, ROWS, timed

BEGIN, END = "<!-- second_plan: written by the command below -->", "<!-- second_plan end -->"
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
    return "| " + " | ".join(cells) + " |"


def write(text: str) -> None:
    """Replaces this benchmark's section of benchmarks/README.md, or adds it."""
    path = ROOT / "benchmarks" / "README.md"
    old = path.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    path.write_text(pattern.sub(lambda _: text, old) if pattern.search(old) else f"{old.rstrip()}\n\n{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(dict.fromkeys(name for name, *_ in ROWS)), action="append")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    arguments = parser.parse_args()
    compileall.compile_dir(ROOT / "autoshard", quiet=1)  # as plan_seconds.py, as pip does
    lines = []
    for name, model, given, mesh, _ in ROWS:
        if not arguments.only or name in arguments.only:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(line(Path(folder), name, model, given, mesh))
            print(lines[-1], flush=True)
    text = "\n".join([
        BEGIN,
        "## The next plan of a graph",
        "",
        "`python benchmarks/second_plan.py --write`",
        "",
        "CPU seconds of `autoshard plan` of a model and of its saved graph, each with an empty cache, then of the",
        "graph with another limit or level, and their parts of the first two. What is kept depends on neither limit",
        "nor level; a level's own problem is solved each time, and at levels 0 and 1 that is most of what they take.",
        "",
        "| model | mesh | first of the model s | of the graph s | `--memory-limit 70GiB` | `--level 0` | `--level 1` |",
        "|---|---|--:|--:|--:|--:|--:|",
        *lines,
        END,
    ])  # fmt: skip
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
