"""Is the bound on a step one? Of many plans, what two resources that follow each other take, beside the simulated step.

python benchmarks/step_bounds.py GRAPH.json --mesh dp=2,tp=4 [--plans 100] [--seed 0] [--cpu 60]

The plans: the best found, those of the bound's weights, each with a few choices changed, and random ones. A weighted
mean of pairs is at most their largest, so that one number says it for all weights. Ends with 1 where a plan takes less
than it. --cpu: as many of the plans as that many CPU seconds suffice for.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.host_lead import with_leads
from autoshard.ir.graph_json import load
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Problem, objective
from autoshard.program.lower import lower
from autoshard.search.build_plan import Origin, plan_of
from autoshard.search.step_search import StepSearch
from autoshard.simulation.engine import timed
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import Solution
from autoshard.solvers.heuristics.random_plans import random_choice

CHANGES = (1, 2, 5, 10, 30, 100)


def changed(problem: Problem, start: Choice, changes: int, draw: random.Random) -> Choice:
    """Some choices drawn anew, where what comes out is allowed."""
    choice = list(start)
    for n in draw.sample(range(len(choice)), min(changes, len(choice))):
        old, choice[n] = choice[n], draw.randrange(len(problem.nodes[n].seconds))
        if math.isinf(objective(problem, choice)):
            choice[n] = old
    return tuple(choice)


def plans(search: StepSearch, seed: int) -> Iterator[tuple[str, Choice]]:
    first = search.first()
    starts = [first, *(choice for _, choice in search.others())] if first is not None else []
    known = [*starts, *(tuple(choice) for _, choice in search.bound([c for c in starts if c]).tried)]
    yield from (("solved", choice) for choice in known if choice is not None)
    draw = random.Random(seed)
    for number in itertools.count():
        if number % 4 == 3 or not known:
            yield "random", random_choice(search.problem, seed + number)
        else:
            start = draw.choice([choice for choice in known if choice is not None])
            yield "changed", changed(search.problem, start, draw.choice(CHANGES), draw)


def step_seconds(formulation: Formulation, choice: Choice) -> float:
    solution = Solution(formulation.problem, choice, 0.0, "benchmark")
    plan = plan_of(formulation, solution, Origin("benchmark"), float("inf"), "search")
    return timed(lower(plan, formulation.graph), formulation.graph, formulation.hardware).step_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph")
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--hardware", default="h100-80g-sxm")
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", type=float, default=math.inf, help="CPU seconds after which no other plan is begun")
    arguments = parser.parse_args()
    hardware = load_hardware(arguments.hardware)
    formulation = formulate(load(arguments.graph), Mesh.parse(arguments.mesh), hardware, float("inf"))
    search = StepSearch(formulation)
    shares: dict[str, list[float]] = {}
    for kind, choice in itertools.islice(plans(search, arguments.seed), arguments.plans):
        own = with_leads(search.resources, formulation, [choice])
        least = own.longest(own.least_used(choice))
        shares.setdefault(kind, []).append(least / step_seconds(formulation, choice))
        if time.process_time() > arguments.cpu:
            break
    for kind, own in shares.items():
        print(f"{kind}: {len(own)} plans, {min(own):.3f} to {max(own):.3f} of the step, mean {sum(own) / len(own):.3f}")
    return int(max(max(own) for own in shares.values()) > 1 + 1e-9)


if __name__ == "__main__":
    sys.exit(main())
