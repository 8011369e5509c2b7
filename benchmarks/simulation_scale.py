"""How long the simulation of a large step takes: python benchmarks/simulation_scale.py [--repeat 3] [--write]

Each run is a process of its own with empty caches; the table holds medians of CPU seconds (one thread). Exit code 1
where a row with a limit takes longer. --write puts it into benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import harness

HARDWARE = "a100-80g-sxm"
SIZES: dict[str, int] = {"n_layer": 96, "batch": 1024, "sequence": 1024}
MESHES = (  # the most CPU seconds of simulate
    ("dp=2,tp=4", None),
    ("dp=128,tp=8", 2.0),
    ("dp=8,sp=8,tp=16", 2.0),
    ("dp=512,tp=8", None),
)
RUNS = (  # of a GPT-3 of 96 layers by `autoshard estimate`: tp, pp, dp, micro-batch
    (8, 1, 1, 1),
    (8, 16, 8, 1),
    (8, 16, 32, 1),
)
ESTIMATE_LIMIT = 2.0  # CPU seconds, of at most 1024 devices
BATCH = 1536


def measure_program(graph_file: str, mesh_text: str) -> dict[str, Any]:
    """The best plan of the captured model, lowered and simulated once."""
    from autoshard import solvers
    from autoshard.cluster.hardware import load_hardware
    from autoshard.formulation.formulate import formulate
    from autoshard.ir.graph_json import load
    from autoshard.ir.mesh import Mesh
    from autoshard.program.lower import lower
    from autoshard.search.build_plan import Origin, plan_of
    from autoshard.simulation import simulate

    graph, mesh, hardware = load(graph_file), Mesh.parse(mesh_text), load_hardware(HARDWARE)
    formulation = formulate(graph, mesh, hardware, float("inf"))
    solution = solvers.solve(formulation.problem)
    plan = plan_of(formulation, solution, Origin(graph.source), float("inf"), "search")
    start = time.process_time()
    program = lower(plan, graph)
    lowered = time.process_time()
    timeline = simulate(program, graph, hardware)
    end = time.process_time()
    collectives = sum(event.collective != "" for event in timeline.events)
    return {
        "devices": mesh.size,
        "events": len(timeline.events),
        "collectives": collectives,
        "lower": lowered - start,
        "simulate": end - lowered,
    }


def measure_estimate(tp: int, pp: int, dp: int, micro_batch: int) -> dict[str, Any]:
    """`estimate` from the numbers to the step: graph, program, simulation and every slot of the pipeline."""
    from autoshard.cluster.hardware import load_hardware
    from autoshard.estimate.step import estimate
    from autoshard.estimate.transformer import TrainingRun, Transformer

    hardware, gpt3 = load_hardware(HARDWARE), Transformer(96, 12288, 96, 2048, 51200)
    start = time.process_time()
    made = estimate(gpt3, TrainingRun(BATCH, micro_batch, dp, tp, pp, recompute="full"), hardware)
    return {"devices": made.run.devices, "events": len(made.placed), "simulate": time.process_time() - start}


def program_line(mesh: str, limit: float | None, found: dict[str, Any]) -> str:
    shown = f"{limit:.0f}" if limit else ""
    counts = " | ".join(f"{found[key]:.0f}" for key in ("devices", "events", "collectives"))
    return f"| {mesh.replace(',', ' ')} | {counts} | {found['lower']:.2f} | {found['simulate']:.2f} | {shown} |"


def estimate_line(run: tuple[int, int, int, int], limit: float | None, found: dict[str, Any]) -> str:
    tp, pp, dp, _ = run
    shown = f"{limit:.0f}" if limit else ""
    counts = f"{found['devices']:.0f} | {found['events']:.0f}"
    return f"| TP {tp}, PP {pp}, DP {dp} | {counts} | {found['simulate']:.2f} | {shown} |"


def section(programs: list[str], estimates: list[str], repeat: int) -> str:
    runs = "one fresh process a row" if repeat == 1 else f"medians of {repeat} fresh processes"
    return harness.section("simulation_scale", "Simulating a large step", [
        f"CPU seconds of one thread, {runs}, nothing cached before; {platform.machine()}, profile {HARDWARE}, load",
        f"average {harness.load()} at the end. The step of the best plan of Hugging Face GPT-2 with 96 layers,",
        "captured (batch 1024, sequence 1024): forward, backward, gradients, optimizer, and the memory curve. All",
        "devices do the same, so one stands for all: what costs is the number of events. `lower` comes before.",
        "",
        "| mesh | devices | events | collectives | lower | simulate | limit |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *programs,
        "",
        f"`autoshard estimate` of GPT-3 (96 layers, 12288 wide), batch {BATCH}, full recomputation, 1F1B: writing the",
        "graph, its program, and every slot of every stage.",
        "",
        "| run | devices | slots | estimate | limit |",
        "|---|--:|--:|--:|--:|",
        *estimates,
    ])  # fmt: skip


def main() -> int:
    parser = harness.options(__doc__, graphs=True)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        words = arguments.measure
        estimated = len(words) == len(RUNS[0])
        print(json.dumps(measure_estimate(*map(int, words)) if estimated else measure_program(*words)))
        return 0
    programs, estimates, missed = [], [], False
    with harness.kept(arguments.graphs) as folder:
        graph = harness.captured(folder, "gpt2", harness.GPT2, SIZES)
        for mesh, limit in MESHES:
            found = harness.medians(__file__, arguments.repeat, str(graph), mesh)
            programs.append(program_line(mesh, limit, found))
            missed |= limit is not None and found["simulate"] > limit
            print(programs[-1], flush=True)
    for run in RUNS:
        found = harness.medians(__file__, arguments.repeat, *map(str, run))
        limit = ESTIMATE_LIMIT if found["devices"] <= 1024 else None
        estimates.append(estimate_line(run, limit, found))
        missed |= limit is not None and found["simulate"] > limit
        print(estimates[-1], flush=True)
    text = section(programs, estimates, arguments.repeat)
    print(text)
    if arguments.write:
        harness.put(text)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
