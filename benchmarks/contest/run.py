"""The ASPLOS 2025 contest on intra-operator parallelism: `python -m benchmarks.contest.run FOLDER [NAMES]`.

FOLDER (or the environment variable IOPDDL) holds asplos-2025-iopddl-NAME.json.gz and a README.md with a table whose
first columns are instance, nodes, choices, edges, published best cost and proven lower bound. Every instance is solved
in its own process, reading included, within --seconds of wall time (with --cpu: of this process's own time, for a
machine that others use too). Nothing of the data is kept here.

The solver of this folder is for such problems alone: each value has one reader, tens of thousands of nodes, a memory
limit that nearly binds. No model needs it, so it is not part of autoshard.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autoshard.errors import UserError
from autoshard.ir.problem import memory, objective
from autoshard.solvers import Clock, Options, solve
from autoshard.solvers.common.solver_options import Computing, interruptible
from benchmarks import harness
from benchmarks.contest import asplos_format
from benchmarks.contest.anytime import contested

HEADER = (
    "instance",
    "nodes",
    "choices",
    "edges",
    "cost",
    "/ published",
    "bound",
    "gap proved",
    "wall s",
    "CPU s",
    "GiB",
)
_SPARE = 2.0  # seconds for writing the answer down and checking it


def published(folder: Path) -> dict[str, float]:
    """Instance -> published best cost, from the table of the folder's README."""
    best = {}
    for line in (folder / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) >= 6 and re.fullmatch(r"[\d,]+", cells[1]):
            found = re.match(r"[\d,]+", cells[4])
            if found:
                best[cells[0]] = float(found[0].replace(",", ""))
    return best


def row(path: Path, name: str, best: float | None, seconds: float, cpu: bool, solver: str) -> str:
    wall, clock = time.perf_counter(), Clock(seconds - _SPARE, timer=Computing() if cpu else time.perf_counter)
    problem = asplos_format.read(path)
    with interruptible(clock):
        found = contested(problem, clock) if solver == "contest" else solve(problem, solver, Options(clock=clock))
    taken = time.perf_counter() - wall
    assert found.objective == objective(problem, found.choice), "the cost is not that of the choices"
    assert memory(problem, found.choice).max() <= problem.capacity_bytes, "the plan does not fit"
    return harness.cells(
        name,
        f"{len(problem.nodes):,}",
        f"{sum(len(node.seconds) for node in problem.nodes):,}",
        f"{len(problem.values):,}",
        f"{found.objective:,.0f}",
        f"{found.objective / best:.5f}" if best else "",
        f"{found.lower_bound:,.0f}",
        f"{found.objective / found.lower_bound - 1:.2%}" if found.lower_bound > 0 else "none",
        f"{taken:.1f}",
        f"{time.process_time():.1f}",
        f"{harness.peak_gib():.2f}",
    )


def report(back: Connection, *given: Any) -> None:
    """The body of a process."""
    try:
        line = row(*given)
    except UserError as error:
        line = f"| {given[1]} | {error.message} |"
    back.send(line)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=os.environ.get("IOPDDL"))
    parser.add_argument("names", nargs="*", help="instances, all by default")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds instead of wall time")
    parser.add_argument("--solver", default="contest", help="or one of autoshard's own")
    arguments = parser.parse_args()
    if arguments.folder is None:
        parser.error("name the folder of the instances, or set IOPDDL")
    best = published(arguments.folder)
    paths = {path.name.split(".")[0].split("-")[-1]: path for path in sorted(arguments.folder.glob("*iopddl-*.json*"))}
    names = arguments.names or list(paths)
    unknown = [name for name in names if name not in paths]
    if unknown:
        parser.error(f"no instance {', '.join(unknown)} in {arguments.folder}: there are {', '.join(paths) or 'none'}")
    fresh = multiprocessing.get_context("spawn")

    def rows() -> Iterator[str]:
        for name in names:
            here, there = fresh.Pipe(duplex=False)
            given = (paths[name], name, best.get(name), arguments.seconds, arguments.cpu, arguments.solver)
            process = fresh.Process(target=report, args=(there, *given))
            process.start()
            process.join()
            yield here.recv() if here.poll() else f"| {name} | ended with {process.exitcode} |"

    limit = f"At most {arguments.seconds:g} s of {'CPU' if arguments.cpu else 'wall'} time each, reading included; "
    harness.publish(arguments, "contest", HEADER, rows(), 1, head=limit)


if __name__ == "__main__":
    main()
