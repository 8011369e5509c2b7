"""Steps of a redistribution: what one changes, how the dims are sharded that it joins or shards, and what it sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import UsageError
from autoshard.ir.intervals import Cut, runs
from autoshard.ir.layout import AxisShard, Layout, LocalSize, Placement, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, DimCut
from autoshard.redistribute.collective_table import BY_INDEX, CARRIED, CHANGES, COLLECTIVES, kind


@dataclass(frozen=True)
class Step:
    """The mesh axes `axes` (indices, ascending) go from the placements `before` to `after`, all at once.

    `forward` and `backward` are what it does to the value and to the gradient: entries of the pair table, where all
    axes have the same pair, or of BY_INDEX.
    """

    axes: tuple[int, ...]
    before: tuple[Placement, ...]
    after: tuple[Placement, ...]
    forward: str
    backward: str

    def applied(self, layout: Layout) -> Layout:
        """Layout after the step. AssertionError if `layout` is not one that it starts from."""
        for axis, before, after in zip(self.axes, self.before, self.after, strict=True):
            assert layout.placements[axis] == before, f"{self} from {layout}"
            layout = layout.replace(axis, after)
        return layout

    @property
    def by_index(self) -> bool:
        return self.forward in BY_INDEX


def step_of(collective: Collective, mesh: Mesh) -> Step:
    """Step that an instruction makes."""
    axes = tuple(mesh.index(axis) for axis in collective.axes)
    return Step(axes, collective.before, collective.after, collective.forward, collective.backward)


def table_step(axes: Sequence[int], source: Layout, target: Layout) -> Step:
    """Step of the pair table that takes `axes` from their placements in `source` to those in `target`."""
    before = tuple(source.placements[a] for a in axes)
    after = tuple(target.placements[a] for a in axes)
    change = CHANGES[kind(before[0]), kind(after[0])]
    return Step(tuple(axes), before, after, change.forward, change.backward)


@dataclass(frozen=True)
class Path:
    """Steps in order of the forward, with their seconds in the forward and in the backward."""

    steps: tuple[Step, ...]
    forward_seconds: float
    backward_seconds: float


# --- how dims are cut ---


def dim_cuts(
    step: Step, layout_before: Layout, shape: Sequence[int], mesh: Mesh
) -> tuple[DimCut | None, DimCut | None]:
    """DimCuts of (the dim that a step of the table joins, the dim that it shards), as the runtime needs them.

    UsageError if the shape does not allow it, as that of another batch than the plan's."""
    if step.by_index:
        return None, None
    cuts = []
    for placements in (step.before, step.after):
        shards = [p for p in placements if isinstance(p, Shard)]
        cuts.append(_dim_cut(step.axes, shards, layout_before, shape, mesh) if shards else None)
    return cuts[0], cuts[1]


def _dim_cut(
    axes: tuple[int, ...], shards: Sequence[Shard], layout: Layout, shape: Sequence[int], mesh: Mesh
) -> DimCut:
    dim = shards[0].dim
    outer = tuple((a, s) for a, s in layout.shards(dim) if a not in axes)
    assert all(a < axes[0] for a, _ in outer), f"axes inside {axes} cut dim {dim} of {layout.on(mesh)}"
    cut = clean_cut(shape[dim], outer, tuple(zip(axes, shards, strict=True)), mesh)
    if cut is None:
        names, cuts = "+".join(mesh.names[a] for a in axes), " ".join(map(str, shards))
        message = (
            f"{cuts} over {names} in {layout.on(mesh)} of {tuple(shape)} is not one cut in parts like torch.chunk's"
        )
        raise UsageError(f"the plan moves what its shapes don't let it: {message}", "search a plan for these shapes")
    return cut


def axis_shards(shards: Sequence[tuple[int, Shard]], mesh: Mesh) -> tuple[AxisShard, ...]:
    return tuple(AxisShard(mesh.names[a], s.blocks, s.unit) for a, s in shards)


@lru_cache(maxsize=65536)
def clean_cut(
    size: int, outer: tuple[tuple[int, Shard], ...], inner: tuple[tuple[int, Shard], ...], mesh: Mesh
) -> DimCut | None:
    """The one shard that the `inner` axes, joined, make of what the `outer` ones leave of a dim.

    None unless every device holds equally many whole equal blocks of it, each split as by one axis.
    """
    local = LocalSize(size, axis_shards(outer, mesh))
    if any(isinstance(s.unit, tuple) for _, s in (*outer, *inner)):
        return None  # parts of given lengths are moved by index
    for shard in dict.fromkeys((inner[0][1], inner[-1][1])):
        if len(inner) > 1 and not _is_one_cut(size, outer, inner, shard, mesh):
            continue
        blocks = local_blocks(local, shard, mesh)
        assert isinstance(shard.unit, int)
        return DimCut(shard.dim, local, blocks, shard.unit) if blocks is not None else None
    return None


