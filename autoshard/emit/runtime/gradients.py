"""Sums of gradients over devices, overlapped with backward, and clipping by the global norm.

The model alone decides which collectives run and in which order, never the state of a device's gradients: a parameter
without a gradient takes part with zeros, and stays without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .autograd_leaves import as_gradient, give_gradients_to, local
from .axis import Axis
from .mesh import ParallelMesh
from .parameters import sharding
from .stages import Shared

Buckets = Sequence[tuple[Sequence[str], Sequence[str]]]


@contextlib.contextmanager
def reducing(
    mesh: ParallelMesh,
    parameters: Mapping[str, nn.Parameter],
    buckets: Buckets,
    backwards: int = 1,
    others_complete: bool = False,
) -> Iterator[None]:
    """Context of a backward, or of one per micro-batch: sums its gradients over devices; all sums are complete at the
    end.

    A bucket, (axis names, parameter names), is one flat all-reduce. It starts as soon as the last micro-batch's
    backward has made the last of its gradients, but buckets start in their order. Gradients of earlier backwards that
    were not summed yet are partial sums, too; those that were summed are added afterwards, and an error leaves them
    unchanged. `others_complete`: all gradients that parameters have, or get from elsewhere during the backward (a
    penalty on the parameters), are complete, and are added afterwards.
    """
    present = {name: parameters[name].grad for _, bucket in buckets for name in bucket}
    before = {
        name: gradient
        for name, gradient in present.items()
        if gradient is not None and (others_complete or hasattr(gradient, "reduced_at"))
    }
    for name in before:
        parameters[name].grad = None
    reduction = _Reduction(mesh, parameters, buckets, backwards, others_complete)
    try:
        with reduction.beside_backward():
            yield
        reduction.finish()
    except BaseException:
        for name, gradient in before.items():
            parameters[name].grad = gradient
        raise
    with torch.no_grad():
        for name, gradient in before.items():
            total, summed = _as_stored(parameters[name], gradient), parameters[name].grad
            if summed is not None:
                total.add_(local(summed))
            parameters[name].grad = as_gradient(parameters[name], total)
    for name in before:  # after all additions: a bucket's gradients share memory, and its version
        _mark_reduced(parameters[name])


@contextlib.contextmanager
def accumulating(parameters: Mapping[str, nn.Parameter], buckets: Buckets) -> Iterator[None]:
    """Context of the backward of a micro-batch that is not the last: its gradients stay partial sums.

    RuntimeError if summed gradients are still present: they would be summed again.
    """
    for name in (name for _, bucket in buckets for name in bucket):
        if hasattr(parameters[name].grad, "reduced_at"):
            raise _added_to(name)
    yield


def reduce_gradients(mesh: ParallelMesh, parameters: Mapping[str, nn.Parameter], buckets: Buckets) -> None:
    """Sums gradients as `reducing` does, but after the last backward of a step that ran without it.

    Gradients that were already summed are unchanged; RuntimeError if a backward has added to one of these since, as its
    partial sums can't be told apart.
    """
    left = []
    for axes, names in buckets:
        reduced = [name for name in names if _is_reduced(name, parameters[name])]
        if reduced and len(reduced) == sum(parameters[name].grad is not None for name in names):
            continue
        if reduced:
            raise RuntimeError(f"the gradient of {reduced[0]} was summed over {'+'.join(axes)} before others were")
        left.append((axes, names))
    _Reduction(mesh, parameters, left).finish()


class _Reduction:
    """The buckets of one step. They start in order, so that all devices agree whatever gradient comes first."""

    def __init__(
        self, mesh: ParallelMesh, parameters: Mapping[str, nn.Parameter], buckets: Buckets, backwards: int = 1,
        others_complete: bool = False,
    ) -> None:  # fmt: skip
        self.buckets = [_Bucket(mesh.joint(axes), [(name, parameters[name]) for name in names], backwards,
                                others_complete) for axes, names in buckets]  # fmt: skip
        self.started = 0

    @contextlib.contextmanager
    def beside_backward(self) -> Iterator[None]:
        """Context in which the buckets receive the gradients that backward makes."""
        try:
            for bucket in self.buckets:
                for position, (_, parameter) in enumerate(bucket.members):
                    give_gradients_to(parameter, partial(self._arrived, bucket, position))
            yield
        finally:
            for bucket in self.buckets:
                for _, parameter in bucket.members:
                    give_gradients_to(parameter, None)

    @torch.no_grad()
    def _arrived(self, bucket: _Bucket, position: int, gradient: Tensor) -> None:
        bucket.take(position, gradient)
        while self.started < len(self.buckets) and self.buckets[self.started].is_full:
            self._start_next()

    def _start_next(self) -> None:
        self.buckets[self.started].start()
        self.started += 1

    @torch.no_grad()
    def finish(self) -> None:
        while self.started < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            bucket.finish()


class _Bucket:
    """Gradients collected in one flat tensor; from then on they are views of it."""

    def __init__(
        self, axis: Axis, members: list[tuple[str, nn.Parameter]], backwards: int, others_complete: bool
    ) -> None:
        self.axis, self.members, self.backwards, self.others_complete = axis, members, backwards, others_complete
        self.taken: dict[int, int] = {}  # position -> the backwards that have made its gradient
        self.places: list[Tensor] = []  # none before the first gradient comes

    @property
    def is_full(self) -> bool:
        return len(self.taken) == len(self.members) and set(self.taken.values()) == {self.backwards}

    def take(self, position: int, gradient: Tensor) -> None:
        """Takes this backward's gradient, adding what earlier backwards have left."""
        name, parameter = self.members[position]
        before = self.taken.get(position, 0)
        if before == self.backwards:
            often = "twice within `reducing`: it takes one backward" if before == 1 else f"{before + 1} times"
            raise RuntimeError(f"the gradient of {name} was made {often}")
        self.taken[position] = before + 1
        place = self._place(position, gradient.dtype)
        place.add_(gradient) if before else place.copy_(gradient)
        if parameter.grad is not None and not self.others_complete:
            place.add_(local(parameter.grad))
            parameter.grad = None

    def _place(self, position: int, dtype: torch.dtype) -> Tensor:
        if not self.places:
            held = [local(parameter) for _, parameter in self.members]
            sizes = [x.numel() for x in held]
            self.flat = torch.empty(sum(sizes), dtype=dtype, device=held[0].device)
            self.places = [part.view_as(x) for part, x in zip(self.flat.split(sizes), held, strict=True)]
        return self.places[position]

    def start(self) -> None:
        """Starts the all-reduce, with zeros for missing gradients."""
        for position, (_, parameter) in enumerate(self.members):
            if position not in self.taken:
                before = None
                if not self.others_complete:
                    before, parameter.grad = parameter.grad, None
                place = self._place(position, local(parameter).dtype if before is None else before.dtype)
                place.zero_() if before is None else place.copy_(local(before))
                self.taken |= {position: 1} if before is not None else {}
        self.wait: Callable[[], object] = self.axis.transport.all_reduce(self.flat)

    def finish(self) -> None:
        """Returns the sums to the parameters that had a gradient."""
        self.wait()
        for position in self.taken:
            parameter = self.members[position][1]
            if parameter.grad is not None:  # from elsewhere
                self.places[position].add_(_as_stored(parameter, parameter.grad))
        for position in self.taken:
            parameter = self.members[position][1]
            parameter.grad = as_gradient(parameter, self.places[position])
            cast(Any, parameter.grad).reduced_at = self.flat._version  # which all views of it share


