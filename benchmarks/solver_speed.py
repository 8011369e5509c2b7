"""Speed of the dp solver on synthetic transformer-like problems: `python benchmarks/solver_speed.py`.

A block is ten operators in GPT-2's shape, with two residual values that two consumers share. Layouts are products of
per-axis placements (S0, S1, S2, R, R+, P), a strategy is a product of per-axis choices, and a redistribution pays per
axis, with jitter. `chain` is a block of five nodes with one residual. Prints one line per problem, and with
--memory also a memory-limited solve.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from dataclasses import replace

import numpy as np

from autoshard.ir.problem import Node, Problem, Value
from autoshard.solvers import portfolio
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.dominance import reduce
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax.lean_plans import minimum_memory_bound

PLACEMENTS = 6
# one line per op of a block: name, operands (names before it; "in" is the block's input), compute weight
GPT2 = (
    ("ln1", ("in",), 0.1),
    ("qkv", ("ln1",), 3.0),
    ("view", ("qkv",), 0.0),
    ("attention", ("view",), 1.0),
    ("proj", ("attention",), 1.0),
    ("add1", ("in", "proj"), 0.1),
    ("ln2", ("add1",), 0.1),
    ("up", ("ln2",), 4.0),
    ("gelu", ("up",), 0.1),
    ("down", ("gelu",), 4.0),
    ("add2", ("add1", "down"), 0.1),
)
CHAIN = (("a", ("in",), 0.1), ("b", ("a",), 1.0), ("c", ("b",), 1.0), ("d", ("c",), 0.1), ("in2", ("in", "d"), 0.1))
LLAMA = (
    ("ln1", ("in",), 0.1),
    ("q", ("ln1",), 1.0),
    ("k", ("ln1",), 1.0),
    ("v", ("ln1",), 1.0),
    ("attention", ("q", "k", "v"), 1.0),
    ("proj", ("attention",), 1.0),
    ("add1", ("in", "proj"), 0.1),
    ("ln2", ("add1",), 0.1),
    ("gate", ("ln2",), 2.0),
    ("up", ("ln2",), 2.0),
    ("mul", ("gate", "up"), 0.1),
    ("down", ("mul",), 2.0),
    ("add2", ("add1", "down"), 0.1),
)
BLOCKS = {"gpt2": GPT2, "chain": CHAIN, "llama": LLAMA}


def model(kind: str, layers: int, strategies: int, axes: int, seed: int = 0) -> Problem:
    """`strategies` per node (at most 6 ** axes are distinct per operand); equal layers have equal arrays."""
    rng = np.random.default_rng(seed)
    layouts = PLACEMENTS**axes
    block = BLOCKS[kind]
    sources = {name: rng.integers(0, layouts, strategies) for name, _, _ in block}
    targets = {(name, o): rng.integers(0, layouts, strategies) for name, operands, _ in block for o in operands}
    seconds = {name: weight * _compute(rng, strategies, axes) for name, _, weight in block}
    moves = {name: _moves(rng, axes) for name, _, _ in block}
    sizes = 1.0 / 2.0 ** rng.integers(0, axes + 1, layouts)
    count = layers * len(block)
    nodes = [Node("input", np.zeros(strategies), np.zeros(strategies))]
    uses: dict[int, list[tuple[int, np.ndarray]]] = {}
    origin = [(np.arange(strategies) % layouts, moves[block[-1][0]])]
    last = 0
    for _ in range(layers):
        index = {"in": last}
        for name, operands, _ in block:
            n = len(nodes)
            for operand in operands:
                uses.setdefault(index[operand], []).append((n, targets[name, operand]))
            index[name] = n
            nodes.append(Node(f"{name}.{n}", seconds[name], np.zeros(strategies)))
            origin.append((sources[name], moves[name]))
        last = len(nodes) - 1
    values = []
    for producer, consumers in sorted(uses.items()):
        source, move = origin[producer]
        spans = tuple((c, 2 * count - c) for c, _ in consumers)  # kept from its use in forward to that in backward
        ends = tuple(c for c, _ in consumers), source, tuple(t for _, t in consumers)
        values.append(Value(f"v{producer}", producer, *ends, move, sizes, spans))
    return Problem(tuple(nodes), tuple(values), horizon=2 * count)


def _compute(rng: np.random.Generator, strategies: int, axes: int) -> np.ndarray:
    """Each axis either divides the work by two or repeats it."""
    return (1.0 + 0.02 * rng.random(strategies)) / 2.0 ** rng.binomial(axes, 0.7, strategies)


def _moves(rng: np.random.Generator, axes: int) -> np.ndarray:
    """Per axis a matrix with zero diagonal and a few free moves; axes add up; 2 % jitter."""
    step = rng.choice([0.2, 0.5, 1.0, 2.0], (PLACEMENTS, PLACEMENTS)) * rng.random()
    step[rng.random(step.shape) < 0.1] = 0.0
    np.fill_diagonal(step, 0.0)
    layouts = list(itertools.product(range(PLACEMENTS), repeat=axes))
    total = np.array([[sum(step[a, b] for a, b in zip(x, y, strict=True)) for y in layouts] for x in layouts])
    return total * (1.0 + 0.02 * rng.random(total.shape))


def line(kind: str, layers: int, strategies: int, axes: int, limited: bool) -> str:
    problem = model(kind, layers, strategies, axes)
    kept = [len(some) for some in reduce(additive(problem), Contents(problem))]
    start = time.process_time()
    solution = portfolio.solve(problem)
    text = (
        f"{kind:6} {layers:6} {len(problem.nodes):6} {strategies:6} {np.mean(kept):6.1f} "
        f"{time.process_time() - start:9.2f} {solution.status:9} {solution.objective:12.6f} {_gap(solution):8.1e}"
    )
    if limited:
        floor = minimum_memory_bound(problem)
        for share in (0.5, 0.2):
            capacity = floor + share * (solution.peak_bytes - floor)
            start = time.process_time()
            fit = portfolio.solve(replace(problem, capacity_bytes=capacity))
            text += f" | {share:.1f}: {time.process_time() - start:7.2f} s gap {_gap(fit):7.1e}"
    return text + f" | {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def _gap(solution: portfolio.Solution) -> float:
    return solution.objective / solution.lower_bound - 1 if solution.lower_bound else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true", help="also with half and a fifth of the free memory")
    parser.add_argument("--kind", choices=sorted(BLOCKS), action="append")
    parser.add_argument("--most", type=int, default=216, help="skip problems with more strategies than this")
    arguments = parser.parse_args()
    print("kind   layers  nodes      k   kept CPU-seconds status     objective      gap | peak RSS so far")
    for kind in arguments.kind or sorted(BLOCKS):
        for layers, strategies, axes in ((1, 36, 2), (12, 36, 2), (48, 36, 2), (96, 36, 2), (96, 100, 3), (48, 216, 3)):
            if strategies <= arguments.most:
                print(line(kind, layers, strategies, axes, arguments.memory), flush=True)


if __name__ == "__main__":
    main()
