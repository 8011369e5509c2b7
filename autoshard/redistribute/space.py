"""Layouts that a redistribution may pass through, as one index, and the steps of the pair table between them.

Per axis a way may pass through `R`, `R+` and a plain shard of any dim that the axis divides; other placements (blocked
or uneven shards, `P`) only leave the source and only enter the target, so that the price of a pair does not depend on
what else is priced with it. Axes can shard or join a dim only while no axis further inside shards it, and only in
blocks that every device holds whole and in equal number. Several axes take one step if all take the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout, LocalSize, Placement, Shard
from autoshard.ir.mesh import Mesh
from autoshard.redistribute.collective_table import CHANGES
from autoshard.redistribute.steps import axis_shards, clean_cut

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Way = tuple[tuple[int, Shard], ...]  # how a dim is cut: (axis, shard) in mesh order

# Codes of placements by what a step does to them: R, R+, P, then shards of dim 0, 1, ...
_CODES: dict[Placement, int] = {REPLICATE: 0, REPLICATE_PARTIAL: 1, PARTIAL: 2}
_KINDS = ("R", "R+", "P")
_FIRST_DIM = len(_KINDS)


@dataclass(frozen=True)
class Letter:
    """A placement that an axis may take: in any layout, only in a source (never entered) or a target (never left)."""

    placement: Placement
    role: str  # any, source, target

    @property
    def code(self) -> int:
        p = self.placement
        return _FIRST_DIM + p.dim if isinstance(p, Shard) else _CODES[p]


@dataclass(frozen=True, eq=False)
class Moves:
    """Steps of the same axes: from states `start` to `stop`; `pair` is what they do, an index into `PAIRS`."""

    axes: tuple[int, ...]
    start: Integers
    stop: Integers
    pair: Integers


PAIRS = [("", ""), *CHANGES]  # ("", "") is a letter that turns from source to target
ACTIONS = [("", ""), *((change.forward, change.backward) for change in CHANGES.values())]


@dataclass(frozen=True, eq=False)
class Space:
    """Layouts as one index (mixed radix of letters, first axis slowest), without prices."""

    letters: tuple[tuple[Letter, ...], ...]
    shape: tuple[int, ...]
    mesh: Mesh

    @cached_property
    def sizes(self) -> list[int]:
        return [len(letters) for letters in self.letters]

    @cached_property
    def states(self) -> int:
        return int(np.prod(self.sizes, dtype=np.int64))

    @cached_property
    def digits(self) -> list[Integers]:
        """The letter of each axis, per state."""
        return [grid.reshape(-1) for grid in np.indices(self.sizes)]

    @cached_property
    def strides(self) -> list[int]:
        return [int(np.prod(self.sizes[axis + 1 :], dtype=np.int64)) for axis in range(len(self.sizes))]

    @cached_property
    def _positions(self) -> dict[str, list[dict[Placement, int]]]:
        roles = ("source", "target")
        return {
            role: [{x.placement: i for i, x in enumerate(row) if x.role in ("any", role)} for row in self.letters]
            for role in roles
        }

    def state_of(self, layouts: Sequence[Layout], role: str) -> Integers:
        """The states of layouts that are sources or targets (`role`)."""
        states = np.zeros(len(layouts), dtype=np.int64)
        columns = zip(*(layout.placements for layout in layouts), strict=True)
        for column, positions, stride in zip(columns, self._positions[role], self.strides, strict=True):
            states += stride * np.array([positions[placement] for placement in column], dtype=np.int64)
        return states

    def layout(self, state: int) -> Layout:
        return Layout(tuple(letters[self.digits[a][state]].placement for a, letters in enumerate(self.letters)))

    def only_sums(self, starts: Integers, stops: Integers) -> Booleans:
        """[start, stop] -> True if nothing changes but R, which becomes R+."""
        alike = np.ones((len(starts), len(stops)), bool)
        for digits, letters in zip(self.digits, self.letters, strict=True):
            placements = [letter.placement for letter in letters]
            table = [[x == y or (x is REPLICATE and y is REPLICATE_PARTIAL) for y in placements] for x in placements]
            alike &= np.array(table)[digits[starts][:, None], digits[stops]]
        return alike

    @cached_property
    def shardings(self) -> list[tuple[Integers, list[Way]]]:
        """Index of each state into the distinct ways of sharding a dim, and those ways, for each dim."""
        return [self._shardings(dim) for dim in range(len(self.shape))]

    def _shardings(self, dim: int) -> tuple[Integers, list[Way]]:
        ways: list[Way] = [()]
        index = np.zeros(self.states, dtype=np.int64)
        for axis, letters in enumerate(self.letters):
            options = [
                x.placement if isinstance(x.placement, Shard) and x.placement.dim == dim else None for x in letters
            ]
            distinct = list(dict.fromkeys(options))
            if distinct != [None]:
                place = np.array([distinct.index(option) for option in options], dtype=np.int64)
                index = index * len(distinct) + place[self.digits[axis]]
                ways = [(*cuts, (axis, option)) if option else cuts for cuts in ways for option in distinct]
        return index, ways

    @cached_property
    def elements(self) -> Integers:
        """Per state, the elements of the largest local tensor."""
        result = np.ones(self.states, dtype=np.int64)
        for size, (index, ways) in zip(self.shape, self.shardings, strict=True):
            result *= np.array([_largest(size, cuts, self.mesh) for cuts in ways])[index]
        return result

    # --- steps ---

    def moves(self) -> Iterator[Moves]:
        axes = [a for a, size in enumerate(self.mesh.sizes) if size > 1 or len(self.letters[a]) > 1]
        for count in range(1, len(axes) + 1):
            for group in itertools.combinations(axes, count):
                moves = self._moves(group)
                if len(moves.start):
                    yield moves

    def _moves(self, axes: tuple[int, ...]) -> Moves:
        """The steps of all of these axes at once: every pair of combinations of letters in which all axes agree."""
        codes, offsets, leaves, enters = self._combinations(axes)
        pairs = pair_table(len(self.shape))[codes[:, None], codes]
        pairs = np.where(leaves[:, None] & enters, pairs, -1)
        if len(axes) == 1:
            pairs[self._turns(axes[0])] = 0
        first, second = np.nonzero(pairs >= 0)
        bases = self._base_states(axes)
        start = (bases[:, None] + offsets[first]).reshape(-1)
        stop = (bases[:, None] + offsets[second]).reshape(-1)
        pair = np.broadcast_to(pairs[first, second], (len(bases), len(first))).reshape(-1)
        clean = self._clean(axes)
        keep = (pair == 0) | (clean[start] & clean[stop])
        return Moves(axes, start[keep], stop[keep], pair[keep])

    def _combinations(self, axes: tuple[int, ...]) -> tuple[Integers, Integers, Booleans, Booleans]:
        """Code, state offset, may be left, may be entered, for each combination of letters with one code."""
        by_axis = [self.letters[a] for a in axes]
        by_code: list[list[tuple[int, Letter]]] = [
            [(i * self.strides[a], x) for i, x in enumerate(letters)] for a, letters in zip(axes, by_axis, strict=True)
        ]
        entries = [
            (code, sum(offset for offset, _ in combination), combination)
            for code in dict.fromkeys(x.code for x in by_axis[0])
            for combination in itertools.product(*([(o, x) for o, x in row if x.code == code] for row in by_code))
        ]
        roles = [{x.role for _, x in combination} for _, _, combination in entries]
        return (
            np.array([code for code, _, _ in entries], dtype=np.int64),
            np.array([offset for _, offset, _ in entries], dtype=np.int64),
            np.array(["target" not in role_set for role_set in roles], dtype=bool),
            np.array(["source" not in role_set for role_set in roles], dtype=bool),
        )

    def _turns(self, axis: int) -> Booleans:
        """Pairs of letters (in order of code, as in `_combinations`) that are one placement, source then target."""
        row = self.letters[axis]
        return np.array([[x.placement == y.placement and x.role == "source" != y.role for y in row] for x in row])

    def _base_states(self, axes: tuple[int, ...]) -> Integers:
        """The states in which these axes have their first letter."""
        bases = np.zeros(1, dtype=np.int64)
        for axis, size in enumerate(self.sizes):
            if axis not in axes:
                bases = (bases[:, None] + np.arange(size) * self.strides[axis]).reshape(-1)
        return bases

    def _clean(self, axes: tuple[int, ...]) -> Booleans:
        """Per state, True if the dim that all these axes shard, if they do, can be joined over them."""
        clean = np.ones(self.states, dtype=bool)
        for dim, (index, ways) in enumerate(self.shardings):
            clean &= np.array([self._is_clean(cuts, axes, dim) for cuts in ways], dtype=bool)[index]
        return clean

    def _is_clean(self, cuts: Way, axes: tuple[int, ...], dim: int) -> bool:
        """True if not all of the axes shard the dim, or if they are the innermost to do so, in clean blocks."""
        if len({a for a, _ in cuts} & set(axes)) < len(axes):
            return True
        outer, inner = cuts[: -len(axes)], cuts[-len(axes) :]
        if tuple(a for a, _ in inner) != axes:
            return False
        return clean_cut(self.shape[dim], outer, inner, self.mesh) is not None


@lru_cache(maxsize=64)
def pair_table(dims: int) -> Integers:
    """[code before, code after] -> index into PAIRS, -1 where there is no step."""
    codes = _FIRST_DIM + dims
    table = np.full((codes, codes), -1, dtype=np.int64)
    for x, y in itertools.product(range(codes), repeat=2):
        pair = (_KINDS[x] if x < _FIRST_DIM else "S", _KINDS[y] if y < _FIRST_DIM else "S")
        if x != y and pair in CHANGES:
            table[x, y] = PAIRS.index(pair)
    return table


@lru_cache(maxsize=65536)
def _largest(size: int, cuts: Way, mesh: Mesh) -> int:
    return LocalSize(size, axis_shards(cuts, mesh)).largest(mesh)


@lru_cache(maxsize=256)
def space(
    sources: tuple[Layout, ...], targets: tuple[Layout, ...], shape: tuple[int, ...], mesh: Mesh, differentiable: bool
) -> Space:
    letters = []
    for axis, size in enumerate(mesh.sizes):
        free: list[Placement] = [REPLICATE, *([REPLICATE_PARTIAL] if differentiable else [])]
        free += [Shard(dim) for dim, length in enumerate(shape) if size > 1 and length and length % size == 0]
        axis_letters = [Letter(placement, "any") for placement in free]
        for role, layouts in (("source", sources), ("target", targets)):
            placements = {layout.placements[axis] for layout in layouts} - set(free)
            axis_letters += [Letter(placement, role) for placement in sorted(placements, key=str)]
        letters.append(tuple(sorted(axis_letters, key=lambda letter: letter.code)))
    return Space(tuple(letters), shape, mesh)
