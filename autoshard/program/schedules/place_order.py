"""Order in which places run the forwards and backwards of their parts: one for all, of which each takes its own.

Whoever keeps to it never waits for one that waits for it: a slot comes after all that it reads, and messages between
two places are sent and received in the order in which their makers stand. Sends are not waited for.
GPipe runs all forwards, then all backwards (arXiv:1811.06965). 1F1B (arXiv:2104.04473) lets a place begin as many
micro-batches as there are places on the longest way from it to the loss; on a chain it is the known order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Sources = Sequence[Sequence[tuple[int, int]]]  # of each part: (part that makes a value, its position there)
_Pass = tuple[Literal["F", "B"], int]  # a part's forward or backward


class PartSlot(NamedTuple):
    """The forward (F) or backward (B) of one micro-batch through one part."""

    kind: Literal["F", "B"]
    micro_batch: int
    part: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.part}"


def placed_order(
    schedule: str, part_stages: Sequence[int], sources: Sources, loss_part: int, micro_batches: int
) -> tuple[PartSlot, ...]:
    """Order of slots for all places; `sources` are `stage_programs.handed_from`."""
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(part_stages, sources, loss_part, micro_batches))
    parts, batches = range(len(part_stages)), range(micro_batches)
    forward = [PartSlot("F", m, part) for m in batches for part in parts]
    return (*forward, *(PartSlot("B", slot.micro_batch, slot.part) for slot in reversed(forward)))


def readers_of(sources: Sources) -> list[set[int]]:
    """Parts that read something of each part."""
    readers: list[set[int]] = [set() for _ in sources]
    for reader, reads in enumerate(sources):
        for maker, _ in reads:
            readers[maker].add(reader)
    return readers


def ways_to_loss(part_stages: Sequence[int], sources: Sources) -> list[int]:
    """Number of places on the longest way from each place through the parts, itself included."""
    readers, longest = readers_of(sources), [1] * len(sources)
    for part in reversed(range(len(sources))):
        for reader in readers[part]:
            moves = part_stages[reader] != part_stages[part]
            longest[part] = max(longest[part], longest[reader] + moves)
    return [
        max((length for length, stage in zip(longest, part_stages, strict=True) if stage == place), default=1)
        for place in range(max(part_stages) + 1)
    ]


def _one_forward_one_backward(
    part_stages: Sequence[int], sources: Sources, loss_part: int, micro_batches: int
) -> Iterator[PartSlot]:
    """In each turn every place takes a backward that can run, else a forward; the least micro-batch is let in
    everywhere, so that it always goes on."""
    parts, places = range(len(part_stages)), range(max(part_stages) + 1)
    waits, wakes = _dependencies(sources, loss_part)
    limits, ended = ways_to_loss(part_stages, sources), [0] * len(places)  # micro-batches
    left = {(kind, m, part): waits[kind, part] for kind, part in waits for m in range(micro_batches)}
    undone = [[list(part_stages).count(place)] * micro_batches for place in places]  # backwards
    ready: dict[str, list[list[tuple[int, int]]]] = {kind: [[] for _ in places] for kind in "FB"}
    for m, part in itertools.product(range(micro_batches), parts):
        if not left["F", m, part]:
            heapq.heappush(ready["F"][part_stages[part]], (m, part))
    taken: list[PartSlot] | None = None
    while taken is None or taken:
        taken = []
        for place in places:
            forward, backward = ready["F"][place], ready["B"][place]
            if backward:  # of a micro-batch the last part first
                m, turned = heapq.heappop(backward)
                taken.append(PartSlot("B", m, -turned))
            elif forward and forward[0][0] < ended[place] + limits[place]:
                taken.append(PartSlot("F", *heapq.heappop(forward)))
        for kind, m, part in taken:
            if kind == "B":
                place = part_stages[part]
                undone[place][m] -= 1
                while ended[place] < micro_batches and not undone[place][ended[place]]:
                    ended[place] += 1
            for woken, other in wakes[kind, part]:
                left[woken, m, other] -= 1
                if not left[woken, m, other]:
                    heapq.heappush(ready[woken][part_stages[other]], (m, other if woken == "F" else -other))
        yield from taken
    assert all(count == micro_batches for count in ended), "the least micro-batch can always go on"


def _dependencies(sources: Sources, loss_part: int) -> tuple[dict[_Pass, int], dict[_Pass, list[_Pass]]]:
    """(kind, part) -> for how many others of its micro-batch it waits; those that wait for it."""
    readers = readers_of(sources)
    before: dict[_Pass, set[_Pass]] = {}
    for part, reads in enumerate(sources):
        before["F", part] = {("F", maker) for maker, _ in reads}
        before["B", part] = {("F", part), ("F", loss_part), *(("B", reader) for reader in readers[part])}
    wakes: dict[_Pass, list[_Pass]] = {node: [] for node in before}
    for waiting, others in before.items():
        for other in sorted(others):
            wakes[other].append(waiting)
    return {node: len(others) for node, others in before.items()}, wakes
