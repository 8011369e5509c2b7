"""Weights of a block moved together: one flat all-gather for their use, one flat reduce-scatter of their gradients.

A block is gathered while the one before it is in use; in backward, in reverse order. Its gradients are scattered while
backward goes on, and waited for when the next block starts. The model's `WEIGHT_BUCKETS` lists which weights go
together; without `gathered_together` each is moved alone. Weights of several dtypes go together as raw bytes, each at a
multiple of its item size.

Under ZeRO 1 and 2 weights are gathered once a step (`gather_once`), by the first micro-batch, and stay whole for all. A
stage that waits for its first input gathers its first part's weights at once, and those of a later part when the part
before it ends: see `gathered_ahead`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .autograd_leaves import hand_over, local
from .axis import Axis, held_indices

if TYPE_CHECKING:
    from .mesh import ParallelMesh
    from .parameters import Sharding

Buckets = Sequence[tuple[Sequence[str], Mapping[torch.dtype, Sequence[str]], int, bool]]


@contextlib.contextmanager
def gathered_together(
    mesh: ParallelMesh, parameters: Mapping[str, nn.Parameter], buckets: Buckets, scattered_after: int = 1,
    backwards: int = 1,
) -> Iterator[Line]:  # fmt: skip
    """Context of a forward and its backward; of those of all micro-batches, `backwards`, if weights are gathered once a
    step. No whole weight outlives its last backward.

    A bucket: axis names, the names of its weights by their dtype in use, the number of its block, and whether they stay
    whole from forward to backward. Their gradients are added up over `scattered_after` backwards."""
    line = Line(mesh, parameters, buckets, scattered_after=scattered_after)
    line.backwards = backwards
    try:
        yield line
        line.finish()
    finally:
        line.leave()


def gathered_ahead(lines: Sequence[Line], waits: bool) -> None:
    """Chains the lines of a stage's parts, in model order. `waits`: another stage makes the first part's input."""
    for line, after in itertools.pairwise(lines):
        line.next = after
    if waits:
        lines[0].start()


class Line:
    """The buckets in the order of their use, for one forward and its backward.

    A program that calls backward at any time makes a line around each forward, hides it after that, and ends each
    backward with `finish` and `rewind` if the line `is_used`.
    """

    def __init__(
        self, mesh: ParallelMesh, parameters: Mapping[str, nn.Parameter], buckets: Buckets, number: int = 0,
        scattered_after: int = 1,
    ) -> None:  # fmt: skip
        self.number, self.scattered_after = number, scattered_after  # number: among several
        self.backwards = 0  # after which no weight is used; 0: any number
        self.buckets: list[_Bucket] = []
        self.scattering: list[_Bucket] = []  # of one block
        self.next: Line | None = None  # the next part's, which starts as the last block here comes into use
        for axes, names, block, keep in buckets:
            bucket = _Bucket(self, block, mesh.joint(axes), keep)
            for dtype, group in names.items():
                actual = torch.empty(0, dtype=dtype).dtype  # a mode may make all tensors wider
                bucket.weights += [Weight(bucket, name, parameters[name], actual) for name in group]
            bucket.even = all(weight.counts[0] and len({*weight.counts}) == 1 for weight in bucket.weights)
            self.buckets.append(bucket)

    def ahead(self, used: _Bucket) -> None:
        """When a bucket comes into use, starts the rest of its block and the next one (in backward: the previous)."""
        step = -1 if used.backward else 1
        near = [b for b in self.buckets[::step] if (b.block - used.block) * step >= 0 and b.is_gathered(used.backward)]
        following = next((b.block for b in near if b.block != used.block), used.block)
        for bucket in near:
            if bucket.block in (used.block, following):
                if used.backward:
                    bucket.turn_back()
                bucket.start()
        if following == used.block and not used.backward and self.next is not None:
            self.next.start()

    @torch.no_grad()
    def start(self) -> None:
        """Starts all gathers of forward."""
        for bucket in self.buckets:
            bucket.start()

    def scatter(self, bucket: _Bucket) -> None:
        """Starts a scatter; waits for those of other blocks: they hold whole gradients, so one block's run at most."""
        before = [other for other in self.scattering if other.block != bucket.block]
        self.scattering = [*(other for other in self.scattering if other.block == bucket.block), bucket]
        bucket.start_scatter()
        for other in before:
            other.give_gradients()

    @torch.no_grad()
    def finish(self) -> None:
        for bucket in reversed(self.buckets):
            if bucket.scattered is None and bucket.flat_gradient is not None:
                self.scatter(bucket)
        for bucket in self.scattering:
            bucket.give_gradients()
        self.scattering = []

    @property
    def is_used(self) -> bool:
        """Has a backward made gradients of its weights?"""
        return any(bucket.arrived for bucket in self.buckets)

    def hide(self) -> None:
        """Hides the line after its forward: another forward has its own line."""
        for bucket in self.buckets:
            for weight in bucket.weights:
                weight.hide()

    def rewind(self) -> None:
        """Resets the line for another backward of the same forward."""
        self.scattering = []
        for bucket in self.buckets:
            bucket.rewind()

    def leave(self) -> None:
        """Breaks reference cycles among these objects: what they hold would else live until garbage is collected."""
        self.next = None
        for bucket in self.buckets:
            bucket.wait = bucket.flat = bucket.flat_gradient = bucket.scattered = None
            for weight in bucket.weights:
                weight.leave()


