"""What the next plan of a graph takes, with another memory limit or level: CPU seconds beside those of the first.

python benchmarks/second_plan.py [--only NAME] [--write]

Models, mesh and profile are those of plan_seconds.py. The first plan finds an empty cache and fills it.
"""

from __future__ import annotations

import argparse
import compileall
import re
import tempfile
from pathlib import Path

from plan_seconds import HARDWARE, ROOT, ROWS, timed

BEGIN, END = "<!-- second_plan: written by the command below -->", "<!-- second_plan end -->"
SHOWN = [row for row in ROWS if row[3].count(",") < 2]  # on three axes level 1 alone takes minutes
OTHERS = (("--memory-limit", "70GiB"), ("--level", "0"), ("--level", "1"))


def line(folder: Path, name: str, model: str, arguments: dict[str, int], mesh: str) -> str:
    graph = folder / "graph.json"
    given = [f"{key}={value}" for key, value in arguments.items()]
    timed("trace", model, *(["--with", *given] if given else []), "--precision", "bf16-mixed", "-o", str(graph))
    command = ["plan", str(graph), "--mesh", mesh, "--hardware", HARDWARE, "--out", str(folder / "out"), "--json"]
    first, _ = timed(*command, cache=str(folder / "cache"))
    cells = [name, mesh.replace(",", " "), f"{first:.1f}"]
    for other in OTHERS:
        seconds, _ = timed(*command, *other, cache=str(folder / "cache"))
        cells.append(f"{seconds:.1f} ({seconds / first:.0%})")
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
    parser.add_argument("--only", choices=[name for name, *_ in SHOWN], action="append")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    arguments = parser.parse_args()
    compileall.compile_dir(ROOT / "autoshard", quiet=1)  # as plan_seconds.py, as pip does
    lines = []
    for name, model, given, mesh, _ in SHOWN:
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
        "CPU seconds of `autoshard plan` of a saved graph with an empty cache, then of the same command with another",
        "limit or level, and their part of the first. What is kept depends on neither; a level's own problem is solved",
        "each time, and at levels 0 and 1 that is most of what they take.",
        "",
        "| model | mesh | first s | `--memory-limit 70GiB` | `--level 0` | `--level 1` |",
        "|---|---|--:|--:|--:|--:|",
        *lines,
        END,
    ])  # fmt: skip
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
