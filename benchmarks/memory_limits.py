"""Plans within a memory limit: CPU seconds of solving and the proved gap, at parts of what the fastest plan needs.

python benchmarks/memory_limits.py [--only "GPT-2, 12 layers"] [--mesh dp=8,tp=8] [--seconds 60] [--write]

Each model and mesh is a process of its own; capture and formulation are apart. --write puts the rows into the table in
benchmarks/README.md as they come; those of other models and meshes stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- memory_limits: written by the command below -->", "<!-- memory_limits end -->"
HARDWARE = "h100-80g-sxm"
GPT2, LLAMA = str(ROOT / "examples/gpt2.py:build"), str(ROOT / "benchmarks/llama.py:sized")
WIDE = {"hidden": 4096, "inner": 14336, "heads": 32, "heads_of_keys": 8, "words": 128256, "layers": 32, "batch": 16}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    **{
        f"GPT-2, {layers} layers": (GPT2, {"n_layer": layers, "sequence": 1024, "batch": batch})
        for layers, batch in ((12, 4), (48, 64), (96, 64))
    },
    "Llama-8B, 32 layers": (LLAMA, WIDE),
}
MESHES = ("dp=2,tp=4", "dp=8,tp=8", "dp=4,sp=8,tp=8")
SHARES = (0.95, 0.8, 0.6)  # of the fastest plan's peak


def measure(graph_file: str, mesh: str, limit_seconds: float) -> list[dict[str, Any]]:
    """A row of each limit, in this process; `limit_seconds` of computing are the most for one solve."""
    from autoshard import solvers
    from autoshard.cluster.hardware import load_hardware
    from autoshard.errors import InfeasibleError
    from autoshard.formulation.formulate import formulate
    from autoshard.ir.graph_json import load
    from autoshard.ir.mesh import Mesh
    from autoshard.solvers.common.solver_options import Clock, Computing, Options

    def options() -> Options:
        return Options(clock=Clock(limit_seconds, timer=Computing()))

    problem = formulate(load(graph_file), Mesh.parse(mesh), load_hardware(HARDWARE), float("inf")).problem
    started = time.process_time()
    free = solvers.solve(problem, "auto", options())
    first = {"share": None, "seconds": time.process_time() - started, "peak": free.peak_bytes}
    rows = [{**first, "objective": free.objective, "gap": 1 - free.lower_bound / free.objective}]
    for share in SHARES:
        started, row = time.process_time(), {"share": share}
        try:
            found = solvers.solve(replace(problem, capacity_bytes=share * free.peak_bytes), "auto", options())
            row |= {"objective": found.objective, "gap": 1 - found.lower_bound / found.objective}
        except InfeasibleError as error:
            row |= {"infeasible": "proved" if error.proven else "not proved"}
        rows.append({**row, "seconds": time.process_time() - started})
    return rows


def lines(model: str, mesh: str, rows: list[dict[str, Any]]) -> list[str]:
    peak = rows[0]["peak"]
    found = []
    for row in rows:
        limit = f"{peak / 2**30:.2f}, free" if row["share"] is None else f"{100 * row['share']:.0f} %"
        cells = [model, mesh.replace(",", " "), limit, f"{row['seconds']:.1f}"]
        cells += [f"{1e3 * row['objective']:.3f}", f"{row['gap']:.2%}"] if "gap" in row else ["none", row["infeasible"]]
        found.append("| " + " | ".join(cells) + " |")
    return found


def write(text: str) -> None:
    """Replaces this benchmark's section of benchmarks/README.md, or adds it."""
    path = ROOT / "benchmarks" / "README.md"
    old = path.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    path.write_text(pattern.sub(lambda _: text, old) if pattern.search(old) else f"{old.rstrip()}\n\n{text}\n")


def together(new: list[str]) -> list[str]:
    """The rows of the last table with those of `new` in place of the same model's and mesh's."""
    old = (ROOT / "benchmarks" / "README.md").read_text()
    last = re.search(re.escape(BEGIN) + ".*?" + re.escape(END), old, re.DOTALL)
    rows: dict[tuple[str, ...], list[str]] = {}
    for part in (last[0].splitlines() if last else [], new):
        known: dict[tuple[str, ...], list[str]] = {}
        for line in part:
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            if len(cells) == 6 and cells[0] in MODELS:
                known.setdefault(tuple(cells[:2]), []).append(line)
        rows |= known
    order = [(model, mesh.replace(",", " ")) for model in MODELS for mesh in MESHES]
    return [line for key in order for line in rows.get(key, [])]


def section(rows: list[str], seconds: float) -> str:
    """The text of the table, of more runs than one where these measured parts of it."""
    return "\n".join([
        BEGIN,
        "## Plans within a memory limit",
        "",
        "`python benchmarks/memory_limits.py --write`",
        "",
        "CPU seconds of one thread for one solve of the sum of costs by `auto`, at most",
        f"{seconds:.0f} s of computing each; profile {HARDWARE}, bf16-mixed, load average",
        f"{os.getloadavg()[0]:.1f} at the end, which adds to them. *limit*: GiB that the fastest plan needs,",
        "then parts of it. *gap*: proved; where no plan fits, whether that is. Rows of other models and meshes",
        "stand as earlier runs wrote them, at another load and with 30 to 60 s.",
        "",
        "| model | mesh | limit | solve s | sum ms | gap |",
        "|---|---|--:|--:|--:|--:|",
        *rows,
        END,
    ])  # fmt: skip


def captured(folder: Path, model: str) -> Path:
    from autoshard.graph_capture.capture import capture
    from autoshard.ir.graph_json import save

    path = folder / f"{re.sub('[^a-z0-9]+', '-', model.lower())}.json"
    if not path.exists():
        source, sizes = MODELS[model]
        save(capture(source, dict(sizes), precision="bf16-mixed"), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(MODELS), action="append")
    parser.add_argument("--mesh", choices=MESHES, action="append")
    parser.add_argument("--seconds", type=float, default=60.0, help="of computing, the most for one solve")
    parser.add_argument("--graphs", type=Path, help="a folder that keeps captured graphs for the next run")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--measure", nargs=2, metavar=("GRAPH", "MESH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure, arguments.seconds)))
        return
    table: list[str] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.graphs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for model in arguments.only or MODELS:
            for mesh in arguments.mesh or MESHES:
                words = ["--measure", str(captured(folder, model)), mesh, "--seconds", str(arguments.seconds)]
                command = [sys.executable, str(Path(__file__).resolve()), *words]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
                table += lines(model, mesh, json.loads(done.stdout))
                print("\n".join(table[-1 - len(SHARES) :]), flush=True)
                if arguments.write:
                    write(section(together(table), arguments.seconds))


if __name__ == "__main__":
    main()
