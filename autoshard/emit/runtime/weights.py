"""Gathering and casting of weights, between where they are stored and where they are used.

A weight that is gathered for use is not kept for backward: autograd keeps its shard, and `regather_before` gathers it
again right before the backward that needs it. The model's code says when, the same on every device: what autograd saves
here only decides how long a gathered weight lives.

A weight that is cast for use is moved in the low precision; the gradients of its redistributions are reduced in the
high one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from .axis import Map
from .flat_weights import Weight

_Results = TypeVar("_Results", Tensor, tuple[Tensor, ...])


class Cast(NamedTuple):
    """Redistributions of a weight in low precision: `source` is the weight in the high one, `forward` leads from it to
    here, `backward` from a gradient to that of the source, last step first."""

    source: Tensor
    forward: tuple[Map, ...]
    backward: tuple[Map, ...]

    def gradient(self, grad: Tensor) -> Tensor:
        grad = grad.to(self.source.dtype)
        for step in reversed(self.backward):
            grad = step(grad)
        return grad


class Gathered:
    """How a gathered weight is made: from the shard `source`, by `steps`."""

    def __init__(self, source: Tensor, steps: tuple[Map, ...]) -> None:
        self.source, self.steps = source, steps
        self.saved: list[_Saved] = []  # by autograd since the last `regather_before`
        self.uses: weakref.WeakSet[_Use] = weakref.WeakSet()
        self.weight: Weight | None = None  # where it is gathered with others

    def regather(self) -> Tensor:
        x = self.source
        for step in self.steps:
            x = step(x)
        return x

    def let_go(self) -> None:
        """Frees it: its gradient is complete."""
        for use in self.uses:
            use.whole = None


def unchanged(x: Tensor, version: int) -> Tensor:
    """`x`, which must still have this version: with hooks on saved tensors autograd does not check."""
    if x._version != version:
        raise RuntimeError(
            f"backward needs a tensor {tuple(x.shape)} that was written over since: it is at version {x._version}, and "
            f"was kept at version {version}"
        )
    return x


class _Kept(NamedTuple):
    """A tensor that autograd saved, unchanged."""

    x: Tensor
    version: int

    def get(self) -> Tensor:
        return unchanged(*self)


class _Saved:
    """A saved view of a gathered weight: the view itself or, once freed, its position in the weight."""

    def __init__(self, x: Tensor) -> None:
        self.whole: Tensor | None = x
        self.version = x._version
        self.use: _Use | None = None

    def let_go(self, use: _Use) -> None:
        assert self.whole is not None
        self.place = self.whole.shape, self.whole.stride(), self.whole.storage_offset()
        self.whole, self.use = None, use

    def get(self) -> Tensor:
        if self.use is None:
            assert self.whole is not None
            return unchanged(self.whole, self.version)
        return self.use.take().as_strided(*self.place)


class _Use:
    """One operator's use of a gathered weight. Its backward gathers it again, whatever autograd saved here."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered, self.whole, self.left = gathered, cast("Tensor | None", None), 0
        self.version = gathered.source._version
        self.count = len(gathered.saved)
        for saved in gathered.saved:
            saved.let_go(self)
        gathered.saved.clear()
        gathered.uses.add(self)
        if gathered.weight is not None:
            gathered.weight.uses += 1

    @torch.no_grad()
    def gather(self) -> None:
        unchanged(self.gathered.source, self.version)
        whole = self.gathered.regather()
        self.whole, self.left = whole if self.count else None, self.count

    def take(self) -> Tensor:
        """The whole weight; it is freed with the last saved part of it."""
        assert self.whole is not None, "the backward of an operator ran before its weights were gathered again"
        whole, self.left = self.whole, self.left - 1
        if self.left == 0:
            self.whole = None
        return whole


# Address of a gathered storage -> the tensor, while it lives, and how to make it again.
_GATHERED: dict[int, tuple[weakref.ref[Tensor], Gathered]] = {}


def gathered_of(x: Tensor) -> Gathered | None:
    """How to gather `x` again, if it is a gathered weight."""
    return cast("Gathered | None", getattr(x, "gathered", None))


def cast_of(x: Tensor) -> Cast | None:
    """Path of the gradient of `x`, if it is a weight that was cast."""
    return cast("Cast | None", getattr(x, "cast", None))


def note_gathered(x: Tensor, source: Tensor, step: Map) -> Gathered:
    """Records that `x` was made by `step` from `source`, a stored weight or itself a gathered one."""
    before, cast_ = gathered_of(source), cast_of(source)
    if before is not None:
        gathered = Gathered(before.source, (*before.steps, step))
    elif cast_ is not None:  # its shard in low precision is not kept, either
        gathered = Gathered(cast_.source.detach(), (*cast_.forward, step))
    else:
        gathered = Gathered(source.detach(), (step,))
    cast(Any, x).gathered = gathered
    address = x.untyped_storage().data_ptr()
    if address:
        _GATHERED[address] = weakref.ref(x, lambda _: _GATHERED.pop(address, None)), gathered
    return gathered


def note_cast(x: Tensor, steps: Cast) -> None:
    cast(Any, x).cast = steps


class _Together(torch.autograd.Function):
    """Identity of several tensors, with one backward."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def regather_before(results: _Results, *weights: Tensor) -> _Results:
    """Lets the backward of the operator that made `results` begin by gathering these weights again, in this order.

    Must follow the operator at once. A single result is returned unchanged.
    """
    if torch.compiler.is_compiling():  # a compiler decides what is kept, and what is made again
        return results
    outputs = (results,) if isinstance(results, Tensor) else results
    differentiable = [i for i, x in enumerate(outputs) if x.grad_fn is not None]
    uses = [_Use(gathered) for gathered in map(gathered_of, weights) if gathered is not None]
    if not differentiable or not uses:
        return results
    if len(differentiable) > 1:
        joined = dict(zip(differentiable, _Together.apply(*(outputs[i] for i in differentiable)), strict=True))
        outputs = tuple(joined.get(i, x) for i, x in enumerate(outputs))
    node = outputs[differentiable[0]].grad_fn
    assert node is not None

    def gather(_: Sequence[Tensor]) -> None:
        for use in uses:
            use.gather()

    node.register_prehook(gather)
    return results if len(differentiable) == 1 else outputs


@contextlib.contextmanager
def regathering() -> Iterator[None]:
    """Context in which `regather_before` frees what autograd saves of a gathered weight (or a view of it)."""

    if torch.compiler.is_compiling():
        yield
        return

    def pack(x: Tensor) -> _Kept | _Saved:
        reference, gathered = _GATHERED.get(x.untyped_storage().data_ptr(), (None, None))
        if reference is None or gathered is None or reference() is None:
            return _Kept(x, x._version)
        saved = _Saved(x)
        gathered.saved.append(saved)
        return saved

    def unpack(packed: _Kept | _Saved) -> Tensor:
        return packed.get()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
