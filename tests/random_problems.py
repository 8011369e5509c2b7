"""Random small problems with everything that is hard: shared values, hubs, forbidden entries, ties, loose parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.ir.problem import Node, Problem, Value, memory, objective

HORIZON = 6


def random_problem(seed: int, *, most_nodes: int = 6, most_strategies: int = 4, forbid: float = 0.1) -> Problem:
    """Small integers as costs make ties; integer bytes make memory exact. A third of the problems use real numbers."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most_nodes + 1))
    sizes = [int(rng.integers(1, most_strategies + 1)) for _ in range(count)]
    real = rng.random() < 1 / 3
    nodes = tuple(_node(rng, f"n{n}", size, real, forbid) for n, size in enumerate(sizes))
    values = tuple(_value(rng, f"v{n}", n, sizes, real, forbid) for n in range(count - 1) for _ in _some(rng))
    return Problem(nodes, values, horizon=HORIZON)


def limited(problem: Problem, seed: int) -> Problem:
    """With a capacity from somewhat below the smallest peak of a few random choices up to the largest."""
    rng = np.random.default_rng(seed)
    picks = [[int(rng.integers(len(node.seconds))) for node in problem.nodes] for _ in range(12)]
    peaks = sorted(float(memory(problem, pick).max()) for pick in picks if np.isfinite(objective(problem, pick)))
    if not peaks:
        return problem
    low, high = 0.8 * peaks[0], peaks[-1]
    return replace(problem, capacity_bytes=float(np.floor(low + rng.random() ** 2 * (high - low))))


def _some(rng: np.random.Generator) -> range:
    return range(int(rng.choice([0, 1, 1, 1, 2])))


def _node(rng: np.random.Generator, name: str, size: int, real: bool, forbid: float) -> Node:
    seconds = _costs(rng, (size,), real, forbid / 2)
    return Node(name, seconds, rng.integers(0, 6, size).astype(float), _span(rng))


def _value(rng: np.random.Generator, name: str, producer: int, sizes: list[int], real: bool, forbid: float) -> Value:
    later = np.arange(producer + 1, len(sizes))
    consumers = tuple(int(c) for c in rng.permutation(later)[: int(rng.integers(1, min(5, len(later)) + 1))])
    sources, targets = (int(x) for x in rng.integers(1, 5, 2))
    return Value(
        name=name,
        producer=producer,
        consumers=consumers,
        source=rng.integers(0, sources, sizes[producer]),
        targets=tuple(rng.integers(0, targets, sizes[c]) for c in consumers),
        seconds=_costs(rng, (sources, targets), real, forbid),
        bytes=rng.integers(0, 6, targets).astype(float),
        intervals=tuple(_span(rng) for _ in consumers),
    )


def _costs(rng: np.random.Generator, shape: tuple[int, ...], real: bool, forbid: float) -> np.ndarray:
    costs = rng.random(shape) * 8 if real else rng.integers(0, 8, shape).astype(float)
    return np.where(rng.random(shape) < forbid, np.inf, costs)


def _span(rng: np.random.Generator) -> tuple[int, int]:
    start, stop = sorted(int(x) for x in rng.integers(0, HORIZON + 1, 2))
    return (start, stop) if rng.random() < 0.8 else (0, 0)


def hub_problem(seed: int, *, layers: int = 4, forbid: float = 0.05) -> Problem:
    """Equal layers in a row, of which every node reads the value of node 0 too; the last layer may differ."""
    rng = np.random.default_rng(seed)
    real = rng.random() < 0.5
    sizes = [int(n) for n in rng.integers(2, 4, 2)]
    hub, layer, last = (_node(rng, name, sizes[name != "hub"], real, forbid) for name in ("hub", "layer", "last"))
    nodes = (hub, *(replace(layer, name=f"layer{i}") for i in range(layers - 1)), last)
    sources, targets = (int(x) for x in rng.integers(2, 5, 2))
    needs = rng.integers(0, targets, sizes[1])
    shared = Value(
        "shared",
        0,
        tuple(range(1, layers + 1)),
        rng.integers(0, sources, sizes[0]),
        (needs,) * layers,
        _costs(rng, (sources, targets), real, forbid) / (1 if rng.random() < 0.5 else 8),
        rng.integers(0, 6, targets).astype(float),
        tuple(_span(rng) for _ in range(layers)),
    )
    indices, moves = np.arange(sizes[1]), _costs(rng, (sizes[1], sizes[1]), real, forbid)
    chain = tuple(
        Value(f"v{i}", i, (i + 1,), indices, (indices,), moves, np.zeros(sizes[1]), ((0, 0),)) for i in range(1, layers)
    )
    return Problem(nodes, (shared, *chain), horizon=HORIZON)
