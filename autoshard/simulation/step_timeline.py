"""A whole training step: every micro-batch through every part of every stage in the schedule's order, with the memory
of each stage.

A part's input is received into a separate buffer, which its micro-batch has until its backward, as is the gradient of
its output: a stage has room for as many as its schedule has at once. The giver is busy until a value is sent; it has an
output until its micro-batch's backward, and room for what was sent, see `StepCosts.sent_bytes`. After its last backward
a stage has its tail: gradients reduced, weights updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats, Integers
from autoshard.program.schedules.pipeline_schedule import (
    KINDS,
    Placed,
    Slot,
    SlotSequence,
    in_flight,
    order_of,
    receive_buffers,
    sequence_of,
    skip_buffers,
)

_APART = 3  # micro-batches: the first, the second, and all others


@dataclass(frozen=True)
class PartCosts:
    """One micro-batch through one part of the model, on the device that holds most.

    `saved_bytes` are held from its forward to its backward, with the output that it hands on; `working_bytes` while one
    of these runs. `received_bytes` and `receive_seconds`: of its input from the part before, and of the gradient back.
    `first_seconds`: what the first forward takes more, for weights that are gathered once a step, a block ahead of
    their use: `once_copy_seconds` of it in any case, and the rest where the gathers, `gather_seconds` of a link, have
    not been started before. A stage that waits for its first input has started those of its first part by then; those
    of a later part run during the second micro-batch in the part before.
    """

    forward_seconds: float
    backward_seconds: float
    saved_bytes: float = 0.0
    working_bytes: float = 0.0
    received_bytes: float = 0.0
    receive_seconds: float = 0.0
    first_seconds: float = 0.0
    once_copy_seconds: float = 0.0
    gather_seconds: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds that gathers add to computations that they overlap."""
        return self.first_seconds - self.once_copy_seconds


@dataclass(frozen=True)
class StageCosts:
    """Bytes that a device of a stage always holds, and `tail`: (name, seconds) after its last backward, once a step."""

    static_bytes: float = 0.0
    tail: tuple[tuple[str, float], ...] = ()

    @property
    def tail_seconds(self) -> float:
        return sum(seconds for _, seconds in self.tail)


class PartMessage(NamedTuple):
    """Values that part `reader` reads of part `maker`, on another stage: what a device of the mesh receives."""

    maker: int
    reader: int
    seconds: float
    bytes: float = 0.0


