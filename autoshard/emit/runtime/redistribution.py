"""Redistribution of a tensor from one placement to another, with gradients.

`blocks`: the dim consists of that many equal blocks, each sharded over the axis, in multiples of `unit`. `size`: the
length of the dim without this axis; needed only if the axis does not divide it. `kept`: in a block that backward
recomputes, the result is kept: see `kept_collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .axis import Axis, Map, Unit, shard_bounds, shard_size
from .flat_weights import Weight, weight_of
from .kept_collectives import reused_result
from .weights import Cast, cast_of, gathered_of, note_cast, note_gathered


class Cut(NamedTuple):
    dim: int
    size: int
    blocks: int
    unit: Unit

    def lengths(self, axis: Axis) -> list[int]:
        """Length of one block on each device."""
        return [shard_size(self.size // self.blocks, axis, 1, self.unit, i) for i in range(axis.size)]


def cut_of(x: Tensor, axis: Axis, dim: int, size: int | None, blocks: int, unit: Unit, whole: bool) -> Cut:
    if size is None:
        size = x.shape[dim] if whole else x.shape[dim] * axis.size
    cut = Cut(dim % x.dim(), size, blocks, unit)
    expected = size if whole else shard_size(size, axis, blocks, unit)
    if x.shape[dim] != expected or size % blocks:
        raise ValueError(f"dim {dim} of {tuple(x.shape)}: expected length {expected} ({cut} over {axis.name})")
    return cut


def _blocks_first(x: Tensor, cut: Cut) -> Tensor:
    """Splits the dim into (blocks, length) and moves the length to the front."""
    return x.unflatten(cut.dim, (cut.blocks, x.shape[cut.dim] // cut.blocks)).movedim(cut.dim + 1, 0).contiguous()


def _blocks_back(x: Tensor, cut: Cut) -> Tensor:
    return x.movedim(0, cut.dim + 1).flatten(cut.dim, cut.dim + 1).contiguous()


def gather_whole(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    lengths = cut.lengths(axis)
    if min(lengths) < max(lengths):
        return _blocks_back(axis.transport.all_gather(_blocks_first(x, cut), lengths), cut)
    parts = axis.transport.all_gather(x.contiguous().unsqueeze(0), [1] * axis.size)
    apart = parts.unflatten(cut.dim + 1, (cut.blocks, lengths[0]))
    return apart.movedim(0, cut.dim + 1).flatten(cut.dim, cut.dim + 2).contiguous()  # one copy, of what has come


def _scatter(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    return _blocks_back(axis.transport.reduce_scatter(_blocks_first(x, cut), cut.lengths(axis)), cut)


def start_scatter(x: Tensor, axis: Axis, cut: Cut) -> Callable[[], Tensor]:
    """Starts a reduce-scatter over the axis; the returned function gives this device's part of the sum."""
    wait = axis.transport.start_reduce_scatter(_blocks_first(x, cut), cut.lengths(axis))
    return lambda: _blocks_back(wait(), cut)


