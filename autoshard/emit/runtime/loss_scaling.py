"""Steps in float16: the loss is scaled, so that small gradients do not vanish, and a step that overflows is skipped.

All of it is torch's GradScaler; in addition, an overflow on one device is made known to all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from .autograd_leaves import local

if TYPE_CHECKING:
    from .mesh import ParallelMesh


class LossScaler(GradScaler):
    """One scale on all devices of all stages, used like torch's: `scale`, `unscale_`, `step`, `update`.

    `skipped`: number of skipped steps. Everything stays on the device: no call waits for it except `state_dict`,
    `get_scale`, and the step of an optimizer that isn't fused.
    """

    def __init__(self, mesh: ParallelMesh, scale: float | None = None) -> None:
        super().__init__(mesh.device.type, **({} if scale is None else {"init_scale": scale}))
        self.mesh, self.skipped = mesh, torch.zeros((), device=mesh.device)
        self.scale(self.skipped)  # a stage without a loss has the scale, too
        self._overflow = torch.zeros_like(self.skipped)

    @property
    def overflowed(self) -> bool:
        """Did gradients overflow in the step that was unscaled last, on any device?"""
        return bool(self._overflow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "skipped": int(self.skipped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.skipped.fill_(state_dict.get("skipped", 0))

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales as torch does, but local gradients: DTensor asks only the devices that shard the first one."""
        gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grads = local(parameter.grad)
                    gradients.setdefault((grads.device, grads.dtype), []).append(grads)
        for (device, dtype), grads in gradients.items():
            if dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            overflow = torch.zeros_like(found_inf, device=device)  # tables may lie in host memory
            torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, inv_scale.to(device))
            found_inf += overflow.to(found_inf.device)
        self._agree(found_inf.clamp_(max=1))
        self._overflow = found_inf.view(()).clone()
        self.skipped += self._overflow
        return {found_inf.device: found_inf}

    def _agree(self, overflow: Tensor) -> None:
        self.mesh.joint(tuple(self.mesh.axes)).transport.all_reduce(overflow, "max")()
        stages: Any = self.mesh.stages
        if stages is not None:
            stages.transport.all_reduce(overflow, "max")()