@dataclass(frozen=True)
class StepCosts:
    """`parts[chunk * stages + stage]`, in the order of the model; `schedule` names one of SCHEDULES. `skips`: messages
    to other parts than the next one."""

    schedule: str
    micro_batches: int
    parts: tuple[PartCosts, ...]
    stages: tuple[StageCosts, ...]
    skips: tuple[PartMessage, ...] = ()

    @property
    def chunks(self) -> int:
        return len(self.parts) // len(self.stages)

    @property
    def sequence(self) -> SlotSequence:
        """The slots of all stages."""
        return sequence_of(self.schedule, len(self.stages), self.micro_batches, self.chunks)

    def order(self, stage: int) -> Sequence[Slot]:
        return order_of(self.schedule, stage, len(self.stages), self.micro_batches, self.chunks)

    @property
    def word(self) -> str:
        """Word for one of `stages`."""
        return "stage"

    def number(self, stage: int, chunk: int) -> int:
        """Number of a part, in the order of the model."""
        return chunk * len(self.stages) + stage

    def chunks_of(self, stage: int) -> int:
        """Number of parts of a stage."""
        return self.chunks

    def reads(self, number: int) -> list[int]:
        """The parts that a part waits for."""
        return [number - 1] if number else []

    def part(self, stage: int, chunk: int) -> PartCosts:
        return self.parts[chunk * len(self.stages) + stage]

    def slot_seconds(self, stage: int, slot: Slot) -> float:
        """Seconds of a slot, with what it hands on; weights gathered ahead have arrived."""
        number = slot.chunk * len(self.stages) + stage
        part = self.parts[number]
        if slot.kind == "B":
            return part.backward_seconds + self.returned_seconds(number)
        first = part.once_copy_seconds if number else part.first_seconds
        once = first if slot.micro_batch == 0 else self._beside_seconds[number] if slot.micro_batch == 1 else 0.0
        return part.forward_seconds + self.sent_seconds(number) + once

    @cached_property
    def _beside_seconds(self) -> tuple[float, ...]:
        """Seconds that gathers for a stage's next part add to the second micro-batch's forward, by part. It reaches a
        stage as much later as it was held up before, and then finds that much less of them left."""
        stages, extra = len(self.stages), [0.0] * len(self.parts)
        for begun in range(stages, len(self.parts), stages):
            late = 0.0
            for number, part in enumerate(self.parts[begun : begun + stages], begun):
                left = max(0.0, 1 - late / part.gather_seconds) if part.gather_seconds else 0.0
                extra[number - stages] = part.exposed_seconds * left
                late += extra[number - stages]
        return tuple(extra)

    @cached_property
    def waits(self) -> tuple[float, ...]:
        """Seconds from the end of each slot's giver to its input, at most 0: what skips a stage is sent later."""
        sequence, skipped = self.sequence, {kind: [0.0] * len(self.parts) for kind in KINDS}
        for message in self.skips:
            skipped["F"][message.maker] -= message.seconds
            skipped["B"][message.reader] -= message.seconds
        waits = []
        for stage, giver in zip(sequence.stages, sequence.giver, strict=True):
            has_giver = giver < len(sequence.slots) and sequence.stages[giver] != stage
            kind, _, chunk = sequence.slots[giver] if has_giver else sequence.slots[0]
            waits.append(skipped[kind][self.number(sequence.stages[giver], chunk)] if has_giver else 0.0)
        return tuple(waits)

    def sent_seconds(self, number: int) -> float:
        """Seconds to send what the forward of a part hands on."""
        following = self.parts[number + 1].receive_seconds if number + 1 < len(self.parts) else 0.0
        return following + sum(skip.seconds for skip in self.skips if skip.maker == number)

    def returned_seconds(self, number: int) -> float:
        """Seconds to send the gradients of a part's inputs after its backward."""
        before = self.parts[number].receive_seconds * (number > 0)
        return before + sum(skip.seconds for skip in self.skips if skip.reader == number)

    def buffer_bytes(self, stage: int) -> float:
        """Bytes of what a stage receives: inputs, gradients of outputs, and all that skips stages. With 1F1B also of
        what it sent: a gradient while the next is computed, and an output of the warm-up."""
        count = receive_buffers(self.schedule, len(self.stages), self.micro_batches, self.chunks)
        parts = range(stage, len(self.parts), len(self.stages))
        received = sum(
            count[part].inputs * self._entering(part) + count[part].gradients * self._entering(part + 1)
            for part in parts
        ) + sum(self._skip_bytes(skip, stage) for skip in self.skips)
        if self.schedule != "1f1b":
            return received
        warm_up = min(self.micro_batches, len(self.stages) - stage)
        return received + self._entering(stage) * (self.micro_batches > 1) + self._entering(stage + 1) * (warm_up > 1)

    def _skip_bytes(self, skip: PartMessage, stage: int) -> float:
        stages = len(self.stages)
        count = skip_buffers(self.schedule, stages, self.micro_batches, self.chunks, skip.maker, skip.reader)
        received = count.inputs * (skip.reader % stages == stage) + count.gradients * (skip.maker % stages == stage)
        sent = count.inputs * (skip.reader % stages == stage) * (self.schedule == "1f1b")
        return skip.bytes * (received + sent)

    def sent_bytes(self, stage: int, slot: Slot) -> float:
        """Bytes that a backward may leave behind: with GPipe and the interleaved schedule what was sent, an output and
        the gradient of an input, counts to the step's end. Gradients take the place of inputs' buffers."""
        if slot.kind == "F" or self.schedule == "1f1b":
            return 0.0
        part = slot.chunk * len(self.stages) + stage
        more = slot.micro_batch < self.reused_inputs(stage, slot.chunk)
        skips = sum(skip.bytes for skip in self.skips if part in (skip.maker, skip.reader))
        return self._entering(part + 1) + self._entering(part) * more + skips

    def left_behind(self, stage: int) -> tuple[Floats, Floats]:
        """[chunk]: `sent_bytes` of backwards of micro-batches whose input's buffer another one takes, and of others."""
        reused, last = (
            np.array([self.sent_bytes(stage, Slot("B", number, chunk)) for chunk in range(self.chunks)])
            for number in (0, self.micro_batches - 1)
        )
        return reused, last

    def reused_inputs(self, stage: int, chunk: int) -> int:
        """Number of micro-batches, the first ones, whose input buffer another one takes."""
        counts = receive_buffers(self.schedule, len(self.stages), self.micro_batches, self.chunks)
        return self.micro_batches - counts[chunk * len(self.stages) + stage].inputs

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Most bytes that each stage holds: they depend on its order, not on the seconds of its slots."""
        return tuple(map(self._peak, range(len(self.stages))))

    def _peak(self, stage: int) -> float:
        chunks, forward, micro_batches = _slot_arrays(
            self.schedule, stage, len(self.stages), self.micro_batches, self.chunks
        )
        parts = [self.part(stage, chunk) for chunk in range(self.chunks)]
        kept_bytes = np.array([part.saved_bytes for part in parts])[chunks]
        sends = self.schedule != "1f1b"
        freed = kept_bytes - (self._sent(stage, micro_batches, chunks) if sends else 0.0)
        alive = np.cumsum(np.where(forward, kept_bytes, -freed)) + np.where(forward, 0.0, freed)
        working = np.array([part.working_bytes for part in parts])[chunks]
        base = self.stages[stage].static_bytes + self.buffer_bytes(stage)
        return base + float((alive + working).max(initial=0.0))

    def _sent(self, stage: int, micro_batches: Integers, chunks: Integers) -> Floats:
        """`sent_bytes` of every slot; it depends on the chunk, and on whether the input's buffer is used again."""
        last, all_chunks = self.micro_batches - 1, range(self.chunks)
        late, early = (
            np.array([self.sent_bytes(stage, Slot("B", number, chunk)) for chunk in all_chunks]) for number in (last, 0)
        )
        until = np.array([self.reused_inputs(stage, chunk) for chunk in all_chunks])
        return np.asarray(np.where(micro_batches < until[chunks], early[chunks], late[chunks]))

    def _entering(self, part: int) -> float:
        """Bytes that a stage gives to another one; nothing enters the first part, nor one after the last."""
        return self.parts[part].received_bytes if 0 < part < len(self.parts) and len(self.stages) > 1 else 0.0


