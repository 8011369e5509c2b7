"""Steps with a non-finite loss or gradients: skipped, or the end of the run; never an update, never a checkpoint.

All devices decide alike: the gradients' norm is the same number on all, and the loss is summed along with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .autograd_leaves import local
from .parameters import sharding

if TYPE_CHECKING:
    from .loss_scaling import LossScaler
    from .mesh import ParallelMesh

EXIT_CODE = 7  # of a run that this ends
_FLOAT16 = torch.finfo(torch.float16)
LEAST_SCALE = _FLOAT16.smallest_normal * _FLOAT16.eps  # of a loss: what overflows below it is no matter of scale


class NonFinite(Exception):
    """Ends the run, on all devices in the same step."""


def start_loss_sum(
    mesh: ParallelMesh, loss: Tensor, axes: Sequence[str], counts: Sequence[float] = ()
) -> Callable[[], Tensor]:
    """Loss of the global batch, from each device's partial sum over `axes`. Calling the returned function waits for it.

    With `counts`, their sums over all devices follow it.
    """
    axes = [name for name in axes if name in mesh.axes]  # another place, which makes no loss, may lack some
    total = loss.detach().to(torch.float32).clone()
    if counts:
        tail = total.new_tensor(counts) if any(counts) else total.new_zeros(len(counts))
        total = torch.cat([total.reshape(1), tail])
    first = mesh[axes[0]].transport.all_reduce(total) if axes else None

    def whole() -> Tensor:
        if first is not None:
            first()
        for axis in axes[1:]:
            mesh[axis].transport.all_reduce(total)()
        for axis in mesh.axes if counts else ():  # in one order on all devices
            if axis in axes:
                continue
            mesh[axis].transport.all_reduce(total[1:])()
        return total if mesh.stages is None else mesh.stages.all_reduce(total)

    return whole


class FiniteSteps:
    """Judges each step before its update. `most`: number of consecutive steps to skip; one more raises NonFinite.

    In float16, gradients that overflow under the scale of a finite loss are left to the scaler, and don't count.
    `buffers`: those that a forward updates; a skipped step must not change them. `counts`: numbers of this device,
    whose sums over all are `sums` after each step: agreeing on something costs no separate collective.
    """

    def __init__(
        self, mesh: ParallelMesh, loss_axes: Sequence[str], most: int = 0, scaler: LossScaler | None = None,
        buffers: Iterable[Tensor] | None = None, counts: Callable[[], Sequence[float]] = tuple,
    ) -> None:  # fmt: skip
        self.mesh, self.loss_axes, self.most = mesh, loss_axes, most
        self.scaler = scaler
        self.buffers = buffers
        self.saved: list[tuple[Tensor, Tensor]] | None = None
        self.counts, self.sums = counts, list[float]()
        self.in_a_row, self.left_out, self.loss, self.norm = 0, 0, 0.0, 0.0

    def before(self) -> None:
        """Saves the buffers before a forward that updates them."""
        if self.most and self.buffers is not None:
            self.saved = [(local(buffer), local(buffer).clone()) for buffer in self.buffers]

    def begin(self, loss: Tensor) -> None:
        """Starts the sum of the loss, in parallel to the norm."""
        self.whole = start_loss_sum(self.mesh, loss, self.loss_axes, self.counts())

    def accepts(self, norm: Tensor) -> bool:
        """May the optimizer step? The same answer on all devices."""
        self.loss, *self.sums = self.whole().reshape(-1).tolist()
        self.norm = float(norm)
        if math.isfinite(self.loss) and math.isfinite(self.norm):
            self.in_a_row = 0
            return True
        if self.scaler is not None and math.isfinite(self.loss) and self._overflowed(self.scaler):
            return True
        if self.in_a_row == self.most:
            before = f" after {self.most} in a row that were left out" * bool(self.most)
            before += " (are all labels ignored?)" * (math.isnan(self.loss) and self.norm == 0)
            raise NonFinite(f"{self.words()}{before}: nothing is updated and nothing saved with these")
        self.in_a_row, self.left_out = self.in_a_row + 1, self.left_out + 1
        if self.saved is not None:
            for buffer, was in self.saved:
                buffer.copy_(was)
        return False

    def _overflowed(self, scaler: LossScaler) -> bool:
        return scaler.overflowed and scaler.get_scale() >= LEAST_SCALE

    def words(self) -> str:
        return f"loss {self.loss:.6f}, gradient norm {self.norm:.4f}"

    def check_saved(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raises NonFinite if the values to save are not finite, on any device. All must call it."""
        bad_name = next((name for name, x in _saved(model, optimizer) if not _is_finite(x)), "")
        bad = torch.tensor(float(bool(bad_name)), device=self.mesh.device)
        self.mesh.joint(tuple(self.mesh.axes)).transport.all_reduce(bad, "max")()
        if self.mesh.stages is not None:
            self.mesh.stages.transport.all_reduce(bad, "max")()
        if bool(bad):
            where = f"{bad_name} holds" if bad_name else "parameters or the optimizer's state hold"
            raise NonFinite(f"{where} NaN or inf after the update: nothing is saved")


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Values that an update has changed; not buffers, which may hold inf, as masks do."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            yield sharding(parameter).name, parameter
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{slot} of {sharding(parameter).name}", value


@torch.no_grad()
def _is_finite(x: Tensor) -> bool:
    held = local(x).detach()
    held = torch.view_as_real(held) if held.is_complex() else held
    if not held.is_floating_point() or not held.numel():
        return True
    if held.element_size() == 1:  # float8 has no order in torch
        held = held.float()
    return bool(torch.isfinite(torch.stack(torch.aminmax(held))).all())
