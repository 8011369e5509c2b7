"""Chooses the dynamic sizes at which a package is verified: different in each step, small, with the least of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.cluster.hardware import Hardware
from autoshard.graph_capture.dynamic_sizes.graph_numbers import sizes_of, words
from autoshard.ir.dynamic import DynamicSize
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan, SizeBucket
from autoshard.verification.sizing.reduced_sizes import is_quick

# Units above the least, in each step: from a least of one unit 3, 1, 5 and 2, which have no divisor in common.
STEPS = (2, 0, 4, 1)


def step_sizes(graph: Graph, buckets: Sequence[SizeBucket] = ()) -> list[dict[str, int]]:
    """Sizes of each step; empty without dynamic sizes. In each step the sizes are different numbers of units above
    their least, except in the second one, where all are at their least. Each of a plan's `buckets` adds a step, in the
    next larger one."""
    if not graph.dynamic:
        return []
    steps = [*_least_above(graph, buckets)]
    for step, units in enumerate(STEPS):
        shifted = [units if step == 1 else STEPS[(step + 2 * n) % len(STEPS)] for n in range(len(graph.dynamic))]
        steps.append({size.name: _size(size, n) for size, n in zip(graph.dynamic, shifted, strict=True)})
    return steps


def _least_above(graph: Graph, buckets: Sequence[SizeBucket]) -> Iterator[dict[str, int]]:
    """Sizes in the next larger bucket, for each bucket: one size is a unit above the bucket's, the others are at their
    least."""
    least = {size.name: size.least for size in graph.dynamic}
    for number, bucket in enumerate(buckets):
        most = dict(bucket.most)
        above = ((size, _size(size, (most[size.name] - size.least) // size.divisor + 1)) for size in graph.dynamic)
        larger = [least | {dynamic.name: size} for dynamic, size in above if size > most[dynamic.name]]
        after = buckets[number + 1 : number + 2]
        yield from [sizes for sizes in larger if all(next_bucket.holds(sizes) for next_bucket in after)][:1]


def sizes_to_verify(
    plan: Plan, graph: Graph, machine: Hardware, ranks: int, in_turns: bool, full: bool = False
) -> list[dict[str, int]]:
    """Sizes of `step_sizes`, then the largest of all if a step there is quick on this machine, or if `full`."""
    sizes = step_sizes(graph, plan.buckets)
    largest = sizes_of(graph)
    if sizes and largest not in sizes and (full or is_quick(plan, graph, 1, machine, ranks, in_turns)):
        sizes.append(largest)
    return sizes


def _size(dynamic: DynamicSize, units: int) -> int:
    size = dynamic.least + units * dynamic.divisor
    return min(size, dynamic.most) if dynamic.most else size


def size_words(graph: Graph, sizes: Sequence[dict[str, int]]) -> str:
    """Sizes verified, in words: `batch 32, sequence 64; …`."""
    names = [size.name for size in graph.dynamic]
    return "; ".join(words(names, tuple(size_of[name] for name in names)) for size_of in sizes)
