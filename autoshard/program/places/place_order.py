"""In which order places run the forwards and backwards of their parts: one order for all, of which each place takes its
own.

Whoever keeps to it never waits for one that waits for it: a slot comes after all that it reads, and messages between
two places are sent and received in the order in which their makers stand. Sends are not waited for.
GPipe runs all forwards, then all backwards (arXiv:1811.06965). 1F1B (arXiv:2104.04473) lets a place begin as many
micro-batches as there are places on the longest way from it to the loss; on a chain it is the known order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Sources = Sequence[Sequence[tuple[int, int]]]  # of each part: (part that makes a value, its position there)


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
    """Of all places; `sources` are `stage_programs.handed_from`."""
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(part_stages, sources, loss_part, micro_batches))
    parts, batches = range(len(part_stages)), range(micro_batches)
    forward = [PartSlot("F", m, part) for m in batches for part in parts]
    return (*forward, *(PartSlot("B", slot.micro_batch, slot.part) for slot in reversed(forward)))


def readers_of(sources: Sources) -> list[set[int]]:
    """Of each part, those that read something of it."""
    found: list[set[int]] = [set() for _ in sources]
    for reader, own in enumerate(sources):
        for maker, _ in own:
            found[maker].add(reader)
    return found


def ways_to_loss(part_stages: Sequence[int], sources: Sources) -> list[int]:
    """Of each place, how many places lie on the longest way from it through the parts, itself counted."""
    readers, longest = readers_of(sources), [1] * len(sources)
    for part in reversed(range(len(sources))):
        for reader in readers[part]:
            moves = part_stages[reader] != part_stages[part]
            longest[part] = max(longest[part], longest[reader] + moves)
    return [
        max((own for own, stage in zip(longest, part_stages, strict=True) if stage == place), default=1)
        for place in range(max(part_stages) + 1)
    ]


def _one_forward_one_backward(
    part_stages: Sequence[int], sources: Sources, loss_part: int, micro_batches: int
) -> Iterator[PartSlot]:
    """Turn after turn each place takes a backward that can run, else a forward; the least micro-batch is let in
    everywhere, so that it always goes on."""
    parts, places = len(part_stages), max(part_stages) + 1
    readers, limits = readers_of(sources), ways_to_loss(part_stages, sources)
    own = [[part for part in range(parts) if part_stages[part] == place] for place in range(places)]
    done: set[PartSlot] = set()

    def ready(slot: PartSlot) -> bool:
        if slot in done:
            return False
        kind, m, part = slot
        if kind == "F":
            return all(PartSlot("F", m, maker) in done for maker, _ in sources[part])
        last = PartSlot("F", m, part) in done and PartSlot("F", m, loss_part) in done
        return last and all(PartSlot("B", m, reader) in done for reader in readers[part])

    ended, begun = [0] * places, [0] * places  # micro-batches
    while len(done) < 2 * parts * micro_batches:
        taken = []
        for place in range(places):
            window = range(ended[place], begun[place])
            backward = (PartSlot("B", m, part) for m in window for part in reversed(own[place]))
            allowed = range(ended[place], min(micro_batches, ended[place] + limits[place]))
            forward = (PartSlot("F", m, part) for m in allowed for part in own[place])
            slot = next((slot for slot in (*backward, *forward) if ready(slot)), None)
            if slot is not None:
                taken.append(slot)
        assert taken, "the least micro-batch can always go on"
        for slot in taken:
            done.add(slot)
            place = part_stages[slot.part]
            begun[place] = max(begun[place], slot.micro_batch + 1)
            while ended[place] < micro_batches and all(
                PartSlot("B", ended[place], part) in done for part in own[place]
            ):
                ended[place] += 1
        yield from taken