def _as_stored(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Local part of a gradient of DTensor's autograd, in the parameter's placements."""
    return local(gradient.redistribute(placements=parameter.placements) if isinstance(gradient, DTensor) else gradient)


def _mark_reduced(parameter: nn.Parameter) -> None:
    cast(Any, parameter.grad).reduced_at = _version(parameter)


def _is_reduced(name: str, parameter: nn.Parameter) -> bool:
    """Was this gradient reduced? RuntimeError if it has changed since."""
    at = getattr(parameter.grad, "reduced_at", None)
    if at is not None and at != _version(parameter):
        raise _added_to(name)
    return at is not None


def _version(parameter: nn.Parameter) -> int:
    with torch.no_grad():
        return cast(int, cast(Any, local(cast(Tensor, parameter.grad)))._version)


def _added_to(name: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {name} was summed over devices, and something was added to it since\n"
        "  try: optimizer.zero_grad(set_to_none=True) before the backward, or `reducing` around it"
    )


@torch.no_grad()
def clip_gradients(
    mesh: ParallelMesh, parameters: Iterable[nn.Parameter], max_norm: float, shared: Shared | None = None
) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

    A parameter's squares are summed over the axes that shard it. They count once over the axes that replicate it, and
    once over the stages that hold it, named in `shared`.
    """
    gradients: dict[tuple[str, ...], list[Tensor]] = {}
    elsewhere: list[Tensor] = []  # gradients that another stage counts
    for parameter in parameters:
        if parameter.requires_grad:
            group = gradients.setdefault(sharding(parameter).axes, [])
            if mesh.stages is not None and not mesh.stages.counts(sharding(parameter).name, shared or {}):
                group = elsewhere
            group += [] if parameter.grad is None else [local(parameter.grad)]
    total = torch.zeros((), device=mesh.device)
    for axes, group in sorted(gradients.items()):
        squares = sum((_squares(grads).to(mesh.device) for grads in _by_device(group)), torch.zeros_like(total))
        if axes:
            mesh.joint(axes).transport.all_reduce(squares)()
        total = total + squares
    if mesh.stages is not None:  # one dtype, also where a stage has no weights of float64, or none at all
        wide = torch.float32 if mesh.device.type == "npu" else torch.float64
        total = mesh.stages.all_reduce(total.to(wide)).to(total.dtype)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in (*gradients.values(), elsewhere):
        for grads in _by_device(group):
            torch._foreach_mul_(grads, scale.to(grads[0].device))
    return norm


def _by_device(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients grouped by device: those on the accelerator, and those on the host."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    return list(by_device.values())


def _squares(gradients: list[Tensor]) -> Tensor:
    """Sum of the squares of all elements."""
    dtype = torch.float64 if torch.float64 in {gradient.dtype for gradient in gradients} else torch.float32
    return torch.stack(list(torch._foreach_norm(gradients, 2, dtype))).square().sum()
