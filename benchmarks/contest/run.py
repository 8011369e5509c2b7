"""The ASPLOS 2025 contest on intra-operator parallelism: `python -m benchmarks.contest.run FOLDER [NAMES]`.

FOLDER (or the environment variable IOPDDL) holds asplos-2025-iopddl-NAME.json.gz and a README.md with a table whose
first columns are instance, nodes, choices, edges, published best cost and proven lower bound. Every instance is solved
in its own process, reading included, within --seconds of wall time (with --cpu: of this process's own time, for a
machine that others use too). Nothing of the data is kept here.

The solver of this folder is for such problems alone: each value has one reader, tens of thousands of nodes, a memory
limit that nearly binds. No model needs it, so it is not part of autoshard.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from autoshard.errors import UserError
from autoshard.ir.problem import memory, objective
from autoshard.solvers import Clock
from autoshard.solvers.common.solver_options import Computing, interruptible
from benchmarks import harness
from benchmarks.contest import asplos_format
from benchmarks.contest.anytime import search

HEADER = (
    "instance", "nodes", "choices", "edges", "cost", "/ published", "bound", "gap proved", "wall s", "CPU s", "GiB",
)  # fmt: skip
_SPARE = 2.0  # seconds for writing the answer down and checking it


def published(folder: Path) -> dict[str, float]:
    """Instance -> published best cost, from the table of the folder's README."""
    text = (folder / "README.md").read_text()
    matches = re.findall(r"^\|\s*(\w+)\s*\|\s*[\d,]+\s*\|[^|]*\|[^|]*\|\s*([\d,]+)[^|]*\|", text, re.MULTILINE)
    return {name: float(cost.replace(",", "")) for name, cost in matches}


def measure(path: str, name: str, best: float | None, seconds: float, cpu: bool) -> str:
    """The row of an instance that is solved in this process."""
    timer = Computing() if cpu else time.perf_counter
    wall, clock = time.perf_counter(), Clock(seconds - _SPARE, timer=timer)
    try:
        problem = asplos_format.read(path)
        with interruptible(clock):
            solution = search(problem, clock)
    except UserError as error:
        return f"| {name} | {error.message} |"
    taken = time.perf_counter() - wall
    assert solution.objective == objective(problem, solution.choice), "the cost is not that of the choices"
    assert memory(problem, solution.choice).max() <= problem.capacity_bytes, "the plan does not fit"
    return harness.cells(
        name,
        f"{len(problem.nodes):,}",
        f"{sum(len(node.seconds) for node in problem.nodes):,}",
        f"{len(problem.values):,}",
        f"{solution.objective:,.0f}",
        f"{solution.objective / best:.5f}" if best else "",
        f"{solution.lower_bound:,.0f}",
        f"{solution.objective / solution.lower_bound - 1:.2%}" if solution.lower_bound > 0 else "none",
        f"{taken:.1f}",
        f"{time.process_time():.1f}",
        f"{harness.peak_gib():.2f}",
    )


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=os.environ.get("IOPDDL"))
    parser.add_argument("names", nargs="*", help="instances, all by default")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds instead of wall time")
    options = parser.parse_args()
    if options.folder is None:
        parser.error("name the folder of the instances, or set IOPDDL")
    paths = {path.name.split(".")[0].split("-")[-1]: path for path in sorted(options.folder.glob("*iopddl-*.json*"))}
    names = options.names or list(paths)
    if unknown := [name for name in names if name not in paths]:
        parser.error(f"no instance {', '.join(unknown)} in {options.folder}: there are {', '.join(paths) or 'none'}")
    best = published(options.folder)
    requests = ((str(paths[name]), name, best.get(name), options.seconds, options.cpu) for name in names)
    lines = (harness.measured("contest.run", *request) for request in requests)
    limit = f"At most {options.seconds:g} s of {'CPU' if options.cpu else 'wall'} time each, reading included; "
    harness.publish(options, "contest", HEADER, lines, 1, head=limit)


if __name__ == "__main__":
    main()
