"""Plans of the same modules by autoshard and by meta-pytorch/autoparallel, each priced by both cost models.

python benchmarks/beside_autoparallel.py CHECKOUT [--only NAME] [--keep FOLDER] [--state TEXT] [--write]

CHECKOUT: a folder with github.com/meta-pytorch/autoparallel (BSD), of a commit that runs with the torch that is
installed; its planner needs `pip install pulp`. No code of it is here. It plans on fake devices of this machine, which
takes minutes a module. --keep: what it found is kept in that folder, and taken from there where it is there. --state:
how the page names the commit. --write puts the tables into benchmarks/README.md.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.formulate import formulate
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import load
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_json import load as load_plan
from autoshard.ir.problem import objective
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.solvers import Options, solve
from autoshard.solvers.common.solver_options import Clock, Computing
from benchmarks import harness
from benchmarks.autoparallel_carried import Carried, as_choices, as_pins, everything, matched
from benchmarks.autoparallel_mapping import Theirs, in_layer
from benchmarks.harness import GPT2, LLAMA, LLAMA_8B, ROOT
from benchmarks.plan_seconds import HARDWARE, timed

BEGIN, END = "<!-- beside_autoparallel: written by the command below -->", "<!-- beside_autoparallel end -->"
ROWS: tuple[tuple[str, str, dict[str, int], str], ...] = (
    ("GPT-2, 12 layers", GPT2, {"sequence": 1024}, "dp=2,tp=4"),
    ("Llama, 12 layers of 1024", LLAMA, {}, "dp=2,tp=4"),
    ("Llama-8B, 32 layers", LLAMA, LLAMA_8B, "dp=8,tp=8"),
)
LONGEST = 60.0  # CPU seconds of one solve of autoparallel's problem
PRICED_BY = ("autoparallel", "autoparallel", "autoshard")  # whose layers a column is shown of: the other tool's
SHOWN = 5e-4  # of a sum: a gap that is told
NO_CHECKOUT = "no checkout of github.com/meta-pytorch/autoparallel in {}: clone it, and name its folder"


@dataclass(frozen=True)
class Price:
    """Of a plan, in seconds: the simulated step and the sum that its solver minimises, by autoshard; the least sum of
    the plans that agree with it, by autoparallel, and a bound on that."""

    step: float
    additive: float
    theirs: float
    theirs_bound: float


@dataclass(frozen=True)
class Compared:
    """One module. `plans`: of both tools, and of both with only the layers carried over, each priced by both models.
    `seconds`: of CPU, (trace, plan) of each tool. `whole`: the least of autoparallel's own problem, no layer folded, by
    autoshard's solver: its sum, the bound, and CPU seconds."""

    plans: tuple[tuple[str, Price], ...]
    to_ours: Carried
    to_theirs: Carried
    seconds: tuple[tuple[float, float], tuple[float, float]]
    whole: tuple[float, float, float]


def compared(checkout: Path, kept: Path, name: str, model: str, given: dict[str, int], mesh_text: str) -> Compared:
    mesh, hardware = Mesh.parse(mesh_text), load_hardware(HARDWARE)
    with tempfile.TemporaryDirectory() as folder:
        plan, graph, ours = _our_plan(Path(folder), model, given, mesh_text)
    theirs = _their_plan(checkout, kept / f"{name}.pickle", model, given, mesh_text)
    formulation = formulate(graph, mesh, hardware, hardware.memory_bytes)
    same = matched(graph, theirs)
    own = objective(theirs.problem, theirs.choice)
    plans, carried = [], []
    for told, which in ((everything, ""), (in_layer, "'s layers")):
        fixed, to_theirs = as_choices(formulation, plan, theirs, same, told)
        here = solve(fixed, "auto", _options())
        plans.append((f"autoshard{which}", Price(*_seconds(plan), here.objective, here.lower_bound)))
        pins, to_ours = as_pins(formulation, theirs, same, told)
        there = search(graph, hardware, SearchRequest(mesh=mesh, pins=tuple(pins)))
        plans.append((f"autoparallel{which}", Price(*_seconds(there), own, own)))
        carried.append((to_ours, to_theirs))
    before = time.process_time()
    whole = solve(theirs.problem, "auto", _options())
    solved = whole.objective, whole.lower_bound, time.process_time() - before
    seconds = ours, (theirs.trace_seconds, theirs.plan_seconds)
    return Compared(tuple(plans), *carried[0], seconds, solved)


def _options() -> Options:
    return Options(clock=Clock(LONGEST, timer=Computing()))


def _seconds(plan: Plan) -> tuple[float, float]:
    return plan.predicted_seconds, plan.certificate.objective_seconds