def _is_one_cut(
    size: int, outer: Sequence[tuple[int, Shard]], inner: Sequence[tuple[int, Shard]], shard: Shard, mesh: Mesh
) -> bool:
    """True if the nested shards of the inner axes put everything where one like `shard` over all of them does."""
    if any(size % s.blocks for _, s in (*outer, *inner)):
        return False
    parts = math.prod(mesh.sizes[a] for a, _ in inner)
    nested = tuple((mesh.sizes[a], s.blocks, s.unit) for a, s in (*outer, *inner))
    joined: tuple[Cut, ...] = (*nested[: len(outer)], (parts, shard.blocks, shard.unit))
    return runs(size, nested).key == runs(size, joined).key


@lru_cache(maxsize=65536)
def local_blocks(outer: LocalSize, shard: Shard, mesh: Mesh) -> int | None:
    """Number of the shard's blocks that each device holds before it; None unless equal and as many on all."""
    if outer.size % shard.blocks:
        return None
    if shard.blocks == 1 or not outer.shards:
        return shard.blocks
    held = runs(outer.size, tuple((mesh.axis_size(s.axis), s.blocks, s.unit) for s in outer.shards))
    start = np.arange(shard.blocks) * (outer.size // shard.blocks)
    stop = start + outer.size // shard.blocks
    overlap = np.clip(np.minimum(held.stop[:, None], stop) - np.maximum(held.start[:, None], start), 0, None)
    lengths = np.zeros((held.ranks, shard.blocks), dtype=np.int64)
    np.add.at(lengths, held.rank, overlap)
    longest = lengths.max(1, keepdims=True)
    if not ((lengths == 0) | (lengths == longest)).all():
        return None
    counts = set((lengths > 0).sum(1)[lengths.any(1)].tolist())
    return counts.pop() if len(counts) == 1 else None


# --- what is sent ---

Bytes = TypeVar("Bytes", float, NDArray[np.float64])


@dataclass(frozen=True)
class Message:
    """A message of a step. `primitive`: one of CARRIED, COPY (local work) or "" (nothing).

    Its full bytes, which price a collective or a pass over memory, are `factor` times those of the largest local
    tensor: of the one "before" the step, "after" it, the "larger" or the "smaller" of them, or of "both".
    """

    primitive: str
    factor: int = 0
    of: str = "larger"
    packed: bool = False  # by index sets: local work, too

    def full_bytes(self, before: Bytes, after: Bytes) -> Bytes:
        """Full bytes of the message; `before` and `after` are bytes, or arrays of them."""
        if self.of in ("larger", "smaller"):
            return self.factor * cast(Bytes, (np.maximum if self.of == "larger" else np.minimum)(before, after))
        if self.of == "both":
            return self.factor * (before + after)
        return self.factor * (before if self.of == "before" else after)


def messages(step: Step, mesh: Mesh) -> tuple[Message, Message]:
    """Messages (forward, backward) of a step.

    In an exchange a device receives what it needs and lacks. The price assumes that it holds the share of one device of
    the group already, as in an all-to-all; of a sum it receives every partial sum.
    """
    forward = _message(step, step.forward, "before", "after", mesh)
    if step.forward == "exchange" and any(kind(before) == "R+" for before in step.before):
        return forward, forward  # the gradient goes back the way the value came
    return forward, _message(step, step.backward, "after", "before", mesh)


def _message(step: Step, name: str, source: str, target: str, mesh: Mesh) -> Message:
    row = COLLECTIVES[name]
    factor, of = row.factor, {"given": source, "made": target}.get(row.bytes_of, row.bytes_of)
    if row.times == "members":
        factor *= math.prod(mesh.sizes[a] for a in step.axes)
    elif row.times == "partial":
        factor *= _partial_sums(step, source == "before", mesh)
    return Message(row.primitive, factor, of, row.by_index and row.primitive in CARRIED)


def _partial_sums(step: Step, forward: bool, mesh: Mesh) -> int:
    """Number of devices with a partial sum of each element that an exchange moves: value (P) or gradient (R+)."""
    side, other, partial = (step.before, step.after, "P") if forward else (step.after, step.before, "R+")
    pairs = zip(step.axes, side, other, strict=True)
    return math.prod(mesh.sizes[a] for a, x, y in pairs if kind(x) == partial != kind(y))
