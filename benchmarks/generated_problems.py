"""Synthetic transformer-like problems.

A block is ten operators in GPT-2's shape, with two residual values that two consumers share. Layouts are products of
per-axis placements (S0, S1, S2, R, R+, P), a strategy is a product of per-axis choices, and a redistribution pays per
axis, with jitter. `chain` is a block of five nodes with one residual.
"""

from __future__ import annotations

import itertools

import numpy as np

from autoshard.ir.problem import Node, Problem, Value

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
