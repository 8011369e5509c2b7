"""After backward: the sums over devices that are still missing, and clipping by the global norm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .mesh import ParallelMesh
from .parameters import local, sharding

_IN_FLIGHT = 2  # buckets being reduced at once; each holds a flat copy of its gradients


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The local gradient; zeros where backward did not reach the parameter on this device."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


@torch.no_grad()
def reduce_gradients(
    mesh: ParallelMesh,
    parameters: Mapping[str, nn.Parameter],
    buckets: Iterable[tuple[Sequence[str], Sequence[str]]],
) -> None:
    """Sums local gradients over devices, in place. A bucket, (axis names, parameter names), is one flat all-reduce."""
    pending: deque[tuple[Tensor, list[Tensor], Callable[[], object]]] = deque()
    for axes, names in buckets:
        gradients = [_gradient(parameters[name]) for name in names]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        pending.append((flat, gradients, mesh.joint(axes).transport.all_reduce(flat)))
        if len(pending) > _IN_FLIGHT:
            _write_back(*pending.popleft())
    for bucket in pending:
        _write_back(*bucket)


def _write_back(flat: Tensor, gradients: list[Tensor], wait: Callable[[], object]) -> None:
    wait()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def clip_gradients(mesh: ParallelMesh, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

    A parameter's squares are summed over the axes that shard it, and count once over those that replicate it.
    """
    gradients: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.setdefault(sharding(parameter).axes(), []).append(local(parameter.grad))
    total = torch.zeros((), device=mesh.device)
    for axes, group in sorted(gradients.items()):
        dtype = torch.float64 if group[0].dtype == torch.float64 else torch.float32
        norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in group])
        squares = norms.square().sum()
        if axes:
            mesh.joint(axes).transport.all_reduce(squares)()
        total = total + squares
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in gradients.values():
        for gradient in group:
            gradient.mul_(scale.to(gradient.dtype))
    return norm
