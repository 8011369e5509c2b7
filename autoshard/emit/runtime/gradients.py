"""After backward: the sums over devices that are still missing, and clipping by the global norm.

Which collectives run is decided by the model alone, never by what a device's gradients happen to be: a parameter
without a gradient takes part with zeros, and stays without.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .mesh import ParallelMesh
from .parameters import local, sharding

_IN_FLIGHT = 2  # buckets being reduced at once; each holds a flat copy of its gradients
Buckets = Sequence[tuple[Sequence[str], Sequence[str]]]


@torch.no_grad()
def reduce_gradients(mesh: ParallelMesh, parameters: Mapping[str, nn.Parameter], buckets: Buckets) -> None:
    """Sums local gradients over devices, in place: once a step, after its last backward.

    A bucket, (axis names, parameter names), is one flat all-reduce. Gradients that were summed already stay as they
    are; RuntimeError where a backward has added to such a one since, for nothing can tell its partial sums apart.
    """
    pending: deque[_Flight] = deque()
    for axes, names in buckets:
        group = [parameters[name] for name in names]
        reduced = [name for name in names if _is_reduced(name, parameters[name])]
        if reduced and len(reduced) == sum(parameter.grad is not None for parameter in group):
            continue
        if reduced:
            raise RuntimeError(f"the gradient of {reduced[0]} was summed over {'+'.join(axes)} before others were")
        flat = torch.cat([_summand(parameter) for parameter in group])
        pending.append(_Flight(flat, group, mesh.joint(axes).transport.all_reduce(flat)))
        if len(pending) > _IN_FLIGHT:
            _write_back(pending.popleft())
    for flight in pending:
        _write_back(flight)


class _Flight(NamedTuple):
    """A bucket that is being reduced."""

    flat: Tensor
    parameters: list[nn.Parameter]
    wait: Callable[[], object]


def _summand(parameter: nn.Parameter) -> Tensor:
    held = local(parameter) if parameter.grad is None else local(parameter.grad)
    return held.new_zeros(held.numel()) if parameter.grad is None else held.reshape(-1)


def _write_back(flight: _Flight) -> None:
    flight.wait()
    sizes = [local(parameter).numel() for parameter in flight.parameters]
    for parameter, part in zip(flight.parameters, flight.flat.split(sizes), strict=True):
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradient.copy_(part.view_as(gradient))
            _mark_reduced(parameter)


def _mark_reduced(parameter: nn.Parameter) -> None:
    cast(Any, parameter.grad).reduced_at = cast(Any, parameter.grad)._version


def _is_reduced(name: str, parameter: nn.Parameter) -> bool:
    """RuntimeError where the gradient has changed since it was reduced."""
    at = getattr(parameter.grad, "reduced_at", None)
    if at is not None and at != cast(Any, parameter.grad)._version:
        raise RuntimeError(
            f"the gradient of {name} was summed over devices, and something was added to it since\n"
            "  try: optimizer.zero_grad(set_to_none=True) before the backward, or `accumulating` around it"
        )
    return at is not None


@contextlib.contextmanager
def accumulating(parameters: Mapping[str, nn.Parameter], buckets: Buckets) -> Iterator[None]:
    """Gradients made and reduced within it are added to those that were reduced before, which an error leaves alone."""
    names = dict.fromkeys(name for _, bucket in buckets for name in bucket)
    before = {name: parameters[name].grad for name in names if hasattr(parameters[name].grad, "reduced_at")}
    for name in before:
        parameters[name].grad = None
    try:
        yield
    except BaseException:
        for name, gradient in before.items():
            parameters[name].grad = gradient
        raise
    for name, gradient in before.items():
        parameter = parameters[name]
        if gradient is not None and parameter.grad is not None:
            with torch.no_grad():
                gradient.add_(parameter.grad)
        parameter.grad = gradient
        _mark_reduced(parameter)


@torch.no_grad()
def clip_gradients(mesh: ParallelMesh, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

    A parameter's squares are summed over the axes that shard it, and count once over those that replicate it.
    """
    gradients: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            group = gradients.setdefault(sharding(parameter).axes(), [])
            group += [] if parameter.grad is None else [local(parameter.grad)]
    total = torch.zeros((), device=mesh.device)
    for axes, group in sorted(gradients.items()):
        dtype = torch.float64 if torch.float64 in {gradient.dtype for gradient in group} else torch.float32
        norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in group]
        squares = torch.stack(norms or [torch.zeros_like(total)]).square().sum()
        if axes:
            mesh.joint(axes).transport.all_reduce(squares)()
        total = total + squares
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in gradients.values():
        for gradient in group:
            gradient.mul_(scale.to(gradient.dtype))
    return norm