def _part(x: Tensor, axis: Axis, cut: Cut, index: int | None = None) -> Tensor:
    """View of one device's part, the dim as (blocks, length)."""
    start, stop = shard_bounds(cut.size // cut.blocks, axis, cut.unit, index)
    return x.unflatten(cut.dim, (cut.blocks, cut.size // cut.blocks)).narrow(cut.dim + 1, start, stop - start)


def _slice(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    part = _part(x, axis, cut, axis.place).clone(
        memory_format=torch.contiguous_format
    )  # a view would keep the whole alive
    return part.flatten(cut.dim, cut.dim + 1)


def _pad(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    start, stop = shard_bounds(cut.size // cut.blocks, axis, cut.unit, axis.place)
    whole = x.new_zeros((*x.shape[: cut.dim], cut.blocks, cut.size // cut.blocks, *x.shape[cut.dim + 1 :]))
    whole.narrow(cut.dim + 1, start, stop - start).copy_(x.unflatten(cut.dim, (cut.blocks, stop - start)))
    return whole.flatten(cut.dim, cut.dim + 1)


def _exchange(x: Tensor, axis: Axis, joined: Cut, cut: Cut) -> Tensor:
    sent = [_part(x, axis, cut, i) for i in range(axis.size)]
    shape = list(sent[axis.index].flatten(cut.dim, cut.dim + 1).shape)
    lengths = joined.lengths(axis)
    shapes = [[*shape[: joined.dim], joined.blocks, n, *shape[joined.dim + 1 :]] for n in lengths]
    counts = [math.prod(s) for s in shapes]
    flat = axis.transport.all_to_all(_packed(x, sent), [s.numel() for s in sent], counts)
    received = [piece.view(s) for piece, s in zip(flat.split(counts), shapes, strict=True)]
    return torch.cat(received, joined.dim + 1).flatten(joined.dim, joined.dim + 1)


def _packed(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The elements of all parts in one flat tensor; a cat of flat parts would hold them twice."""
    flat = x.new_empty(sum(part.numel() for part in parts))
    for place, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True):
        place.view(part.shape).copy_(part)
    return flat


def reduced(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    axis.transport.all_reduce(result, op)()
    return result


def _masked(x: Tensor, axis: Axis) -> Tensor:
    return x.clone() if axis.place == 0 else torch.zeros_like(x)


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


class _Redistribution(torch.autograd.Function):
    """A pair of linear maps: forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.gradient(grads[0]), None, None


class _Regathered(_Redistribution):
    """`_Redistribution` of a weight that is gathered again for backward: `gathered`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.gathered.let_go()
        return ctx.gradient(grads[0]), None, None


def redistributed(
    x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor], *, again: bool = False,
    kept: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """`forward(x, **options)`, whose gradient is `backward` of the incoming one.

    `again`: gathers a stored weight; backward recomputes the result and what is made from it (see `weights`).
    """
    there, back = partial(forward, **options), partial(backward, **options)
    if kept:
        there = partial(reused_result, there)
    if torch.compiler.is_compiling():  # what is kept for backward is the compiler's to decide
        return cast(Tensor, _Redistribution.apply(x, there, back))
    cast_ = cast_of(x)
    kind = _Regathered if again or gathered_of(x) is not None else _Redistribution
    if cast_ is None:
        result = cast(Tensor, kind.apply(x, there, back))
    else:  # straight to the gradient of the weight in high precision
        steps = Cast(cast_.source, (*cast_.forward, there), (*cast_.backward, back))
        result = cast(Tensor, kind.apply(cast_.source, lambda _: there(x.detach()), steps.gradient))
        note_cast(result, steps)
    if again or gathered_of(x) is not None:
        gathered = note_gathered(result, x, there)
        if result.grad_fn is not None:
            cast(Any, result.grad_fn).gathered = gathered
    return result


def cast_weight(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight cast to another precision; gradients of its redistributions are reduced in its original one."""
    before = cast_of(x)
    high = before.source.dtype if before is not None else x.dtype

    def there(value: Tensor) -> Tensor:
        return value.to(dtype)

    result = redistributed(x, there, lambda grad: grad.to(high))
    if before is None:
        note_cast(result, Cast(x, (there,), ()))
    return result


def all_gather(
    x: Tensor, axis: Axis, dim: int, *, size: int | None = None, blocks: int = 1, unit: Unit = 1, grad: str = "slice",
    kept: bool = False,
) -> Tensor:  # fmt: skip
    """S -> R (`grad="slice"`) or S -> R+ (`grad="reduce_scatter"`)."""
    cut = cut_of(x, axis, dim, size, blocks, unit, whole=False)
    backward = {"slice": _slice, "reduce_scatter": _scatter}[grad]
    return redistributed(x, gather_whole, backward, kept=kept, axis=axis, cut=cut)


def slice_shard(
    x: Tensor, axis: Axis, dim: int, *, blocks: int = 1, unit: Unit = 1, grad: str = "all_gather"
) -> Tensor:
    """R -> S (`grad="all_gather"`) or R+ -> S (`grad="zero_pad"`)."""
    cut = cut_of(x, axis, dim, None, blocks, unit, whole=True)
    return redistributed(x, _slice, {"all_gather": gather_whole, "zero_pad": _pad}[grad], axis=axis, cut=cut)


def reduce_scatter(
    x: Tensor, axis: Axis, dim: int, *, blocks: int = 1, unit: Unit = 1, grad: str = "all_gather", kept: bool = False
) -> Tensor:
    """P -> S."""
    cut = cut_of(x, axis, dim, None, blocks, unit, whole=True)
    return redistributed(x, _scatter, {"all_gather": gather_whole}[grad], kept=kept, axis=axis, cut=cut)


def zero_pad(
    x: Tensor, axis: Axis, dim: int, *, size: int | None = None, blocks: int = 1, unit: Unit = 1, grad: str = "slice"
) -> Tensor:
    """S -> P."""
    cut = cut_of(x, axis, dim, size, blocks, unit, whole=False)
    return redistributed(x, _pad, {"slice": _slice}[grad], axis=axis, cut=cut)


def all_to_all(
    x: Tensor, axis: Axis, joined_dim: int, cut_dim: int, *,
    joined_size: int | None = None, joined_blocks: int = 1, joined_unit: Unit = 1,
    cut_blocks: int = 1, cut_unit: Unit = 1, kept: bool = False,
) -> Tensor:  # fmt: skip
    """S -> S of another dim: `joined_dim` is gathered over the axis, `cut_dim` sharded."""
    joined = cut_of(x, axis, joined_dim, joined_size, joined_blocks, joined_unit, whole=False)
    cut = cut_of(x, axis, cut_dim, None, cut_blocks, cut_unit, whole=True)
    forward, backward = partial(_exchange, joined=joined, cut=cut), partial(_exchange, joined=cut, cut=joined)
    return redistributed(x, forward, backward, kept=kept, axis=axis)


def all_reduce(x: Tensor, axis: Axis, *, grad: str = "identity", kept: bool = False) -> Tensor:
    """P -> R (`grad="identity"`) or P -> R+ (`grad="all_reduce"`)."""
    return redistributed(x, reduced, {"identity": _identity, "all_reduce": reduced}[grad], kept=kept, axis=axis)


def copy(x: Tensor, axis: Axis, *, grad: str = "all_reduce") -> Tensor:
    """R -> R+ (`grad="all_reduce"`) or R+ -> R (`grad="mask"`: the gradient counts once)."""
    return redistributed(x, _identity, {"all_reduce": reduced, "mask": _masked}[grad], axis=axis)


def mask(x: Tensor, axis: Axis, *, grad: str = "identity") -> Tensor:
    """R -> P (`grad="identity"`) or R+ -> P (`grad="mask"`): the value on coordinate 0, zero elsewhere."""
    return redistributed(x, _masked, {"identity": _identity, "mask": _masked}[grad], axis=axis)


def regather(
    x: Tensor, axis: Axis, dim: int, *, size: int | None = None, blocks: int = 1, unit: Unit = 1,
    grad: str = "reduce_scatter",
) -> Tensor:  # fmt: skip
    """`all_gather` of a weight for its use, not kept for backward: see `regather_before`."""
    cut = cut_of(x, axis, dim, size, blocks, unit, whole=False)
    backward = {"slice": _slice, "reduce_scatter": _scatter}[grad]
    if torch.compiler.is_compiling():
        return redistributed(x, gather_whole, backward, axis=axis, cut=cut)
    low = cast_of(x)
    weight = weight_of(x if low is None else low.source)
    if weight is not None and weight.bucket.axis is axis:
        return _together(x, weight, axis, cut)
    return redistributed(x, gather_whole, backward, again=True, axis=axis, cut=cut)


def gather_once(x: Tensor, axis: Axis, dim: int, *, size: int | None = None, blocks: int = 1, unit: int = 1) -> Tensor:
    """`all_gather` of a weight for its use in all micro-batches of a step: once, in the first one, within
    `gathered_together`, which also schedules the scatter of its gradient. Elsewhere, a gather at every call."""
    cut = cut_of(x, axis, dim, size, blocks, unit, whole=False)
    low = cast_of(x)
    weight = None if torch.compiler.is_compiling() else weight_of(x if low is None else low.source)
    if weight is None or weight.bucket.axis is not axis:
        return redistributed(x, gather_whole, _scatter, axis=axis, cut=cut)
    assemble = _assembling(x, axis, cut)

    def scattered(grad: Tensor) -> None:
        weight.bucket.put(weight, _taken_apart(grad, weight, axis, cut))

    stored = x if low is None else low.source  # the gradient goes to the bucket: the cast has none
    return cast(Tensor, _Redistribution.apply(stored, lambda _: weight.gather_once(assemble), scattered))


def _assembling(x: Tensor, axis: Axis, cut: Cut) -> Callable[[list[Tensor]], Tensor]:
    """Function that assembles a weight from its `Weight.places`; `x` is this device's part."""

    def assemble(parts: list[Tensor]) -> Tensor:
        lengths = cut.lengths(axis)
        shapes = [[*x.shape[: cut.dim], cut.blocks, n, *x.shape[cut.dim + 1 :]] for n in lengths]
        if len(parts) == 1:
            apart = parts[0].view(axis.size, *shapes[0]).movedim(0, cut.dim + 1)
            return apart.flatten(cut.dim, cut.dim + 2).contiguous()
        pieces = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return torch.cat(pieces, cut.dim + 1).flatten(cut.dim, cut.dim + 1)

    return assemble


def _taken_apart(whole: Tensor, weight: Weight, axis: Axis, cut: Cut) -> list[Tensor]:
    """Parts of a whole weight, for its `Weight.places`."""
    if weight.bucket.even:
        lengths = cut.blocks, axis.size, cut.size // (cut.blocks * axis.size)
        return [whole.unflatten(cut.dim, lengths).movedim(cut.dim + 1, 0)]
    return [_part(whole, axis, cut, i) for i in range(axis.size)]


def _together(x: Tensor, weight: Weight, axis: Axis, cut: Cut) -> Tensor:
    """`regather` of a weight that is gathered, and its gradient scattered, together with others."""
    assemble = _assembling(x, axis, cut)

    def scattered(grad: Tensor) -> None:
        weight.let_go()
        weight.bucket.put(weight, _taken_apart(grad, weight, axis, cut))

    def regathered(_: Tensor) -> Tensor:
        return weight.regather(assemble)

    low = cast_of(x)
    stored = x if low is None else low.source  # the gradient goes to the bucket: the cast has none
    result = cast(Tensor, _Redistribution.apply(stored, lambda _: weight.gather(assemble), scattered))
    note_gathered(result, x, regathered).weight = weight
    if result.grad_fn is not None:
        cast(Any, result.grad_fn).gathered = gathered_of(result)
    return result