def _our_plan(folder: Path, model: str, given: dict[str, int], mesh: str) -> tuple[Plan, Graph, tuple[float, float]]:
    """The plan, the graph, and CPU seconds of `autoshard trace` and `autoshard plan`."""
    graph, out = folder / "graph.json", folder / "out"
    words = [f"{key}={value}" for key, value in given.items()]
    trace, _ = timed(
        "trace", model, *(["--with", *words] if words else []), "--precision", "bf16-mixed", "-o", str(graph)
    )
    plan, _ = timed("plan", str(graph), "--mesh", mesh, "--hardware", HARDWARE, "--out", str(out), "--json")
    return load_plan(out / "plan.json"), load(graph), (trace, plan)


def _their_plan(checkout: Path, file: Path, model: str, given: dict[str, int], mesh: str) -> Theirs:
    if not file.exists():
        if not (checkout / "autoparallel" / "optimize_sharding.py").is_file():
            raise SystemExit(NO_CHECKOUT.format(checkout))
        script = ROOT / "benchmarks" / "autoparallel_plans.py"
        words = [f"{key}={value}" for key, value in given.items()]
        command = [sys.executable, str(script), str(checkout), model, str(file), "--mesh", mesh, "--with", *words]
        subprocess.run(command, check=True)
    found = pickle.loads(file.read_bytes())
    assert isinstance(found, Theirs)
    return found


# --- the page -------------------------------------------------------------------------------------------------------


def table(*columns: str) -> list[str]:
    """The head of a table; of columns that begin with "<" the cells are text."""
    names = [column.removeprefix("<") for column in columns]
    return [_row(*names), "|" + "|".join("---" if column[0] == "<" else "--:" for column in columns) + "|"]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def prices(name: str, mesh: str, found: Compared) -> list[str]:
    """A line for each plan: its prices in milliseconds, and their ratio to that of the tool whose model it is."""
    known = dict(found.plans)
    base = known["autoshard"].step, known["autoshard"].additive, known["autoparallel"].theirs
    lines = []
    for tool, price in found.plans:
        own = (price.step, price.additive, price.theirs)
        cells = [f"{1e3 * value:.2f} ({value / least:.2f})" for value, least in zip(own, base, strict=True)]
        cells[2] = f"at most {cells[2]}" if price.theirs_bound < price.theirs * (1 - SHOWN) else cells[2]
        if tool.endswith("layers"):  # its own model prices the whole plan, as above
            cells = [cell if tool.startswith(by) else "" for cell, by in zip(cells, PRICED_BY, strict=True)]
        lines.append(_row(name, mesh.replace(",", " "), tool, *cells))
    return lines


def told(name: str, found: Compared) -> str:
    """How much of each plan went over, and autoparallel's sum: of its plan, and the least."""
    ours, theirs = found.to_ours, found.to_theirs
    value, bound = (f"{1e3 * seconds:.3f}" for seconds in found.whole[:2])
    least = value if value == bound else f"{value}, at least {bound}"
    here = (f"{ours.fixed} of {ours.choices}", ours.lacking, ours.otherwise)
    there = (f"{theirs.fixed} of {theirs.choices}", theirs.lacking)
    return _row(
        name,
        *here,
        *there,
        f"{1e3 * dict(found.plans)['autoparallel'].theirs:.3f}",
        f"{least} ({found.whole[2]:.0f} s)",
    )


def spent(name: str, found: Compared) -> str:
    (our_trace, our_plan), (their_trace, their_plan) = found.seconds
    return _row(name, f"{our_trace:.0f}", f"{our_plan:.0f}", f"{their_trace:.0f}", f"{their_plan:.0f}")


def page(rows: list[tuple[str, str, Compared]], state: str) -> str:
    return "\n".join([
        BEGIN,
        f"`python benchmarks/beside_autoparallel.py CHECKOUT --write`; autoparallel {state}.",
        "",
        *table("<model", "<mesh", "<plan of", "step, autoshard", "sum, autoshard", "sum, autoparallel"),
        *(line for name, mesh, found in rows for line in prices(name, mesh, found)),
        "",
        *table("<model", "pinned", "not offered", "otherwise", "fixed there", "not offered there", "its sum", "least"),
        *(told(name, found) for name, _, found in rows),
        "",
        *table("<CPU seconds", "trace, autoshard", "plan, autoshard", "trace, autoparallel", "plan, autoparallel"),
        *(spent(name, found) for name, _, found in rows),
        END,
    ])  # fmt: skip


def main() -> None:
    parser = harness.options(__doc__, [name for name, *_ in ROWS])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--keep", type=Path, help="folder of what autoparallel found")
    parser.add_argument("--state", default="of the commit that is checked out")
    arguments = parser.parse_args()
    rows = []
    for name, model, given, mesh in ROWS:
        if not arguments.only or name in arguments.only:
            with harness.kept(arguments.keep) as kept:
                rows.append((name, mesh, compared(arguments.checkout, kept, name, model, given, mesh)))
            print(*prices(*rows[-1]), told(name, rows[-1][2]), spent(name, rows[-1][2]), sep="\n", flush=True)
    if arguments.write:
        harness.put(page(rows, arguments.state))


if __name__ == "__main__":
    main()
