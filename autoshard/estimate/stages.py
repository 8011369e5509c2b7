"""Seconds of every slot of a pipeline: a stage's layers, its ends, and the host that starts their kernels."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.estimate.pieces import Piece, Pieces
from autoshard.estimate.shape import Run, Transformer
from autoshard.simulate.pipeline import Slot

_NOTHING = Piece(0.0, 0.0, 0.0, 0.0, 0, 0)
Part = tuple[str, float]  # a name, seconds


@dataclass(frozen=True)
class Host:
    """The processor that starts kernels, `dispatch_seconds` each, ahead of the device as far as it can.

    A stretch takes the soft maximum (an `exponent`-norm) of both times: within it now one waits and now the other.
    """

    dispatch_seconds: float = 0.0
    exponent: float = 3.0

    def bound(self, seconds: float, kernels: int) -> float:
        """Seconds of work that the device does in `seconds`, started as `kernels` operators."""
        own = kernels * self.dispatch_seconds
        if own <= 0:
            return seconds
        largest, q = max(seconds, own), self.exponent
        total: float = largest * ((seconds / largest) ** q + (own / largest) ** q) ** (1 / q)
        return total


@dataclass(frozen=True)
class Stages:
    """`made` are the pieces of one micro-batch; every stage has as many layers."""

    model: Transformer
    run: Run
    made: Pieces
    host: Host

    @property
    def layers(self) -> int:
        """Of one chunk."""
        return self.model.layers // (self.run.pp * self.run.interleave)

    @property
    def again(self) -> Piece:
        """What runs forward once more in the backward of a layer."""
        return {"none": _NOTHING, "selective": self.made.core, "full": self.made.layer}[self.run.recompute]

    @property
    def slowdown(self) -> float:
        """What the host makes of a layer's seconds, forward and backward together: it runs ahead over both."""
        own, again = self.made.layer, self.again
        seconds = own.forward_seconds + own.backward_seconds + again.forward_seconds
        kernels = own.forward_kernels + own.backward_kernels + again.forward_kernels
        return self.host.bound(seconds, kernels) / seconds

    def seconds(self, stage: int, slot: Slot) -> float:
        own = self.made.layer
        each = own.forward_seconds if slot.kind == "F" else own.backward_seconds + self.again.forward_seconds
        return self.layers * each * self.slowdown + self._ends(stage, slot)

    def _ends(self, stage: int, slot: Slot) -> float:
        return sum(
            self.host.bound(p.forward_seconds, p.forward_kernels)
            if slot.kind == "F"
            else self.host.bound(p.backward_seconds, p.backward_kernels)
            for p in self._at_ends(stage, slot)
        )

    def _at_ends(self, stage: int, slot: Slot) -> list[Piece]:
        """The embedding of the first part of the model, the head of the last."""
        part = slot.chunk * self.run.pp + stage
        own = [self.made.embedding] * (part == 0)
        return own + [self.made.head] * (part == self.run.pp * self.run.interleave - 1)

    def parts(self, stage: int, order: list[Slot]) -> tuple[Part, ...]:
        """What a stage is busy with in a step; they add up to the seconds of its slots."""
        own, again = self.made.layer, self.again
        count = self.layers * sum(slot.kind == "F" for slot in order)
        communication = own.forward_communication_seconds + own.backward_communication_seconds
        compute = own.forward_seconds + own.backward_seconds - communication
        waiting = (compute + communication + again.forward_seconds) * (self.slowdown - 1)
        return (
            ("layers: compute", count * compute),
            ("layers: computed again", count * (again.forward_seconds - again.forward_communication_seconds)),
            ("layers: tensor-parallel communication", count * (communication + again.forward_communication_seconds)),
            ("layers: waiting for the host", count * waiting),
            ("embedding and head", sum(self._ends(stage, slot) for slot in order)),
        )

    def families(self, stage: int, order: list[Slot]) -> dict[str, float]:
        """The seconds of the same slots by what prices them (see costs/bands.py); waiting for the host is left out."""
        found: dict[str, float] = {}
        for slot in order:
            for piece, times in self._pieces(stage, slot):
                for name, seconds in piece.forward_families if slot.kind == "F" else piece.backward_families:
                    found[name] = found.get(name, 0.0) + times * seconds
            for name, seconds in self.again.forward_families if slot.kind == "B" else ():
                found[name] = found.get(name, 0.0) + self.layers * seconds
        return found

    def _pieces(self, stage: int, slot: Slot) -> list[tuple[Piece, int]]:
        """What runs in a slot, and how often."""
        return [(self.made.layer, self.layers), *((piece, 1) for piece in self._at_ends(stage, slot))]
