"""The ilp solver, cold and under a memory limit, beside dp; and how far the two heuristics are from the best.

python benchmarks/ilp.py [--quick] [--write]      (--write puts the tables into benchmarks/README.md)

Problems: GPT-2 of `transformers` (examples/gpt2.py) captured and formulated with every strategy of the table on an A100
profile, of growing size; and one generated in a transformer's shape. `edge variables` counts pairs of choices over all
values: the size of the program before equal layouts are made one. `ilp` starts without a plan of dp. Seconds are CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autoshard.ir.problem import Problem  # noqa: E402
from autoshard.solvers import Clock, Options, portfolio, solve  # noqa: E402
from autoshard.solvers.common.result import Solution  # noqa: E402
from autoshard.solvers.ilp import branch_and_bound  # noqa: E402
from autoshard.solvers.linear_program.rows import pairs  # noqa: E402
from autoshard.solvers.relax.lean_plans import minimum_memory_bound  # noqa: E402
from benchmarks import harness  # noqa: E402
from benchmarks.generated_problems import model as generated  # noqa: E402

LIMIT_SECONDS = 120.0  # wall, for each solve
GOAL_EDGES, GOAL_SECONDS, GOAL_GAP = 98_000, 5.0, 0.005
SHARE = 0.5  # of the memory between the least possible and what the fastest plan uses
GPT2 = ((1, "2x2"), (2, "2x2"), (4, "2x2"), (12, "2x2"), (12, "2x4"))
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def formulated(graph: Any, sizes: str) -> Problem:
    from autoshard.cluster.hardware import load_hardware
    from autoshard.formulation.formulate import formulate
    from autoshard.ir.mesh import Mesh

    mesh = Mesh(tuple(zip(("dp", "tp", "cp"), map(int, sizes.split("x")), strict=False)))
    return formulate(graph, mesh, load_hardware("a100-80g-sxm"), float("inf")).problem


def gpt2(layers: int, sizes: str) -> Problem:
    from autoshard.graph_capture.capture import capture

    return formulated(capture(harness.GPT2, {"n_layer": layers}), sizes)


def problems(quick: bool) -> Iterator[tuple[str, Problem]]:
    for layers, sizes in GPT2[:2] if quick else GPT2:
        yield f"GPT-2, {layers} layers, {sizes}", gpt2(layers, sizes)
    yield "generated, 6 layers, 3 axes", generated("gpt2", 6, 36, 3)


def gap(solution: Solution) -> float:
    return solution.objective / solution.lower_bound - 1 if solution.lower_bound else 0.0


def options() -> Options:
    return Options(clock=Clock(LIMIT_SECONDS))


def row(name: str, problem: Problem) -> tuple[str, bool]:
    """A line of the table, and whether the goals hold for it."""
    exact_seconds, exact = timed(lambda: portfolio.solve(problem))
    cold_seconds, cold = timed(lambda: branch_and_bound.solve(problem, options(), start=False))
    floor = minimum_memory_bound(problem)
    tight = replace(problem, capacity_bytes=floor + SHARE * (exact.peak_bytes - floor))
    fit_seconds, fit = timed(lambda: portfolio.solve(tight))
    tight_seconds, best = timed(lambda: solve(tight, "ilp", options()))
    edges, choices = pairs(problem), sum(len(node.seconds) for node in problem.nodes)
    same = abs(cold.objective - exact.objective) <= 1e-9 * exact.objective
    held = same and gap(best) < GOAL_GAP and (cold_seconds <= GOAL_SECONDS or edges > 2 * GOAL_EDGES)
    return (
        f"| {name} | {len(problem.nodes)} | {choices} | {edges:,} | {exact_seconds:.2f} | {cold_seconds:.2f} | "
        f"{'yes' if same else 'NO'} | {fit_seconds:.1f} | {100 * gap(fit):.3f} % | {tight_seconds:.1f} | "
        f"{100 * gap(best):.3f} % |"
    ), held


# --- the heuristics -------------------------------------------------------------------------------------------------


def models() -> Iterator[tuple[str, Any]]:
    """Graphs of `transformers` models at real sizes, on the meta device."""
    import torch
    import transformers as hf

    from autoshard.graph_capture.capture import capture, capture_model

    class Loss(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids, labels=labels, use_cache=False).loss

    yield "GPT-2, 12 layers", capture(harness.GPT2, {})
    llama = hf.LlamaConfig(num_hidden_layers=8, hidden_size=2048, intermediate_size=5632, use_cache=False)
    t5 = hf.T5Config(decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    ids = torch.zeros(8, 256, dtype=torch.long)
    for name, make, config in (
        ("Llama, 8 layers of 2048", hf.LlamaForCausalLM, llama),
        ("T5-small", hf.T5ForConditionalGeneration, t5),
    ):
        with torch.device("meta"):
            network = make(config)
        yield name, capture_model(Loss(network), (ids, ids.clone()))


def distances() -> Iterator[str]:
    for name, graph in models():
        for sizes in ("2x2", "2x4"):
            problem = formulated(graph, sizes)
            seconds, best = timed(lambda problem=problem: portfolio.solve(problem))
            line = f"| {name} | {sizes} | {len(problem.nodes)} | {seconds:.2f} | {100 * gap(best):.2f} % |"
            for solver in ("recursive", "propagation"):
                took, found = timed(lambda problem=problem, solver=solver: solve(problem, solver))
                line += f" {took:.2f} | +{100 * (found.objective / best.objective - 1):.1f} % |"
            yield line


def large(layers: int = 9100) -> str:
    problem = generated("gpt2", layers, 36, 2)
    best = portfolio.solve(problem)
    line = f"| generated, {layers} layers | - | {len(problem.nodes)} | - | {100 * gap(best):.2f} % |"
    for solver in ("recursive", "propagation"):
        took, found = timed(lambda solver=solver: solve(problem, solver))
        line += f" {took:.2f} | +{100 * (found.objective / best.objective - 1):.1f} % |"
    return line


def section(quick: bool) -> tuple[str, bool]:
    rows = [show(row(name, problem)) for name, problem in problems(quick)]
    far = [show((line, True))[0] for line in distances()]
    far += [] if quick else [show((large(), True))[0]]
    text = harness.section("ilp", "The ilp solver and the heuristics", [
        "CPU seconds on one thread; formulation is not counted. `ilp` cold: without a plan of dp, no memory limit. The",
        f"limit is {SHARE:.0%} of the way from the least memory possible to what the fastest plan uses; each solve",
        f"stops after {LIMIT_SECONDS:.0f} s of wall time (load average {harness.load()} now).",
        "",
        "| problem | nodes | choices | edge variables | dp | ilp cold | same | dp, limit | gap | ilp, limit | gap |",
        "|---|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|",
        *(line for line, _ in rows),
        "",
        "How far the heuristics are from the plan of dp (its own gap in its column), without pins or limit:",
        "",
        "| model | mesh | nodes | dp | gap | recursive | beyond dp | propagation | beyond dp |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        *far,
    ])  # fmt: skip
    return text, all(held for _, held in rows)


def show(row_: tuple[str, bool]) -> tuple[str, bool]:
    print(row_[0], flush=True)
    return row_


def main() -> int:
    parser = harness.options(__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller problems only")
    arguments = parser.parse_args()
    text, held = section(arguments.quick)
    if arguments.write:
        harness.put(text)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
