"""Pipeline schedules: the order of forwards and backwards on each stage, and when each runs.

GPipe: Huang et al. 2019 (arXiv:1811.06965). 1F1B: Narayanan et al. 2021 (arXiv:2104.04473), as is the interleaved one,
in which a stage holds several model chunks: chunk c of stage s is the part c * stages + s of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B"]


class Slot(NamedTuple):
    """The forward (F) or backward (B) of one micro-batch through one chunk."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


class Placed(NamedTuple):
    """A slot with its time on its stage."""

    stage: int
    slot: Slot
    start_seconds: float
    duration_seconds: float

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.duration_seconds


def gpipe(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Slot]:
    """All forwards, then all backwards, the last micro-batch first."""
    forward = [Slot("F", m) for m in range(micro_batches)]
    return forward + [Slot("B", m) for m in reversed(range(micro_batches))]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Slot]:
    """At most stages - stage micro-batches are in flight."""
    forward = [Slot("F", m) for m in range(micro_batches)]
    backward = [Slot("B", m) for m in range(micro_batches)]
    return _alternating(forward, backward, stages - stage - 1)


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Slot]:
    """1F1B over chunks, micro-batches in groups of as many as there are stages (they must divide)."""
    assert micro_batches % stages == 0, (micro_batches, stages)
    group = stages * chunks

    def slot(kind: Kind, position: int) -> Slot:
        chunk = position % group // stages
        micro_batch = position // group * stages + position % stages
        return Slot(kind, micro_batch, chunk if kind == "F" else chunks - 1 - chunk)

    total = micro_batches * chunks
    warm_up = _warm_up(stage, stages, micro_batches, chunks)
    return _alternating([slot("F", k) for k in range(total)], [slot("B", k) for k in range(total)], warm_up)


def _warm_up(stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """Forwards of an interleaved stage before its first backward."""
    if micro_batches == stages:
        return micro_batches * chunks
    return min(micro_batches * chunks, 2 * (stages - stage - 1) + (chunks - 1) * stages)


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """`most_in_flight` of a stage's order, without making it."""
    total = micro_batches * chunks
    if schedule == "gpipe":
        return total
    warm_up = stages - stage - 1 if schedule == "1f1b" else _warm_up(stage, stages, micro_batches, chunks)
    return min(total, warm_up + 1)


def _alternating(forward: list[Slot], backward: list[Slot], warm_up: int) -> list[Slot]:
    """`warm_up` forwards, then one of each in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forward))
    order = forward[:warm_up]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        order += [ahead, behind]
    return order + backward[len(forward) - warm_up :]


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Slot]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def run_pipeline(
    orders: Sequence[Sequence[Slot]], seconds: Callable[[int, Slot], float], send_seconds: Callable[[int, int], float]
) -> list[Placed]:
    """When every slot runs: in its stage's order, once its input has arrived.

    `orders[stage]`; `seconds(stage, slot)`; `send_seconds(from stage, to stage)` of what one slot hands on.
    Raises ValueError where the orders wait for each other for ever.
    """
    slots = [slot for order in orders for slot in order]
    stages, chunks = len(orders), 1 + max((slot.chunk for slot in slots), default=0)
    parts, count = stages * chunks, 1 + max((slot.micro_batch for slot in slots), default=0)
    ended: dict[Kind, list[list[float | None]]] = {kind: [[None] * count for _ in range(parts)] for kind in ("F", "B")}
    placed: list[Placed] = []
    position, free = [0] * stages, [0.0] * stages
    while len(placed) < len(slots):
        before = len(placed)
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                slot = order[position[stage]]
                kind, micro_batch, chunk = slot
                part = chunk * stages + stage
                giver = _giver(kind, part, parts)
                ready = 0.0
                if giver is not None:
                    end = ended[giver[0]][giver[1]][micro_batch]
                    if end is None:
                        break
                    ready = end + (send_seconds(giver[1] % stages, stage) if giver[1] % stages != stage else 0.0)
                placed.append(Placed(stage, slot, max(free[stage], ready), seconds(stage, slot)))
                free[stage] = ended[kind][part][micro_batch] = placed[-1].end_seconds
                position[stage] += 1
        if len(placed) == before:
            waiting = [f"stage {s}: {orders[s][p]}" for s, p in enumerate(position) if p < len(orders[s])]
            raise ValueError(f"the schedule never ends: {', '.join(waiting)}")
    return placed


def _giver(kind: Kind, part: int, parts: int) -> tuple[Kind, int] | None:
    """What a slot waits for: (kind, part) of the same micro-batch; None of the first forward."""
    if kind == "F":
        return ("F", part - 1) if part else None
    return ("B", part + 1) if part < parts - 1 else ("F", part)


def ends(placed: Sequence[Placed], stages: int) -> list[float]:
    """When each stage has ended."""
    found = [0.0] * stages
    for own in placed:
        found[own.stage] = max(found[own.stage], own.end_seconds)
    return found


def most_in_flight(order: Sequence[Slot], chunk: int | None = None, weights: Sequence[int] = ()) -> int:
    """The most (micro-batch, chunk) pairs, or those of one chunk, whose forward has run and whose backward has not.

    `weights`: what a pair of each chunk counts, by default 1.
    """
    alive = most = 0
    for slot in order:
        if chunk not in (None, slot.chunk):
            continue
        own = weights[slot.chunk] if weights else 1
        alive += own if slot.kind == "F" else -own
        most = max(most, alive)
    return most