@dataclass(frozen=True, eq=False)
class StepTimeline:
    """`slot_seconds` and `end_seconds`: what each slot of `StepCosts.sequence` takes, and when it ends.
    `memory[stage]`: the curve as (seconds, bytes), bytes from that time on."""

    costs: StepCosts
    slot_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]
    stage_seconds: tuple[float, ...]  # when each stage has ended, its tail with it

    @property
    def stages(self) -> int:
        return len(self.stage_seconds)

    @property
    def step_seconds(self) -> float:
        return max(self.stage_seconds)

    def sent_after(self, placed: Placed) -> tuple[tuple[str, float], ...]:
        """(what, seconds) sent from a slot's end on, during the next one; in a pipeline it is a part of the slot."""
        return ()

    def busy_seconds(self, stage: int) -> float:
        """Seconds of a stage's slots and tail; the rest of the step it waits."""
        return sum(p.duration_seconds for p in self.by_stage[stage]) + self.costs.stages[stage].tail_seconds

    @cached_property
    def placed(self) -> tuple[Placed, ...]:
        """Every slot with its time."""
        return tuple(self.costs.sequence.placed(self.end_seconds, self.slot_seconds, self.costs.waits))

    @cached_property
    def by_stage(self) -> tuple[tuple[Placed, ...], ...]:
        """The slots of each stage, in order."""
        stages: list[list[Placed]] = [[] for _ in self.stage_seconds]
        for placed in self.placed:
            stages[placed.stage].append(placed)
        return tuple(map(tuple, stages))

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        return tuple(self._curve(stage) for stage in range(self.stages))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak bytes of each stage."""
        return self.costs.peak_bytes

    def _curve(self, stage: int) -> tuple[tuple[float, float], ...]:
        base = self.costs.stages[stage].static_bytes + self.costs.buffer_bytes(stage)
        alive, curve = 0.0, [(0.0, base)]
        for placed in self.by_stage[stage]:
            part = self.costs.part(stage, placed.slot.chunk)
            alive += part.saved_bytes if placed.slot.kind == "F" else 0.0
            curve.append((placed.start_seconds, base + alive + part.working_bytes))
            if placed.slot.kind == "B":
                alive -= part.saved_bytes - self.costs.sent_bytes(stage, placed.slot)
            curve.append((placed.end_seconds, base + alive))
        return tuple(curve)


def simulate_step(costs: StepCosts) -> StepTimeline:
    """The predicted step. ValueError where a schedule can't run."""
    stages, sequence = len(costs.stages), costs.sequence
    kinds = [
        (stage, Slot(kind, micro_batch, chunk))
        for stage in range(stages)
        for chunk in range(costs.chunks)
        for kind in KINDS
        for micro_batch in range(_APART)
    ]
    each = [costs.slot_seconds(stage, slot) for stage, slot in kinds]
    seconds = [each[kind] for kind in _slot_kinds(costs.schedule, stages, costs.micro_batches, costs.chunks)]
    waits = costs.waits if costs.skips else None
    ends = sequence.ends_seconds(seconds, waits)
    if waited := _waited_seconds(costs, seconds, ends):
        for slot, more in waited.items():
            seconds[slot] += more
        ends = sequence.ends_seconds(seconds, waits)
    last = [0.0] * stages
    for stage, end in zip(sequence.stages, ends, strict=True):
        last[stage] = end
    finished = tuple(end + cost.tail_seconds for end, cost in zip(last, costs.stages, strict=True))
    return StepTimeline(costs, tuple(seconds), tuple(ends), finished)


