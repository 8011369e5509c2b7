"""The cheapest sequence of one-axis steps from one layout to another, its price, and the collectives that it means.

A step changes the placement of one mesh axis; its forward acts on the value, its backward on the gradient. The search
is a shortest path over layouts. Per axis it may pass through `R`, `R+` and a plain shard of any dim that the axis
divides; other placements (blocked or uneven shards, `P`) only leave the source and only enter the target, so that the
price of a pair does not depend on what else is priced with it. An axis can be cut or joined on a dim only while
no inner axis shards that dim, and only in blocks that every device holds whole and in equal number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from autoshard.graph.model import DTYPE_BYTES
from autoshard.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL,
    AxisShard,
    Layout,
    LocalSize,
    Placement,
    Shard,
)
from autoshard.mesh import Mesh
from autoshard.program.model import DimCut

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
CollectiveSeconds = Callable[[int, str, float], float]

FORWARD: dict[tuple[str, str], str] = {
    ("S", "S"): "all_to_all", ("S", "R"): "all_gather", ("S", "R+"): "all_gather", ("S", "P"): "zero_pad",
    ("R", "S"): "slice", ("R", "R+"): "", ("R", "P"): "mask",
    ("R+", "S"): "slice", ("R+", "R"): "", ("R+", "P"): "mask",
    ("P", "S"): "reduce_scatter", ("P", "R"): "all_reduce", ("P", "R+"): "all_reduce",
}  # fmt: skip
BACKWARD: dict[tuple[str, str], str] = {
    ("S", "S"): "all_to_all", ("S", "R"): "slice", ("S", "R+"): "reduce_scatter", ("S", "P"): "slice",
    ("R", "S"): "all_gather", ("R", "R+"): "all_reduce", ("R", "P"): "",
    ("R+", "S"): "zero_pad", ("R+", "R"): "mask", ("R+", "P"): "mask",
    ("P", "S"): "all_gather", ("P", "R"): "", ("P", "R+"): "all_reduce",
}  # fmt: skip
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_FIXED = {REPLICATE: "R", REPLICATE_PARTIAL: "R+", PARTIAL: "P"}
_HOP_SECONDS = 1e-12  # prefers fewer steps where the price is the same; not part of the price
COPY_SECONDS = 5e-6  # launch of a local slice, mask or padding


def kind(placement: Placement) -> str:
    """`S`, `R`, `R+` or `P`: the row or column of the tables."""
    return "S" if isinstance(placement, Shard) else _FIXED[placement]


def runtime_call(before: Placement, after: Placement) -> tuple[str, str | None]:
    """The runtime function of a step and its `grad` argument (None for all_to_all, which has none)."""
    pair = kind(before), kind(after)
    name = {"": "copy", "slice": "slice_shard"}.get(FORWARD[pair], FORWARD[pair])
    return name, None if name == "all_to_all" else BACKWARD[pair] or "identity"


@dataclass(frozen=True)
class Step:
    """Mesh axis `axis` (an index) goes from placement `before` to `after`."""

    axis: int
    before: Placement
    after: Placement


@dataclass(frozen=True)
class Path:
    """Steps in order of the forward, with their seconds in the forward and in the backward."""

    steps: tuple[Step, ...]
    forward_seconds: float
    backward_seconds: float


def path(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    dtype: str,
    mesh: Mesh,
    differentiable: bool,
    collective_seconds: CollectiveSeconds,
    copy_seconds: float = COPY_SECONDS,
) -> Path | None:
    """The cheapest way from `source` to `target`, None where there is none.

    `collective_seconds(axis, kind, full_bytes)`: kind is of COLLECTIVES, full_bytes the whole message of a group
    (output of an all_gather, input of a reduce_scatter, tensor of an all_reduce, local input of an all_to_all).
    """
    space = _space((source,), (target,), tuple(shape), mesh, differentiable)
    prices = _Prices(space, DTYPE_BYTES[dtype], differentiable, collective_seconds, copy_seconds)
    return prices.path(source, target)


def all_pairs(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: str,
    mesh: Mesh,
    differentiable: bool,
    collective_seconds: CollectiveSeconds,
    copy_seconds: float = COPY_SECONDS,
) -> tuple[Floats, Floats]:
    """(forward, backward) seconds of `path` for all pairs, as [source, target]; inf where there is none."""
    space = _space(tuple(sources), tuple(targets), tuple(shape), mesh, differentiable)
    prices = _Prices(space, DTYPE_BYTES[dtype], differentiable, collective_seconds, copy_seconds)
    return prices.all_pairs(sources, targets)


def steps_between(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: str,
    mesh: Mesh,
    differentiable: bool,
    collective_seconds: CollectiveSeconds,
) -> list[tuple[Layout, Step]]:
    """The distinct steps, each with the layout it starts from, on the ways that `path` gives for all pairs."""
    space = _space(tuple(sources), tuple(targets), tuple(shape), mesh, differentiable)
    prices = _Prices(space, DTYPE_BYTES[dtype], differentiable, collective_seconds, COPY_SECONDS)
    return prices.steps_between(sources, targets)


def dim_cuts(
    step: Step, layout_before: Layout, shape: Sequence[int], mesh: Mesh
) -> tuple[DimCut | None, DimCut | None]:
    """(the dim that the step joins, the dim that it cuts), as the runtime needs them."""
    return tuple(  # type: ignore[return-value]
        _dim_cut(placement, step.axis, layout_before, shape, mesh) if isinstance(placement, Shard) else None
        for placement in (step.before, step.after)
    )


def _dim_cut(shard: Shard, axis: int, layout: Layout, shape: Sequence[int], mesh: Mesh) -> DimCut:
    size = LocalSize(shape[shard.dim], _cuts([(a, s) for a, s in layout.shards(shard.dim) if a < axis], mesh))
    blocks = local_blocks(size, shard, mesh)
    assert blocks is not None, f"{shard} over {mesh.names[axis]} in {layout.on(mesh)} of {tuple(shape)} is not clean"
    return DimCut(shard.dim, size, blocks, shard.unit)


def _cuts(shards: Sequence[tuple[int, Shard]], mesh: Mesh) -> tuple[AxisShard, ...]:
    return tuple(AxisShard(mesh.names[a], shard.blocks, shard.unit) for a, shard in shards)


@lru_cache(maxsize=65536)
def local_blocks(outer: LocalSize, shard: Shard, mesh: Mesh) -> int | None:
    """How many of the shard's blocks each device holds before the cut; None unless equal and as many on all."""
    if outer.size % shard.blocks:
        return None
    if shard.blocks == 1 or not outer.shards:
        return shard.blocks
    ranges = [range(n) if name in {s.axis for s in outer.shards} else range(1) for name, n in mesh.axes]
    block = outer.size // shard.blocks
    counts = set()
    for coordinates in np.ndindex(*map(len, ranges)):
        held: dict[int, int] = {}
        for start, stop in outer.intervals(mesh, coordinates):
            while start < stop:
                end = min(stop, (start // block + 1) * block)
                held[start // block] = held.get(start // block, 0) + end - start
                start = end
        if len(set(held.values())) > 1:
            return None
        counts |= {len(held)} if held else set()
    return counts.pop() if len(counts) == 1 else None


@lru_cache(maxsize=65536)
def _largest(size: int, cuts: tuple[AxisShard, ...], mesh: Mesh) -> int:
    return LocalSize(size, cuts).largest(mesh)


# --- the graph of layouts ---


@dataclass(frozen=True)
class _Letter:
    """A placement that an axis may take: in any layout, only in a source (never entered) or a target (never left)."""

    placement: Placement
    role: str  # any, source, target


@dataclass(frozen=True, eq=False)
class _Move:
    """One step of one axis between two letters, from states `start` to states `stop` (index arrays)."""

    axis: int
    before: Placement
    after: Placement
    start: Integers
    stop: Integers


@dataclass(frozen=True, eq=False)
class _Space:
    """All layouts as one index array (mixed radix of letters, first axis slowest), without prices."""

    letters: tuple[tuple[_Letter, ...], ...]
    shape: tuple[int, ...]
    mesh: Mesh

    @cached_property
    def digits(self) -> list[Integers]:
        """The letter of each axis, per state."""
        sizes = [len(letters) for letters in self.letters]
        return [grid.reshape(-1) for grid in np.indices(sizes)]

    @cached_property
    def strides(self) -> list[int]:
        sizes = [len(letters) for letters in self.letters]
        return [int(np.prod(sizes[axis + 1 :], dtype=np.int64)) for axis in range(len(sizes))]

    def state(self, layout: Layout, role: str) -> int:
        index = 0
        for axis, placement in enumerate(layout.placements):
            letter = next(
                i for i, x in enumerate(self.letters[axis]) if x.placement == placement and x.role in ("any", role)
            )
            index += letter * self.strides[axis]
        return index

    def layout(self, state: int) -> Layout:
        return Layout(tuple(letters[self.digits[a][state]].placement for a, letters in enumerate(self.letters)))

    def _shardings(self, dim: int) -> tuple[Integers, list[tuple[tuple[int, Shard], ...]]]:
        """Per state an index into the distinct ways that `dim` is cut, and those ways as (axis, Shard) pairs."""
        ways: list[tuple[tuple[int, Shard], ...]] = [()]
        index = np.zeros(len(self.digits[0]) if self.digits else 1, dtype=np.int64)
        for axis, letters in enumerate(self.letters):
            options = [
                x.placement if isinstance(x.placement, Shard) and x.placement.dim == dim else None for x in letters
            ]
            distinct = list(dict.fromkeys(options))
            place = np.array([distinct.index(option) for option in options], dtype=np.int64)
            index = index * len(distinct) + place[self.digits[axis]]
            ways = [(*way, (axis, option)) if option else way for way in ways for option in distinct]
        return index, ways

    @cached_property
    def shardings(self) -> list[tuple[Integers, list[tuple[tuple[int, Shard], ...]]]]:
        return [self._shardings(dim) for dim in range(len(self.shape))]

    @cached_property
    def elements(self) -> Integers:
        """Per state, the elements of the largest local tensor."""
        result = np.ones(len(self.digits[0]) if self.digits else 1, dtype=np.int64)
        for size, (index, ways) in zip(self.shape, self.shardings, strict=True):
            result *= np.array([_largest(size, _cuts(way, self.mesh), self.mesh) for way in ways])[index]
        return result

    def _movable(self, axis: int, dim: int) -> NDArray[np.bool_]:
        """Per state, whether `axis` is the innermost to cut `dim`, in clean blocks."""
        index, ways = self.shardings[dim]
        return np.array([self._is_movable(way, axis, dim) for way in ways])[index]

    def _is_movable(self, way: tuple[tuple[int, Shard], ...], axis: int, dim: int) -> bool:
        if not way or way[-1][0] != axis:
            return False
        return local_blocks(LocalSize(self.shape[dim], _cuts(way[:-1], self.mesh)), way[-1][1], self.mesh) is not None

    @cached_property
    def moves(self) -> list[_Move]:
        result = []
        for axis, letters in enumerate(self.letters):
            movable = [self._movable(axis, dim) for dim in range(len(self.shape))]
            of_letter = [np.flatnonzero(self.digits[axis] == i) for i in range(len(letters))]
            for i, before in enumerate(letters):
                for j, after in enumerate(letters):
                    if i != j and before.role != "target" and after.role != "source" and _possible(before, after):
                        start, stop = of_letter[i], of_letter[i] + (j - i) * self.strides[axis]
                        keep = np.ones(len(start), dtype=bool)
                        if before.placement != after.placement:
                            for placement, states in ((before.placement, start), (after.placement, stop)):
                                if isinstance(placement, Shard):
                                    keep &= movable[placement.dim][states]
                        result.append(_Move(axis, before.placement, after.placement, start[keep], stop[keep]))
        return result


def _possible(before: _Letter, after: _Letter) -> bool:
    """All pairs but two shards of one dim, in other blocks. A letter may turn from source to target."""
    x, y = before.placement, after.placement
    return x == y or not (isinstance(x, Shard) and isinstance(y, Shard) and x.dim == y.dim)


@lru_cache(maxsize=256)
def _space(
    sources: tuple[Layout, ...], targets: tuple[Layout, ...], shape: tuple[int, ...], mesh: Mesh, differentiable: bool
) -> _Space:
    letters = []
    for axis, size in enumerate(mesh.sizes):
        free: list[Placement] = [REPLICATE, *([REPLICATE_PARTIAL] if differentiable else [])]
        free += [Shard(dim) for dim, length in enumerate(shape) if size > 1 and length and length % size == 0]
        own = [_Letter(placement, "any") for placement in free]
        for role, layouts in (("source", sources), ("target", targets)):
            placements = {layout.placements[axis] for layout in layouts} - set(free)
            own += [_Letter(placement, role) for placement in sorted(placements, key=str)]
        letters.append(tuple(own))
    return _Space(tuple(letters), shape, mesh)


class _Prices:
    """A space with the seconds of each step."""

    def __init__(
        self, space: _Space, dtype_bytes: int, differentiable: bool, seconds: CollectiveSeconds, copy_seconds: float
    ) -> None:
        self.space, self.collective_seconds, self.copy_seconds = space, seconds, copy_seconds
        self.bytes, self.size_of = np.unique(space.elements * dtype_bytes, return_inverse=True)
        self.tables: dict[tuple[int, str], Floats] = {}
        moves = space.moves
        empty = [np.zeros(0)]
        start = np.concatenate([m.start for m in moves] + empty).astype(np.int64)
        stop = np.concatenate([m.stop for m in moves] + empty).astype(np.int64)
        forward = np.concatenate([self._seconds(FORWARD, m, m.start, m.stop) for m in moves] + empty)
        backward = np.zeros_like(forward)
        if differentiable:
            backward = np.concatenate([self._seconds(BACKWARD, m, m.stop, m.start) for m in moves] + empty)
        possible = np.isfinite(forward + backward)
        states = len(space.elements)
        place = start[possible], stop[possible]
        self.forward = csr_matrix((forward[possible], place), shape=(states, states))
        self.backward = csr_matrix((backward[possible], place), shape=(states, states))
        weights = forward[possible] + backward[possible] + _HOP_SECONDS
        self.weights = csr_matrix((weights, place), shape=(states, states))

    def _seconds(self, table: dict[tuple[str, str], str], move: _Move, given: Integers, made: Integers) -> Floats:
        """Seconds of one primitive that turns what lies as in states `given` into what lies as in `made`."""
        if move.before == move.after:
            return np.zeros(len(move.start))
        primitive = table[kind(move.before), kind(move.after)]
        if primitive not in COLLECTIVES:
            return np.full(len(move.start), self.copy_seconds if primitive else 0.0)
        elements = self.space.elements
        whole = given if primitive == "all_to_all" else np.where(elements[given] > elements[made], given, made)
        return self._table(move.axis, primitive)[self.size_of[whole]]

    def _table(self, axis: int, primitive: str) -> Floats:
        """Seconds of a collective for every message size that occurs."""
        if (axis, primitive) not in self.tables:
            seconds = [self.collective_seconds(axis, primitive, float(size)) for size in self.bytes]
            self.tables[axis, primitive] = np.array(seconds, dtype=float)
        return self.tables[axis, primitive]

    def all_pairs(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> tuple[Floats, Floats]:
        starts = np.array([self.space.state(layout, "source") for layout in sources], dtype=np.int64)
        stops = np.array([self.space.state(layout, "target") for layout in targets], dtype=np.int64)
        seconds, previous = dijkstra(self.weights, indices=starts, return_predecessors=True)
        here = np.broadcast_to(stops, (len(starts), len(stops))).copy()
        reached = np.isfinite(np.take_along_axis(seconds, here, 1))
        forward, backward = np.where(reached, 0.0, np.inf), np.where(reached, 0.0, np.inf)
        while True:
            rows, columns = np.nonzero(reached & (here != starts[:, None]))
            if not len(rows):
                return forward, backward
            state = here[rows, columns]
            before = previous[rows, state]
            forward[rows, columns] += np.asarray(self.forward[before, state]).reshape(-1)
            backward[rows, columns] += np.asarray(self.backward[before, state]).reshape(-1)
            here[rows, columns] = before

    def steps_between(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> list[tuple[Layout, Step]]:
        edges: set[tuple[int, int]] = set()
        for source in sources:
            start = self.space.state(source, "source")
            seconds, previous = dijkstra(self.weights, indices=start, return_predecessors=True)
            done = {start}
            for target in targets:
                state = self.space.state(target, "target")
                while state not in done and np.isfinite(seconds[state]):
                    done.add(state)
                    edges.add((int(previous[state]), state))
                    state = int(previous[state])
        return [(self.space.layout(start), step) for start, stop in sorted(edges) for step in self._step(start, stop)]

    def path(self, source: Layout, target: Layout) -> Path | None:
        start, state = self.space.state(source, "source"), self.space.state(target, "target")
        seconds, previous = dijkstra(self.weights, indices=start, return_predecessors=True)
        if not np.isfinite(seconds[state]):
            return None
        steps: list[Step] = []
        forward = backward = 0.0
        while state != start:
            before = int(previous[state])
            forward, backward = forward + self.forward[before, state], backward + self.backward[before, state]
            steps += self._step(before, state)
            state = before
        return Path(tuple(reversed(steps)), float(forward), float(backward))

    def _step(self, start: int, stop: int) -> list[Step]:
        """The step between two neighbouring states; none where a letter turns from source to target."""
        for axis, letters in enumerate(self.space.letters):
            x, y = (letters[self.space.digits[axis][state]].placement for state in (start, stop))
            if x != y:
                return [Step(axis, x, y)]
        return []