class _Bucket:
    """Weights gathered together. `backward`: in its second gather, or in the only one of a bucket that stays whole."""

    def __init__(self, line: Line, block: int, axis: Axis, keep: bool) -> None:
        self.line, self.block, self.axis, self.retained = line, block, axis, keep
        self.weights: list[Weight] = []
        self.even = False  # does every device hold as much of each?
        self.backward, self.started = False, 0  # gathers
        self.wait: Callable[[], Tensor] | None = None
        self.flat: dict[torch.dtype, Tensor] | None = None  # what was gathered, as each dtype
        self.flat_gradient: Tensor | None = None
        self.scattered: Callable[[], Tensor] | None = None
        self.arrived = 0

    def wanted(self) -> list[Weight]:
        """Weights that this gather is for."""
        return [weight for weight in self.weights if weight.uses] if self.backward else self.weights

    def is_gathered(self, backward: bool) -> bool:
        return not backward or (not self.retained and any(weight.uses for weight in self.weights))

    def turn_back(self) -> None:
        """Switches from forward to backward."""
        if not self.backward:
            self.backward, self.wait, self.flat = True, None, None

    def rewind(self) -> None:
        """Resets the bucket: another backward gathers its weights once more, and scatters their gradients."""
        self.started, self.arrived = min(self.started, 1), 0
        self.wait, self.flat, self.flat_gradient, self.scattered = None, None, None, None
        for weight in self.weights:
            weight.backwards = 0

    def start(self) -> None:
        """Starts the gather of the shards, unless it has started."""
        wanted = self.wanted()
        if self.started == (1 + self.backward) or not wanted:
            return
        self.started = 1 + self.backward
        widest = max((weight.dtype for weight in wanted), key=lambda dtype: dtype.itemsize)
        self.starts, lengths = _laid_out(wanted, tuple(weight.dtype.itemsize for weight in wanted))
        shards = [weight.leaf.reshape(-1) for weight in wanted]
        send = torch.empty(lengths[self.axis.index], dtype=widest, device=shards[0].device)
        views, before = _by_dtype(send, wanted), widest.itemsize * sum(lengths[: self.axis.index])
        begins = [self.starts[weight][self.axis.index] - before // weight.dtype.itemsize for weight in wanted]
        places = [
            views[weight.dtype].narrow(0, begin, len(shard))
            for weight, begin, shard in zip(wanted, begins, shards, strict=True)
        ]
        torch._foreach_copy_(places, shards)
        self.wait = self.axis.transport.start_all_gather(send, lengths)
        self.left = {weight: weight.uses if self.backward else 1 for weight in wanted}

    def take(self, weight: Weight) -> list[Tensor]:
        """Gathered parts of a weight, see `Weight.places`. Starts the next bucket."""
        if self.flat is None:
            self.start()
            assert self.wait is not None, f"{weight.name} is gathered again, but nothing has asked for it"
            self.flat, self.wait = _by_dtype(self.wait(), self.wanted()), None
            self.line.ahead(self)
        parts = weight.places(self.flat[weight.dtype], self.starts)
        self.left[weight] -= 1
        if not any(self.left.values()):
            self.flat = None
        return parts

    def put(self, weight: Weight, parts: Sequence[Tensor]) -> None:
        """Takes a whole gradient's parts, laid out as `Weight.places`. The bucket's last one starts the scatter."""
        if weight.backwards == self.line.scattered_after:  # another micro-batch's
            self.next_backward()
        if self.flat_gradient is None:
            like = weight.leaf
            self.gradient_starts, self.gradient_lengths = _laid_out(self.weights, (1,) * len(self.weights))
            self.flat_gradient = torch.empty(sum(self.gradient_lengths), dtype=like.dtype, device=like.device)
        for place, part in zip(weight.places(self.flat_gradient, self.gradient_starts), parts, strict=True):
            place.view(part.shape).add_(part) if weight.backwards else place.view(part.shape).copy_(part)
        weight.backwards += 1
        weight.done += 1
        if weight.done == self.line.backwards:
            weight.let_go()
        self.arrived += 1
        if self.arrived == len(self.weights) * self.line.scattered_after:
            self.line.scatter(self)

    @torch.no_grad()
    def next_backward(self) -> None:
        """Gives the previous backward's gradients to their parameters."""
        if self.flat_gradient is not None:  # some weight had none
            self.line.scatter(self)
        self.give_gradients()
        if self in self.line.scattering:
            self.line.scattering.remove(self)
        self.arrived = 0
        for weight in self.weights:
            weight.backwards = 0

    def start_scatter(self) -> None:
        assert self.flat_gradient is not None
        for weight in self.weights:
            if not weight.backwards:
                for place in weight.places(self.flat_gradient, self.gradient_starts):
                    place.zero_()
        self.scattered = self.axis.transport.start_reduce_scatter(self.flat_gradient, self.gradient_lengths)
        self.flat_gradient = None

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Gives the gradients to their parameters, once: the bucket drops them."""
        if self.scattered is None:
            return
        parts = self.scattered().split([weight.counts[self.axis.index] for weight in self.weights])
        self.scattered = None
        for weight, part in zip(self.weights, parts, strict=True):
            if weight.backwards:
                hand_over(weight.parameter, part.view_as(weight.leaf))


class Weight:
    """One weight of a bucket, used in `dtype`. `uses`: the backwards that gather it again; `counts`: the numbers that
    each device holds; `backwards`: those that have added to its gradient since the last scatter, `done`: in all."""

    def __init__(self, bucket: _Bucket, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.bucket, self.name, self.parameter, self.dtype = bucket, name, parameter, dtype
        self.leaf = local(parameter)
        self.uses, self.backwards, self.done = 0, 0, 0
        self.whole: Tensor | None = None  # of a bucket that stays whole
        self.counts = _counts(self.leaf, parameter, bucket.axis)
        cast(Any, self.leaf).weight = self

    def places(self, flat: Tensor, starts: Mapping[Weight, Sequence[int]]) -> list[Tensor]:
        """All devices' parts, (devices, numbers), if they are equally long; else each device's part, flat."""
        if self.bucket.even:
            apart = flat.view(len(self.counts), flat.numel() // len(self.counts))
            return [apart.narrow(1, starts[self][0], self.counts[0])]
        return [flat.narrow(0, start, count) for start, count in zip(starts[self], self.counts, strict=True)]

    def gather(self, assemble: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """The whole weight in forward; `assemble` makes it from the flat parts."""
        whole = assemble(self.bucket.take(self))
        self.whole = whole.detach() if self.bucket.retained else None
        return whole

    def gather_once(self, assemble: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """The whole weight: gathered in the first forward of a step, reused in all others."""
        if self.whole is None:
            self.whole = assemble(self.bucket.take(self))
        return self.whole.detach()

    def regather(self, assemble: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """The whole weight in backward."""
        if self.whole is not None:
            return self.whole
        self.bucket.turn_back()
        return assemble(self.bucket.take(self))

    def let_go(self) -> None:
        """Drops the whole weight: its gradient is complete."""
        self.whole = None

    def leave(self) -> None:
        self.whole = None
        self.hide()

    def hide(self) -> None:
        if getattr(self.leaf, "weight", None) is self:
            cast(Any, self.leaf).weight = None


def _by_dtype(flat: Tensor, weights: Sequence[Weight]) -> dict[torch.dtype, Tensor]:
    dtypes = {weight.dtype for weight in weights}
    return {dtype: flat if dtype == flat.dtype else flat.view(dtype) for dtype in dtypes}


def _laid_out(weights: Sequence[Weight], item_bytes: tuple[int, ...]) -> tuple[dict[Weight, list[int]], list[int]]:
    """Start of each device's part, in numbers of the weight, and each device's length, in numbers of the largest size.

    All parts of one device are contiguous."""
    starts, lengths = _places_of(tuple(weight.counts for weight in weights), item_bytes)
    return dict(zip(weights, starts, strict=True)), lengths


@functools.cache
def _places_of(counts: tuple[tuple[int, ...], ...], item_bytes: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    """Starts and lengths for `counts[weight][device]`, of so many bytes per item. The same in every step."""
    largest, end = max(item_bytes), 0
    starts: list[list[int]] = [[] for _ in counts]
    lengths = []
    for device in range(len(counts[0])):
        begin = end
        for held, size, places in zip(counts, item_bytes, starts, strict=True):
            places.append(-(-end // size))
            end = (places[-1] + held[device]) * size
        end = -(-end // largest) * largest
        lengths.append((end - begin) // largest)
    return starts, lengths


def weight_of(x: Tensor) -> Weight | None:
    """The bucket's weight whose local part is `x`."""
    return cast("Weight | None", getattr(getattr(x, "leaf_of", x), "weight", None))


def _counts(leaf: Tensor, parameter: nn.Parameter, axis: Axis) -> tuple[int, ...]:
    """Numbers per device. They are cached with the leaf, since they never change."""
    known: dict[str, tuple[int, ...]] = cast(Any, leaf).__dict__.setdefault("counts", {})
    if axis.name not in known:
        spec: Sharding = cast(Any, parameter).sharding
        known[axis.name] = tuple(
            math.prod(
                len(held_indices(size, dim, spec.layout, spec.mesh, _coordinates(axis, device)))
                for dim, size in enumerate(spec.split_shape)
            )
            for device in range(axis.size)
        )
    return known[axis.name]


def _coordinates(axis: Axis, index: int) -> dict[str, int]:
    """Mesh coordinates of the device at `index` along the axis, otherwise as this one's."""
    at = dict(axis.mesh.coordinates)
    for name in reversed(axis.names):
        index, at[name] = divmod(index, axis.mesh.axes[name])
    return at
