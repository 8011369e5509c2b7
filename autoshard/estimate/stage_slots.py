"""Seconds of every slot of a pipeline: a stage's layers, its ends, and the host that starts their kernels."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.estimate.gradient_sync import Sync, Syncs, waiting
from autoshard.estimate.layer_costs import Piece, Pieces
from autoshard.estimate.stage_layers import part_layers
from autoshard.estimate.transformer import SHARDED, TrainingRun, Transformer
from autoshard.program.schedules.pipeline_schedule import Slot

_NOTHING = Piece(0.0, 0.0, 0.0, 0.0, 0, 0)
Part = tuple[str, float]  # a name, seconds


@dataclass(frozen=True)
class Host:
    """The processor that starts kernels, `dispatch_seconds` each, ahead of the device as far as it can.

    A stretch takes the soft maximum (an `exponent`-norm) of both times: within it sometimes one waits and sometimes the
    other. `stall_seconds`: idle time of the device in every layer and micro-batch though the host is ahead.
    """

    dispatch_seconds: float = 0.0
    exponent: float = 6.0
    stall_seconds: float = 0.0

    def bound(self, seconds: float, kernels: int) -> float:
        """Time of work that takes the device `seconds` and that the host starts as `kernels` operators."""
        host_seconds = kernels * self.dispatch_seconds
        if host_seconds <= 0:
            return seconds
        largest, q = max(seconds, host_seconds), self.exponent
        total: float = largest * ((seconds / largest) ** q + (host_seconds / largest) ** q) ** (1 / q)
        return total


@dataclass(frozen=True)
class Stages:
    """`pieces`: those of one micro-batch; `syncs`: their exchange between replicas. `beside`: slowdown of computation
    that overlaps a collective."""

    model: Transformer
    run: TrainingRun
    pieces: Pieces
    syncs: Syncs
    host: Host
    beside: float = 0.0

    def layers(self, stage: int, chunk: int) -> int:
        """Layers of one chunk of a stage."""
        return part_layers(self.model, self.run)[chunk * self.run.pp + stage]

    @property
    def recomputed(self) -> Piece:
        """Forward work that the backward of a layer recomputes."""
        return {
            "none": _NOTHING,
            "selective": self.pieces.core,
            "operators": self.pieces.recomputed,
            "full": self.pieces.layer,
        }[self.run.recompute]

    @property
    def slowdown(self) -> float:
        """Factor by which the host lengthens a layer, forward and backward together: it runs ahead over both."""
        layer, rerun = self.pieces.layer, self.recomputed
        seconds = layer.forward_seconds + layer.backward_seconds + rerun.forward_seconds
        kernels = layer.forward_kernels + layer.backward_kernels + rerun.forward_kernels
        return self.host.bound(seconds + self.host.stall_seconds, kernels) / seconds

    def seconds(self, stage: int, slot: Slot) -> float:
        return sum(self._computed(stage, slot)) + self.replica_seconds(stage, slot)

    def _computed(self, stage: int, slot: Slot) -> list[float]:
        """Seconds of the pieces of a slot, in forward order."""
        layer = self.pieces.layer
        each = layer.forward_seconds if slot.kind == "F" else layer.backward_seconds + self.recomputed.forward_seconds
        first, last = self._ends(stage, slot)
        count = self.layers(stage, slot.chunk)
        embedding = [self._end_seconds(self.pieces.embedding, slot)] * first
        return [*embedding, *[each * self.slowdown] * count, *[self._end_seconds(self.pieces.head, slot)] * last]

    def _end_seconds(self, piece: Piece, slot: Slot) -> float:
        if slot.kind == "F":
            return self.host.bound(piece.forward_seconds, piece.forward_kernels)
        return self.host.bound(piece.backward_seconds, piece.backward_kernels)

    def _ends(self, stage: int, slot: Slot) -> tuple[bool, bool]:
        """Does the slot run the embedding (first part of the model), and does it run the head (last part)?"""
        part = slot.chunk * self.run.pp + stage
        return part == 0, part == self.run.pp * self.run.interleave - 1

    def _synced(self, stage: int, slot: Slot) -> list[Sync]:
        """Exchanges between replicas of the pieces of a slot, in forward order."""
        first, last = self._ends(stage, slot)
        count = self.layers(stage, slot.chunk)
        return [*[self.syncs.embedding] * first, *[self.syncs.layer] * count, *[self.syncs.head] * last]

    def replica_seconds(self, stage: int, slot: Slot) -> float:
        """Seconds each micro-batch waits for replicas: gathered weights (ZeRO 3), scattered gradients (2 and 3)."""
        zero = self.run.zero
        gathers = zero == 3 or (zero == 2 and self.run.precision in SHARDED and slot.kind == "F")
        return self._waiting(stage, slot, gathers, zero >= 2 and slot.kind == "B")

    def step_end_seconds(self, stage: int) -> float:
        """Seconds a step waits for replicas once: gradients reduced (below ZeRO 2), new weights gathered (1 and 2)."""
        chunks = range(self.run.interleave)
        reduced = sum(self._waiting(stage, Slot("B", 0, chunk), False, self.run.zero < 2) for chunk in chunks)
        once = self.run.zero in (1, 2) and self.run.precision not in SHARDED
        gathered = sum(self._waiting(stage, Slot("F", 0, chunk), once, False) for chunk in chunks)
        return reduced + gathered

    def _waiting(self, stage: int, slot: Slot, gathers: bool, reduces: bool) -> float:
        if self.run.replicas == 1 or not (gathers or reduces):
            return 0.0
        computed, synced = self._computed(stage, slot), self._synced(stage, slot)
        if slot.kind == "B":
            computed, synced = computed[::-1], synced[::-1]
        gather = [sync.gather_seconds * gathers for sync in synced]
        reduce = [sync.reduce_seconds * reduces for sync in synced]
        cast = sum(sync.cast_seconds * reduces for sync in synced)
        return cast + waiting(computed, gather, reduce, self.run.overlap, self.beside)

    def parts(self, stage: int, order: list[Slot]) -> tuple[Part, ...]:
        """Seconds of a stage in a step, by kind of work; they add up to those of its slots."""
        layer, rerun = self.pieces.layer, self.recomputed
        count = sum(self.layers(stage, slot.chunk) for slot in order if slot.kind == "F")
        communication = layer.forward_communication_seconds + layer.backward_communication_seconds
        dispatch = layer.forward_dispatch_seconds + layer.backward_dispatch_seconds + rerun.forward_dispatch_seconds
        compute = layer.forward_seconds + layer.backward_seconds - communication
        stalled = (compute + communication + rerun.forward_seconds) * (self.slowdown - 1)
        return (
            ("layers: compute", count * compute),
            ("layers: recompute", count * (rerun.forward_seconds - rerun.forward_communication_seconds)),
            (
                "layers: tensor-parallel communication",
                count * (communication + rerun.forward_communication_seconds - dispatch),
            ),
            ("layers: tokens to their experts and back", count * dispatch),
            ("layers: waiting for the host", count * stalled),
            ("embedding and head", sum(sum(self._end_parts(stage, slot)) for slot in order)),
            ("weights and gradients of each micro-batch", sum(self.replica_seconds(stage, slot) for slot in order)),
        )

    def _end_parts(self, stage: int, slot: Slot) -> list[float]:
        first, last = self._ends(stage, slot)
        pieces = [self.pieces.embedding] * first + [self.pieces.head] * last
        return [self._end_seconds(piece, slot) for piece in pieces]

    def families(self, stage: int, order: list[Slot]) -> dict[str, float]:
        """Seconds of these slots by what prices them (see costs/bands.py); waiting for the host is left out."""
        totals: dict[str, float] = {}
        for slot in order:
            for piece, times in self._pieces(stage, slot):
                for name, seconds in piece.forward_families if slot.kind == "F" else piece.backward_families:
                    totals[name] = totals.get(name, 0.0) + times * seconds
            for name, seconds in self.recomputed.forward_families if slot.kind == "B" else ():
                totals[name] = totals.get(name, 0.0) + self.layers(stage, slot.chunk) * seconds
            totals["collective"] = totals.get("collective", 0.0) + self.replica_seconds(stage, slot)
        return totals

    def _pieces(self, stage: int, slot: Slot) -> list[tuple[Piece, int]]:
        """Pieces that run in a slot, and how often."""
        first, last = self._ends(stage, slot)
        return [
            (self.pieces.layer, self.layers(stage, slot.chunk)),
            (self.pieces.embedding, int(first)),
            (self.pieces.head, int(last)),
        ]
