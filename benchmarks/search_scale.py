"""How long the search takes on large models: seconds of each part, from strategies to plan, capture excluded.

python -m benchmarks.search_scale [--repeat 3] [--only gpt2-96] [--write]

Each run is a process of its own, so that nothing is remembered from the one before; the table holds medians of CPU
seconds (one thread). Exit code 1 where a row takes longer than its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness

HARDWARE = "a100-80g-sxm"
OTHERS = str(harness.ROOT / "benchmarks/sized_models.py")
WIDE = {"hidden": 2048, "inner": 5632, "heads_of_keys": 4, "sequence": 1024, "batch": 64}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2-96": (harness.GPT2, {"n_layer": 96, "batch": 1024, "sequence": 1024}),
    "gpt2-960": (harness.GPT2, {"n_layer": 960, "batch": 1024, "sequence": 1024}),
    "whisper": (f"{OTHERS}:whisper", {}),
    "t5": (f"{OTHERS}:t5", {"batch": 64, "labels": 128}),
    "llama-8": (harness.LLAMA, {**WIDE, "layers": 8}),
    "llama-32": (harness.LLAMA, {**WIDE, "layers": 32}),
}
ROWS = (  # model, mesh, the most seconds from strategies to plan
    ("gpt2-96", "dp=8,tp=8", 1.0),
    ("gpt2-960", "dp=8,tp=8", None),
    ("gpt2-96", "dp=512,tp=8", None),
    ("gpt2-96", "dp=4,sp=8,tp=8", 10.0),
    ("gpt2-960", "dp=4,sp=8,tp=8", None),
    *((model, mesh, 60.0) for model in ("whisper", "t5", "llama-8", "llama-32") for mesh in ("dp=2,tp=4", "dp=8,tp=8")),
)
MOST_SIMULATED = 10_000  # operators
PARTS = ("strategies", "formulate", "solve", "plan")


def measure(graph_file: str, mesh_text: str) -> dict[str, Any]:
    """One run in this process: the sizes of the problem, the solution, CPU seconds of each part."""
    from autoshard import rules, solvers
    from autoshard.cluster.hardware import load_hardware
    from autoshard.formulation.formulate import formulate
    from autoshard.ir.graph_json import load
    from autoshard.ir.mesh import Mesh
    from autoshard.ir.problem import objective
    from autoshard.program.lower import lower
    from autoshard.search.build_plan import Origin, plan_of
    from autoshard.simulation import simulate

    graph, mesh, hardware = load(graph_file), Mesh.parse(mesh_text), load_hardware(HARDWARE)
    seconds: dict[str, float] = {}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        seconds[part] = time.process_time() - start
        return result

    def strategies() -> None:
        granularities = rules.granularities(graph, mesh)
        for op in graph.ops:
            rules.strategies(graph, op, mesh, granularities)

    timed("strategies", strategies)
    formulation = timed("formulate", lambda: formulate(graph, mesh, hardware, float("inf")))
    problem = formulation.problem
    solution = timed("solve", lambda: solvers.solve(problem))
    plan = timed("plan", lambda: plan_of(formulation, solution, Origin(graph.source), float("inf"), "search"))
    if len(graph.ops) < MOST_SIMULATED:
        program = timed("lower", lambda: lower(plan, graph))
        timed("simulate", lambda: simulate(program, graph, hardware))
    assert solution.objective == objective(problem, solution.choice)  # of all layers, folded or not
    return {
        "nodes": len(problem.nodes),
        "choices": sum(len(node.seconds) for node in problem.nodes),
        "most": max(len(node.seconds) for node in problem.nodes),
        "width": width(problem),
        "gap": solution.objective / solution.lower_bound - 1,
        "seconds": seconds,
    }


def width(problem: Any) -> int:
    """The most other nodes that a node stands with when it is eliminated, by min-fill on the nodes and values alone.

    A value links all its nodes. Repeated blocks are shortened first: they add nothing.
    """
    from autoshard.solvers.elimination.compress_blocks import shortened
    from autoshard.solvers.elimination.cost_tables import Contents
    from autoshard.solvers.elimination.weighted_sum import additive

    short = shortened(additive(problem), Contents(problem))
    small = short.problem if short else problem
    around: dict[int, set[int]] = {node: set() for node in range(len(small.nodes))}
    for value in small.values:
        ends = {value.producer, *value.consumers}
        for node in ends:
            around[node] |= ends - {node}

    def fill(node: int) -> tuple[int, int]:
        near = around[node]
        return sum(len(near - around[other]) - 1 for other in near), node

    widest = 0
    while around:
        node = min(around, key=fill)
        near = around.pop(node)
        widest = max(widest, len(near))
        for other in near:
            around[other] = (around[other] | near) - {node, other}
    return widest


HEADER = ("model", "mesh", "nodes", "choices", "most", "width", *PARTS, "sum", "limit", "gap", "lower", "simulate")


def line(model: str, mesh: str, limit: float | None, found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    cells = [model, mesh.replace(",", " "), *(found[key] for key in ("nodes", "choices", "most", "width"))]
    cells += [*(f"{seconds[part]:.2f}" for part in PARTS), f"{taken(found):.2f}", f"{limit:.0f}" if limit else ""]
    after = (f"{seconds[part]:.2f}" if part in seconds else "" for part in ("lower", "simulate"))
    return harness.cells(*cells, f"{100 * found['gap']:.2g} %", *after)


def taken(found: dict[str, Any]) -> float:
    return float(sum(found["seconds"][part] for part in PARTS))


def growth(results: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """What ten times the layers cost, for each mesh on which both were run."""
    found = []
    for (model, mesh), small in results.items():
        large = results.get(("gpt2-960", mesh))
        if model == "gpt2-96" and large:
            ratio = large["seconds"]["solve"] / small["seconds"]["solve"]
            found.append(f"From 96 to 960 layers on {mesh.replace(',', ' ')} `dp` takes {ratio:.2f} times as long.")
    return found


def main() -> int:
    parser = harness.options(__doc__, sorted(MODELS), graphs=True)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("GRAPH", "MESH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return 0
    results: dict[tuple[str, str], dict[str, Any]] = {}
    missed = False

    def lines(folder: Path) -> Iterator[str]:
        nonlocal missed
        for model, mesh, limit in ROWS:
            if not arguments.only or model in arguments.only:
                graph = harness.captured(folder, model, *MODELS[model])
                results[model, mesh] = found = harness.medians("search_scale", arguments.repeat, str(graph), mesh)
                missed |= limit is not None and taken(found) > limit
                yield line(model, mesh, limit, found)

    with harness.kept(arguments.graphs) as folder:
        table = harness.table(HEADER, lines(folder))
    if arguments.write:
        conditions = f"Medians of {arguments.repeat}; {harness.machine()}"
        harness.put("search_scale", [conditions, "", *table, "", *growth(results)])
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
