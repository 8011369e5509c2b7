"""Pipeline schedules: the order of forwards and backwards on each stage, and when each runs.

GPipe: Huang et al. 2019 (arXiv:1811.06965). 1F1B: Narayanan et al. 2021 (arXiv:2104.04473), as is the interleaved one,
in which a stage holds several model chunks: chunk c of stage s is the part c * stages + s of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from autoshard.program.schedules.place_order import PartSlot

Kind = Literal["F", "B"]
KINDS: tuple[Kind, Kind] = "F", "B"


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
    """`most_in_flight` of a stage's order, without building it."""
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


REPEATS = 3  # rounds of micro-batches, from the last of which on the interleaved order repeats

SCHEDULES: dict[str, Callable[[int, int, int, int], list[Slot]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


@lru_cache(maxsize=512)
def order_of(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int) -> tuple[Slot, ...]:
    """Slots of a stage, in order; cached, as a search of steps asks for the same ones again and again."""
    return tuple(SCHEDULES[schedule](stage, stages, micro_batches, chunks))


def chain_order(schedule: str, stages: int, micro_batches: int, chunks: int) -> tuple[PartSlot, ...]:
    """The orders of all stages as one, in which a slot comes after what it reads: in turns, each stage takes its next
    slot, where what that reads stands before."""
    orders = [order_of(schedule, stage, stages, micro_batches, chunks) for stage in range(stages)]
    position, slots = [0] * stages, dict[PartSlot, None]()
    while len(slots) < sum(map(len, orders)):
        for stage, order in enumerate(orders):
            if position[stage] < len(order):
                kind, micro_batch, chunk = order[position[stage]]
                part = chunk * stages + stage
                giver = _giver(kind, part, stages * chunks)
                if giver is None or PartSlot(giver[0], micro_batch, giver[1]) in slots:
                    slots[PartSlot(kind, micro_batch, part)] = None
                    position[stage] += 1
    return tuple(slots)


class SlotSequence(NamedTuple):
    """Slots of all stages, each after all that it waits for: `stages[k]` and `slots[k]`, and the places of the slot
    before it on its stage and of the one that makes its input; `len(slots)` where there is none. Times change nothing
    of it."""

    stages: tuple[int, ...]
    slots: tuple[Slot, ...]
    before: tuple[int, ...]
    giver: tuple[int, ...]

    def ends_seconds(self, seconds: Sequence[float], waits: Sequence[float] | None = None) -> list[float]:
        """When each slot ends. `seconds[k]`: what it takes; `waits[k]`: what its input takes to arrive, by default
        nothing."""
        slot_ends = [0.0] * (len(self.slots) + 1)
        if waits is None:
            for k, (before, giver) in enumerate(zip(self.before, self.giver, strict=True)):
                free, ready = slot_ends[before], slot_ends[giver]
                slot_ends[k] = (free if free > ready else ready) + seconds[k]
        else:
            for k, (before, giver) in enumerate(zip(self.before, self.giver, strict=True)):
                slot_ends[k] = max(slot_ends[before], slot_ends[giver] + waits[k]) + seconds[k]
        return slot_ends[:-1]

    def placed(self, ends: Sequence[float], seconds: Sequence[float], waits: Sequence[float]) -> list[Placed]:
        """The slots with their times, `ends` of `ends_seconds`."""
        padded = [*ends, 0.0]
        starts = [
            max(padded[before], padded[giver] + wait)
            for before, giver, wait in zip(self.before, self.giver, waits, strict=True)
        ]
        return list(map(Placed, self.stages, self.slots, starts, seconds))


@lru_cache(maxsize=128)
def sequence_of(schedule: str, stages: int, micro_batches: int, chunks: int) -> SlotSequence:
    """Slot sequence of a schedule's orders; cached, as a search of steps asks for the same ones again and again."""
    return slot_sequence([order_of(schedule, stage, stages, micro_batches, chunks) for stage in range(stages)])


def slot_sequence(orders: Sequence[Sequence[Slot]]) -> SlotSequence:
    """`orders[stage]`. Raises ValueError where they wait for each other for ever."""
    total = sum(map(len, orders))
    stages = len(orders)
    parts = stages * (1 + max((slot.chunk for order in orders for slot in order), default=0))
    count = 1 + max((slot.micro_batch for order in orders for slot in order), default=0)
    place = {kind: [[-1] * count for _ in range(parts)] for kind in KINDS}  # of a part's micro-batch
    rows: list[tuple[int, Slot, int, int]] = []
    position, last = [0] * stages, [total] * stages
    while len(rows) < total:
        before = len(rows)
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                slot = order[position[stage]]
                kind, micro_batch, chunk = slot
                part = chunk * stages + stage
                giver = _giver(kind, part, parts)
                source = total if giver is None else place[giver[0]][giver[1]][micro_batch]
                if source < 0:
                    break
                place[kind][part][micro_batch] = len(rows)
                rows.append((stage, slot, last[stage], source))
                last[stage] = len(rows) - 1
                position[stage] += 1
        if len(rows) == before:
            waiting = [f"stage {s}: {orders[s][p]}" for s, p in enumerate(position) if p < len(orders[s])]
            raise ValueError(f"the schedule never ends: {', '.join(waiting)}")
    return SlotSequence(*zip(*rows, strict=True)) if rows else SlotSequence((), (), (), ())


def run_pipeline(
    orders: Sequence[Sequence[Slot]], seconds: Callable[[int, Slot], float], send_seconds: Callable[[int, int], float]
) -> list[Placed]:
    """When every slot runs: in its stage's order, once its input has arrived.

    `orders[stage]`; `seconds(stage, slot)`; `send_seconds(from stage, to stage)` of what one slot hands on.
    Raises ValueError where the orders wait for each other for ever.
    """
    seq = slot_sequence(orders)
    takes = list(map(seconds, seq.stages, seq.slots))
    gives = [
        seq.stages[giver] if giver < len(seq.slots) else stage
        for stage, giver in zip(seq.stages, seq.giver, strict=True)
    ]
    waits = [
        send_seconds(giver, stage) if giver != stage else 0.0 for stage, giver in zip(seq.stages, gives, strict=True)
    ]
    return seq.placed(seq.ends_seconds(takes, waits), takes, waits)


def _giver(kind: Kind, part: int, parts: int) -> tuple[Kind, int] | None:
    """Slot that a slot waits for: (kind, part) of the same micro-batch; None for the first forward."""
    if kind == "F":
        return ("F", part - 1) if part else None
    return ("B", part + 1) if part < parts - 1 else ("F", part)


def ends(placed: Sequence[Placed], stages: int) -> list[float]:
    """When each stage has ended."""
    stage_ends = [0.0] * stages
    for run in placed:
        stage_ends[run.stage] = max(stage_ends[run.stage], run.end_seconds)
    return stage_ends


def most_in_flight(order: Sequence[Slot], chunk: int | None = None, weights: Sequence[int] = ()) -> int:
    """The most (micro-batch, chunk) pairs, or those of one chunk, whose forward has run and whose backward has not.

    `weights`: what a pair of each chunk counts, by default 1.
    """
    alive = most = 0
    for slot in order:
        if chunk not in (None, slot.chunk):
            continue
        weight = weights[slot.chunk] if weights else 1
        alive += weight if slot.kind == "F" else -weight
        most = max(most, alive)
    return most


class ReceiveBuffers(NamedTuple):
    """Number of buffers in which one part of the model receives: inputs, and gradients of outputs."""

    inputs: int
    gradients: int


@lru_cache(maxsize=256)
def receive_buffers(schedule: str, stages: int, micro_batches: int, chunks: int) -> tuple[ReceiveBuffers, ...]:
    """The most receive buffers that a stage of a package has at once, by part, in the order of the model. The first
    receives no input, the last no gradient.

    One is made when its receive is posted, and freed when the backward of its micro-batch on this stage has ended
    (emit/runtime/places.py). GPipe and 1F1B post a receive right before what reads it. The interleaved schedule posts
    it once the giver's slot stands in the common order of all stages, each of which takes a slot in turn: a stage that
    waits has posted several.
    """
    parts = stages * chunks
    if schedule == "interleaved":
        ahead = _posted_ahead(stages, min(micro_batches, REPEATS * stages), chunks)
        buffers = [ReceiveBuffers(*(min(count, micro_batches) for count in counts)) for counts in ahead]
    else:
        buffers = [ReceiveBuffers(in_flight(schedule, stage, stages, micro_batches, 1), 1) for stage in range(stages)]
    return tuple(
        ReceiveBuffers(buffer.inputs * (part > 0), buffer.gradients * (part < parts - 1))
        for part, buffer in enumerate(buffers)
    )


@lru_cache(maxsize=256)
def skip_buffers(
    schedule: str, stages: int, micro_batches: int, chunks: int, maker: int, reader: int
) -> ReceiveBuffers:
    """Most buffers at once for what goes from part `maker` to `reader`, past others: a stage may receive it for another
    message between the two, once its maker's slot stands in the common order, and has it until the backward."""
    count = micro_batches if schedule == "gpipe" else min(micro_batches, REPEATS * stages)
    changes = {("F", maker): (1, 0), ("B", reader): (-1, 1), ("B", maker): (0, -1)}
    inputs = gradients = most_inputs = most_gradients = 0
    for slot in chain_order(schedule, stages, count, chunks):
        more = changes.get((slot.kind, slot.part), (0, 0))
        inputs, gradients = inputs + more[0], gradients + more[1]
        most_inputs, most_gradients = max(most_inputs, inputs), max(most_gradients, gradients)
    return ReceiveBuffers(most_inputs, most_gradients)


@lru_cache(maxsize=256)
def _posted_ahead(stages: int, micro_batches: int, chunks: int) -> tuple[ReceiveBuffers, ...]:
    """Buffers of the interleaved schedule: of gradients one more, maybe unused, for turns without computation."""
    orders = [_with_turns(stage, stages, micro_batches, chunks) for stage in range(stages)]
    position, parts = [0] * stages, stages * chunks
    arrived: set[tuple[str, int, int]] = set()  # (F or B, part, micro-batch) whose receive is posted
    alive = {(kind, part): 0 for kind in "FB" for part in range(-1, parts + 1)}
    most = dict(alive)
    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        for stage, order in enumerate(orders):
            slot = order[position[stage]] if position[stage] < len(order) else None
            if slot is not None:
                kind, part = slot.kind, slot.chunk * stages + stage
                if part != (0 if kind == "F" else parts - 1) and (kind, part, slot.micro_batch) not in arrived:
                    continue
                if kind == "B":
                    alive["F", part] -= 1
                    alive["B", part] -= 1
                taker = part + 1 if kind == "F" else part - 1
                arrived.add((kind, taker, slot.micro_batch))
                alive[kind, taker] += 1
                most[kind, taker] = max(most[kind, taker], alive[kind, taker])
            position[stage] += 1
    return tuple(ReceiveBuffers(most["F", part], most["B", part] + 1) for part in range(parts))


def _with_turns(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Slot | None]:
    """A stage's order; None, a turn in which it computes nothing, after the last backward of each chunk."""
    turns: list[Slot | None] = []
    for slot in SCHEDULES["interleaved"](stage, stages, micro_batches, chunks):
        turns.append(slot)
        if slot.kind == "B" and slot.micro_batch == micro_batches - 1:
            turns.append(None)
    return turns
