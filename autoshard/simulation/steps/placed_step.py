"""The step of a placed model: parts of a DAG on their places, with the messages between places.

A place waits for a message from the end of the slot that makes it, for as long as its link takes; the sender computes
on meanwhile. It holds what it received, and what it made, until the backward of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.program.schedules.pipeline_schedule import Placed, Slot, SlotSequence
from autoshard.program.schedules.place_order import PartSlot, placed_order
from autoshard.simulation.step_timeline import PartCosts, PartMessage, StepCosts, StepTimeline


@dataclass(frozen=True)
class PlacedCosts(StepCosts):
    """Costs of `parts` in their order; `part_stages`: the place of each. `sources`: of each part, see `handed_from`."""

    part_stages: tuple[int, ...] = ()
    sources: tuple[tuple[tuple[int, int], ...], ...] = ()
    messages: tuple[PartMessage, ...] = ()
    loss_part: int = 0

    @property
    def chunks(self) -> int:
        return max(self.part_stages.count(stage) for stage in range(len(self.stages)))

    @cached_property
    def part_order(self) -> tuple[PartSlot, ...]:
        """Slots of all places in order."""
        return placed_order(self.schedule, self.part_stages, self.sources, self.loss_part, self.micro_batches)

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """Number of earlier parts on the same place, for each part."""
        return tuple(self.part_stages[:part].count(stage) for part, stage in enumerate(self.part_stages))

    @cached_property
    def sequence(self) -> SlotSequence:
        """Sequence without the givers, of which a slot here may have several."""
        stages = tuple(self.part_stages[slot.part] for slot in self.part_order)
        slots = tuple(Slot(slot.kind, slot.micro_batch, self.chunk_of[slot.part]) for slot in self.part_order)
        last, before = [len(slots)] * len(self.stages), []
        for k, stage in enumerate(stages):
            before.append(last[stage])
            last[stage] = k
        return SlotSequence(stages, slots, tuple(before), (len(slots),) * len(slots))

    def order(self, stage: int) -> Sequence[Slot]:
        sequence = self.sequence
        return [slot for slot_stage, slot in zip(sequence.stages, sequence.slots, strict=True) if slot_stage == stage]

    @property
    def word(self) -> str:
        return "place"

    def chunks_of(self, stage: int) -> int:
        return self.part_stages.count(stage)

    def reads(self, number: int) -> list[int]:
        return sorted({maker for maker, _ in self.sources[number]})

    def number(self, stage: int, chunk: int) -> int:
        return [part for part, part_stage in enumerate(self.part_stages) if part_stage == stage][chunk]

    def part(self, stage: int, chunk: int) -> PartCosts:
        return self.parts[self.number(stage, chunk)]

    def slot_seconds(self, stage: int, slot: Slot) -> float:
        part = self.part(stage, slot.chunk)
        if slot.kind == "B":
            return part.backward_seconds
        return part.forward_seconds + part.first_seconds * (slot.micro_batch == 0)

    def sent_seconds(self, number: int) -> float:
        return 0.0

    def buffer_bytes(self, stage: int) -> float:
        return 0.0

    def sent_bytes(self, stage: int, slot: Slot) -> float:
        return 0.0

    def _peak(self, stage: int) -> float:
        alive = most = 0.0
        for slot in self.order(stage):
            part = self.part(stage, slot.chunk)
            alive += part.saved_bytes * (slot.kind == "F")
            most = max(most, alive + part.working_bytes)
            alive -= part.saved_bytes * (slot.kind == "B")
        return self.stages[stage].static_bytes + most


@dataclass(frozen=True, eq=False)
class PlacedTimeline(StepTimeline):
    @cached_property
    def placed(self) -> tuple[Placed, ...]:
        sequence = self.costs.sequence
        ends = zip(sequence.stages, sequence.slots, self.slot_seconds, self.end_seconds, strict=True)
        return tuple(Placed(stage, slot, end - seconds, seconds) for stage, slot, seconds, end in ends)

    def sent_after(self, placed: Placed) -> tuple[tuple[str, float], ...]:
        costs = self.costs
        assert isinstance(costs, PlacedCosts)
        part, forward = costs.number(placed.stage, placed.slot.chunk), placed.slot.kind == "F"
        what = "output" if forward else "gradient"
        return tuple(
            (f"{what} to place {costs.part_stages[message.reader if forward else message.maker]}", message.seconds)
            for message in costs.messages
            if part == (message.maker if forward else message.reader)
        )


def simulate_places(costs: PlacedCosts) -> PlacedTimeline:
    """The predicted step: each place in its order, each slot once its messages have arrived."""
    sequence, order = costs.sequence, costs.part_order
    seconds = [costs.slot_seconds(*pair) for pair in zip(sequence.stages, sequence.slots, strict=True)]
    gives: list[list[tuple[PartSlot, float]]] = []
    wait = {(message.maker, message.reader): message.seconds for message in costs.messages}
    pairs = sorted({(maker, reader) for reader, inputs in enumerate(costs.sources) for maker, _ in inputs})
    for kind, micro_batch, part in order:
        if kind == "F":
            gives.append([(PartSlot("F", micro_batch, a), wait.get((a, b), 0.0)) for a, b in pairs if b == part])
        else:
            gives.append([(PartSlot("B", micro_batch, b), wait.get((a, b), 0.0)) for a, b in pairs if a == part])
            gives[-1].append((PartSlot("F", micro_batch, costs.loss_part), 0.0))
    at: dict[PartSlot, float] = {}
    free = [0.0] * len(costs.stages)
    for slot, stage, slot_seconds, givers in zip(order, sequence.stages, seconds, gives, strict=True):
        arrived = max((at[giver] + waits for giver, waits in givers), default=0.0)
        free[stage] = at[slot] = max(free[stage], arrived) + slot_seconds
    finished = tuple(end + cost.tail_seconds for end, cost in zip(free, costs.stages, strict=True))
    return PlacedTimeline(costs, tuple(seconds), tuple(at[slot] for slot in order), finished)