def _waited_seconds(costs: StepCosts, seconds: Sequence[float], ends: Sequence[float]) -> dict[int, float]:
    """Waits of first forwards for gathers started ahead that have not ended when their input comes: no longer than if
    they had not been started. `ends`: of slots, as if gathers had ended."""
    stages = len(costs.stages)
    waited: dict[int, float] = {}
    if not any(part.gather_seconds for part in costs.parts[1:]):
        return waited
    first = _first_forwards(costs.schedule, stages, costs.micro_batches, costs.chunks)
    for number, (part, slot) in enumerate(zip(costs.parts, first, strict=True)):
        begun = ends[first[number - stages]] if number >= stages else 0.0
        wait = min(part.exposed_seconds, begun + part.gather_seconds - (ends[slot] - seconds[slot]))
        if number and wait > 0:
            waited[slot] = wait
    return waited


@lru_cache(maxsize=128)
def _first_forwards(schedule: str, stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """Place in the sequence of the first micro-batch's forward, for each part."""
    sequence = sequence_of(schedule, stages, micro_batches, chunks)
    first = {
        slot.chunk * stages + stage: place
        for place, (stage, slot) in enumerate(zip(sequence.stages, sequence.slots, strict=True))
        if slot.kind == "F" and slot.micro_batch == 0
    }
    return tuple(first[number] for number in range(stages * chunks))


@lru_cache(maxsize=128)
def _slot_kinds(schedule: str, stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    """Number of each slot's kind in a sequence: (stage, chunk, kind, which micro-batch of those that differ)."""
    sequence = sequence_of(schedule, stages, micro_batches, chunks)
    return tuple(
        ((stage * chunks + slot.chunk) * 2 + KINDS.index(slot.kind)) * _APART + min(slot.micro_batch, _APART - 1)
        for stage, slot in zip(sequence.stages, sequence.slots, strict=True)
    )


@lru_cache(maxsize=512)
def _slot_arrays(
    schedule: str, stage: int, stages: int, micro_batches: int, chunks: int
) -> tuple[Integers, NDArray[np.bool_], Integers]:
    """Arrays over a stage's slots in order: the chunk, is it a forward, the micro-batch."""
    slots = order_of(schedule, stage, stages, micro_batches, chunks)
    return (
        np.array([slot.chunk for slot in slots], dtype=np.int64),
        np.array([slot.kind == "F" for slot in slots], dtype=bool),
        np.array([slot.micro_batch for slot in slots], dtype=np.int64),
    )


def live_micro_batches(schedule: str, stages: int, micro_batches: int, chunks: int) -> Floats:
    """The most that each stage keeps at once, a chunk counted as 1 / chunks."""
    return np.array([in_flight(schedule, stage, stages, micro_batches, chunks) / chunks for stage in range(stages)])
