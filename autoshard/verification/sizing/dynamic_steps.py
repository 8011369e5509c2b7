"""At which dynamic sizes a package is verified: another in each step, small ones, with the least of each."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.graph_capture.dynamic.graph_numbers import words
from autoshard.ir.dynamic import DynamicSize
from autoshard.ir.graph import Graph

# Units above the least, in each step: from a least of one unit 3, 1, 5 and 2, which have no divisor in common.
STEPS = (2, 0, 4, 1)


def step_sizes(graph: Graph) -> list[dict[str, int]]:
    """Of each step; of a graph without dynamic sizes none. No two sizes are as many units above their least at once,
    but in the second step, in which all are at their least."""
    if not graph.dynamic:
        return []
    made = []
    for step, units in enumerate(STEPS):
        shifted = [units if step == 1 else STEPS[(step + 2 * n) % len(STEPS)] for n in range(len(graph.dynamic))]
        made.append({own.name: _size(own, n) for own, n in zip(graph.dynamic, shifted, strict=True)})
    return made


def _size(own: DynamicSize, units: int) -> int:
    size = own.least + units * own.divisor
    return min(size, own.most) if own.most else size


def size_words(graph: Graph, sizes: Sequence[dict[str, int]]) -> str:
    """What was verified: `batch 32, sequence 64; …`."""
    names = [own.name for own in graph.dynamic]
    return "; ".join(words(names, tuple(own[name] for name in names)) for own in sizes)
