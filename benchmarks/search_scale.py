"""How long the search takes on large models: seconds of each part, from strategies to plan, capture excluded.

python benchmarks/search_scale.py [--repeat 3] [--only gpt2-96] [--write]

Each run is a process of its own, so that nothing is remembered from the one before; the table holds medians of CPU
seconds (one thread). --write puts it into benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import harness

HARDWARE = "a100-80g-sxm"
PAIRS, LLAMA = (str(harness.ROOT / "benchmarks" / name) for name in ("encoder_decoders.py", "llama.py:llama"))
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2-96": (harness.GPT2, {"n_layer": 96, "batch": 256, "sequence": 1024}),
    "gpt2-960": (harness.GPT2, {"n_layer": 960, "batch": 256, "sequence": 1024}),
    "whisper": (f"{PAIRS}:whisper", {}),
    "t5": (f"{PAIRS}:t5", {}),
    "llama-8": (LLAMA, {"layers": 8}),
    "llama-32": (LLAMA, {"layers": 32}),
}
ROWS = (  # model, mesh, the most seconds from strategies to plan
    ("gpt2-96", "dp=8,tp=8", 1.0),
    ("gpt2-960", "dp=8,tp=8", None),
    ("gpt2-96", "dp=4,sp=8,tp=8", 10.0),
    ("gpt2-960", "dp=4,sp=8,tp=8", None),
    ("whisper", "dp=2,tp=4", 60.0),
    ("whisper", "dp=8,tp=8", 60.0),
    ("t5", "dp=2,tp=4", 60.0),
    ("t5", "dp=8,tp=8", 60.0),
    ("llama-8", "dp=2,tp=4", 60.0),
    ("llama-8", "dp=8,tp=8", 60.0),
    ("llama-32", "dp=2,tp=4", 60.0),
    ("llama-32", "dp=8,tp=8", 60.0),
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
        candidates = rules.candidates(graph, mesh)
        for op in graph.ops:
            rules.strategies(graph, op, mesh, candidates)

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


def line(model: str, mesh: str, limit: float | None, found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    total = sum(seconds[part] for part in PARTS)
    cells = [model, mesh.replace(",", " "), f"{found['nodes']}", f"{found['choices']}", f"{found['most']}"]
    cells += [f"{found['width']}", *(f"{seconds[part]:.2f}" for part in PARTS), f"{total:.2f}"]
    cells += [f"{limit:.0f}" if limit else "", f"{100 * found['gap']:.2g} %"]
    cells += [f"{seconds[part]:.2f}" if part in seconds else "" for part in ("lower", "simulate")]
    return harness.cells(*cells)


def section(lines: list[str], ratios: list[str], repeat: int) -> str:
    runs = "one fresh process a row" if repeat == 1 else f"medians of {repeat} fresh processes"
    heads = ["model", "mesh", "nodes", "choices", "most", "width", *PARTS, "sum", "limit", "gap", "lower", "simulate"]
    return harness.section("search_scale", "The search on large models", [
        "From strategies to plan, every strategy that the table offers, no memory limit; capture excluded. CPU seconds",
        f"of one thread, {runs}; {platform.machine()}, profile {HARDWARE}, load average",
        f"{harness.load()} at the end. gpt2-96, gpt2-960: Hugging Face GPT-2 with that many layers, batch 256,",
        "sequence 1024; T5-base and Whisper small from configuration, batch 64; llama-8, llama-32: Llama with",
        "that many layers, 2048 wide, 16 heads, 4 of keys and values, batch 64. *most*: choices of one node. *width*:",
        "of the strategy graph, by min-fill. *gap*: proven. *lower* and *simulate* come after the plan.",
        "",
        harness.cells(*heads),
        "|---|---|" + "--:|" * (len(heads) - 2),
        *lines,
        "",
        *ratios,
    ])  # fmt: skip


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
    lines: list[str] = []
    missed = False
    with harness.kept(arguments.graphs) as folder:
        for model, mesh, limit in ROWS:
            if arguments.only and model not in arguments.only:
                continue
            graph = harness.captured(folder, model, *MODELS[model])
            found = harness.medians(__file__, arguments.repeat, str(graph), mesh)
            results[model, mesh] = found
            lines.append(line(model, mesh, limit, found))
            missed |= limit is not None and sum(found["seconds"][part] for part in PARTS) > limit
            print(lines[-1], flush=True)
    text = section(lines, growth(results), arguments.repeat)
    print(text)
    if arguments.write:
        harness.put(text)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
