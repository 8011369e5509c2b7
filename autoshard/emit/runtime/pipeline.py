"""The micro-batches of a step through the stages, by the schedules of torch.distributed.pipelining.

What stages hand on is known beforehand (`Handed`): found at run time, it would take a forward and backward more, which
update buffers. Every stage has the inputs of all micro-batches; only what is made of them travels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .axis import held_indices

if TYPE_CHECKING:
    from .loss_scaling import LossScaler
    from .mesh import ParallelMesh
    from .receive_buffers import ReceivingStage

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


class Handed(NamedTuple):
    """A value that one part gives to the next: its global shape, dtype, layout, and if it carries a gradient.

    `at`: the shape at other dynamic sizes, which each rank computes: none is sent.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    has_gradient: bool
    at: Callable[..., tuple[int, ...]] | None = None

    def whole(self, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The global shape; as planned, or at these sizes."""
        return self.shape if self.at is None or not sizes else self.at(**sizes)

    def example(self, mesh: ParallelMesh, sizes: Mapping[str, int] | None = None) -> Tensor:
        """This rank's part of it, without memory; as planned, or at these sizes."""
        shape = [len(held_indices(size, dim, self.layout, mesh)) for dim, size in enumerate(self.whole(sizes))]
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=self.has_gradient)


class _Part(nn.Module):
    """One part of the model as the schedule calls it: with what the part before has handed on, in order of the
    micro-batches. The last part gives the loss."""

    def __init__(
        self, model: nn.Module, number: int, count: int, inputs: Sequence[int], labels: Sequence[int],
        mesh: ParallelMesh,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.inputs, self.labels, self.mesh = model, inputs, labels, mesh
        self.is_first, self.is_last = number == 0, number == count - 1
        self.begin([], [])

    def begin(self, micro_batches: Sequence[Sequence[Tensor]], shares: Sequence[Sequence[Tensor]]) -> None:
        self.micro_batches, self.shares, self.next = micro_batches, shares, 0

    def forward(self, *handed: Tensor) -> Any:
        number, self.next = self.next, self.next + 1
        given = [self.micro_batches[number][position] for position in self.inputs]
        with self.mesh.micro_batch(number, [self.shares[number][loss] for loss in self.labels]):
            made = self.model(*(() if self.is_first else handed), *given)
        if self.is_last:
            return made / len(self.micro_batches)
        return tuple(x.contiguous() for x in (made if isinstance(made, tuple) else (made,)))


def _known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those that this torch has: 2.6 scales no gradients; to 2.9 the outputs that nobody reads are put together."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in names}


class _Works(list[dist.Work]):
    def wait(self) -> None:
        for work in self:
            work.wait()


def _together(transfers: list[dist.P2POp], desc: str | None = None) -> _Works:
    """torch to 2.7 waits for the last of several transfers alone, which under gloo says nothing of the others."""
    return _Works(dist.batch_isend_irecv(transfers) if transfers else ())


class Pipeline:
    """The parts of the model that this stage holds. `handed[n]`: what part n is given; `inputs[n]`: the positions of
    the model's inputs that it takes; `labels[n]`: those of its losses among all that are means over labels.
    `kind` of stage is given, as its module imports pipelining, too."""

    def __init__(
        self, parts: nn.ModuleList, mesh: ParallelMesh, schedule: str, micro_batches: int,
        handed: Sequence[Sequence[Handed]], inputs: Sequence[Sequence[int]], labels: Sequence[Sequence[int]],
        kind: type[ReceivingStage],
    ) -> None:  # fmt: skip
        # Here, as they import dynamo and inductor, which nothing else needs that starts a rank.
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        stages, count = mesh.stages, len(handed)
        assert stages is not None
        self.parts, self.stages, self.micro_batches, self.mesh = [], stages, micro_batches, mesh
        self.handed, self.kinds = handed, []
        made = []
        for number, model in zip(stages.parts, parts, strict=True):
            part = _Part(model, number, count, inputs[number], labels[number], mesh)
            before = [value.example(mesh) for value in handed[number]] or [torch.empty((1,), device="meta")]
            after = [value.example(mesh) for value in handed[number + 1]] if number + 1 < count else [torch.empty(())]
            made.append(
                kind(
                    part, number, count, mesh.device,
                    input_args=tuple(before), output_args=tuple(after), group=stages.group,
                )
            )  # fmt: skip
            self.parts.append(part)
            self.kinds.append(made[-1])
        self.counts_labels = any(part.labels for part in self.parts)
        made_of = getattr(pipelining, SCHEDULES[schedule])
        stage = made if schedule == "interleaved" else made[0]
        self.schedule = made_of(stage, micro_batches, loss_fn=self._loss, **_known(made_of.__init__, scale_grads=False))
        self.step_options = _known(self.schedule.step, return_outputs=False)
        if not self.step_options:
            self.schedule._merge_outputs = lambda _: None
        if not hasattr(schedules, "_wait_batch_p2p"):
            schedules._batch_p2p = _together
        self.numbers = torch.zeros(micro_batches, device=mesh.device)  # what the schedule deals out: nobody reads it

    def _received(self, number: int, sizes: Mapping[str, int]) -> tuple[list[Tensor], list[Tensor]]:
        """Without memory: what part `number` is handed at these sizes, and the gradients of what it hands on."""
        after = self.handed[number + 1] if number + 1 < len(self.handed) else ()
        return [value.example(self.mesh, sizes) for value in self.handed[number]], [
            value.example(self.mesh, sizes) for value in after
        ]

    def _loss(self, loss: Tensor, _: Tensor) -> Tensor:
        self.losses.append(loss.detach())
        return loss if self.scaler is None else self.scaler.scale(loss)

    def run(
        self,
        micro_batches: Sequence[Sequence[Tensor]],
        shares: Sequence[Sequence[Tensor]],
        scaler: LossScaler | None = None,
        sizes: Sequence[Mapping[str, int]] = (),
    ) -> list[Tensor]:
        """Forward and backward of all; the gradients are those of the mean of the losses (by the scale of `scaler`).
        Returns the losses on the last stage, elsewhere nothing. `shares`: see `label_shares`, where it `counts_labels`.
        `sizes`: the dynamic ones of each micro-batch.
        """
        self.losses: list[Tensor] = []
        for number, stage in zip(self.stages.parts, self.kinds, strict=True):
            stage.received = [self._received(number, own) for own in sizes]
        self.scaler = scaler
        for part in self.parts:
            part.begin(micro_batches, shares)
        made: list[Tensor] = []
        given = (self.numbers,) if self.stages.index == 0 else ()
        if self.stages.is_last:
            self.schedule.step(*given, target=self.numbers, losses=made, **self.step_options)
        else:
            self.schedule.step(*given, **self.step_options)
        for part in self.parts:
            part.begin([], [])
        return [loss * self.micro_batches for loss in self.losses]
