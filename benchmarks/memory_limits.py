"""Plans within a memory limit: CPU seconds of solving and the proved gap, at parts of what the fastest plan needs.

python -m benchmarks.memory_limits [--only "GPT-2, 12 layers"] [--mesh dp=8,tp=8] [--seconds 60] [--write]

Each model and mesh is a process of its own; capture and formulation are apart.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autoshard import solvers
from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph_json import load, save
from autoshard.ir.mesh import Mesh
from autoshard.solvers.common.solver_options import Clock, Computing, Options
from benchmarks import harness

HARDWARE = "h100-80g-sxm"
MODELS = {entry["name"]: entry for entry in harness.rows_of("planned_models.toml")["memory_limits"]}
MESHES = ("dp=2,tp=4", "dp=8,tp=8", "dp=4,sp=8,tp=8")
HEADER = ("model", "mesh", "limit", "solve s", "sum ms", "gap")
SHARES = (0.95, 0.8, 0.6)  # of the fastest plan's peak


def measure(graph_file: str, mesh: str, limit_seconds: float) -> list[dict[str, Any]]:
    """A row of each limit, in this process; `limit_seconds` of computing are the most for one solve."""

    problem = formulate(PlanningContext(load(graph_file), Mesh.parse(mesh), load_hardware(HARDWARE))).problem
    rows = list[dict[str, Any]]()
    for share in (None, *SHARES):
        started, row = time.process_time(), {"share": share}
        limited = replace(problem, capacity_bytes=share * rows[0]["peak"]) if share else problem
        try:
            solution = solvers.solve(limited, "auto", Options(clock=Clock(limit_seconds, timer=Computing())))
            row |= {"objective": solution.objective, "gap": 1 - solution.lower_bound / solution.objective}
            row["peak"] = solution.peak_bytes
        except InfeasibleError as error:
            row |= {"infeasible": "proved" if error.proven else "not proved"}
        rows.append({**row, "seconds": time.process_time() - started})
    return rows


def lines(model: str, mesh: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    peak = rows[0]["peak"]
    for row in rows:
        limit = f"{peak / 2**30:.2f}, free" if row["share"] is None else f"{100 * row['share']:.0f} %"
        cells = [model, mesh.replace(",", " "), limit, f"{row['seconds']:.1f}"]
        cells += [f"{1e3 * row['objective']:.3f}", f"{row['gap']:.2%}"] if "gap" in row else ["none", row["infeasible"]]
        yield harness.cells(*cells)


def main() -> None:
    parser = harness.options(__doc__, MODELS)
    parser.add_argument("--mesh", choices=MESHES, action="append")
    parser.add_argument("--seconds", type=float, default=60.0, help="of computing, the most for one solve")
    options = parser.parse_args()

    def rows(graph: str) -> Iterator[str]:
        for model in options.only or MODELS:
            save(capture(str(harness.ROOT / MODELS[model]["model"]), MODELS[model]["sizes"], "bf16-mixed"), graph)
            for mesh in options.mesh or MESHES:
                yield from lines(model, mesh, harness.measured("memory_limits", graph, mesh, options.seconds))

    with tempfile.TemporaryDirectory() as folder:
        head = f"At most {options.seconds:.0f} s of computing each; "
        harness.publish(options, "memory_limits", HEADER, rows(f"{folder}/graph.json"), head=head)


if __name__ == "__main__":
    main()
