"""At which dynamic sizes a package is verified: another in each step, small ones, with the least of each."""

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
    """Of each step; of a graph without dynamic sizes none. No two sizes are as many units above their least at once,
    but in the second step, in which all are at their least. For each of a plan's `buckets` there is one more
    step, in the next larger one."""
    if not graph.dynamic:
        return []
    made = [*_least_above(graph, buckets)]
    for step, units in enumerate(STEPS):
        shifted = [units if step == 1 else STEPS[(step + 2 * n) % len(STEPS)] for n in range(len(graph.dynamic))]
        made.append({own.name: _size(own, n) for own, n in zip(graph.dynamic, shifted, strict=True)})
    return made


def _least_above(graph: Graph, buckets: Sequence[SizeBucket]) -> Iterator[dict[str, int]]:
    """Of each bucket, the sizes of the next larger one with one of them a unit above its own, the others at their
    least."""
    least = {own.name: own.least for own in graph.dynamic}
    for number, bucket in enumerate(buckets):
        most = dict(bucket.most)
        above = ((own, _size(own, (most[own.name] - own.least) // own.divisor + 1)) for own in graph.dynamic)
        larger = [least | {own.name: size} for own, size in above if size > most[own.name]]
        after = buckets[number + 1 : number + 2]
        yield from [sizes for sizes in larger if all(own.holds(sizes) for own in after)][:1]


def sizes_to_verify(
    plan: Plan, graph: Graph, machine: Hardware, ranks: int, in_turns: bool, full: bool = False
) -> list[dict[str, int]]:
    """The same, and at the end the largest of all, where a step there is quick on this machine, or `full`."""
    sizes = step_sizes(graph, plan.buckets)
    largest = sizes_of(graph)
    if sizes and largest not in sizes and (full or is_quick(plan, graph, 1, machine, ranks, in_turns)):
        sizes.append(largest)
    return sizes


def _size(own: DynamicSize, units: int) -> int:
    size = own.least + units * own.divisor
    return min(size, own.most) if own.most else size


def size_words(graph: Graph, sizes: Sequence[dict[str, int]]) -> str:
    """What was verified: `batch 32, sequence 64; …`."""
    names = [own.name for own in graph.dynamic]
    return "; ".join(words(names, tuple(own[name] for name in names)) for own in sizes)
