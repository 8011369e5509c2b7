"""Seconds of the direct way for all pairs of sources and targets at once: the steps of `direct_steps`, as arrays.

What they are depends on the pair of kinds of each axis, and on whether an axis is exchanged only because one outside it
is: a code per pair of layouts. What they cost depends on the code and on the bytes before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout, Placement, Shard
from autoshard.ir.mesh import Mesh
from autoshard.redistribute.collective_table import CARRIED, COPY
from autoshard.redistribute.exchanges import direct_steps, really_exchanges
from autoshard.redistribute.steps import Message, Step, messages

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_KINDS: dict[Placement, int] = {REPLICATE: 1, REPLICATE_PARTIAL: 2, PARTIAL: 3}  # a shard is 0
# After the 4 x 4 pairs of kinds: unchanged, unchanged inside an axis that changes; and how many codes there are.
_SAME, _INSIDE, _PAIRS = range(16, 19)


def pair_codes(sources: Sequence[Layout], targets: Sequence[Layout]) -> Integers:
    """[source, target] -> code: per axis the pair of kinds, in digits of base _PAIRS."""
    columns = zip(_columns(sources), _columns(targets), strict=True)
    code = np.zeros((len(sources), len(targets)), dtype=np.int64)
    outer: list[tuple[NDArray[np.bool_], Integers, Integers]] = []  # changed, dims before, dims after
    for (kinds, dims, placements), (other_kinds, other_dims, other) in columns:
        ids: dict[Placement, int] = {}
        first, second = (np.array([ids.setdefault(p, len(ids)) for p in part]) for part in (placements, other))
        changed = first[:, None] != second
        digit = np.where(changed, kinds[:, None] * 4 + other_kinds, _SAME)
        for moved, before, after in outer:
            inside = moved & ((before == dims)[:, None] | (after == other_dims)) & (dims >= 0)[:, None] & ~changed
            digit[inside] = _INSIDE
        code = code * _PAIRS + digit
        outer.append((changed, dims, other_dims))
    return code


def _columns(layouts: Sequence[Layout]) -> list[tuple[Integers, Integers, list[Placement]]]:
    """Kind, sharded dim (-1 if none) and placement of each layout, for each axis."""
    columns = [list(column) for column in zip(*(layout.placements for layout in layouts), strict=True)]
    return [
        (
            np.array([_KINDS.get(p, 0) for p in column]),
            np.array([p.dim if isinstance(p, Shard) else -1 for p in column]),
            column,
        )
        for column in columns
    ]


@dataclass(frozen=True)
class MessageTerm:
    """A message of a direct way, see `Message`; "before" and "after" refer to the exchange."""

    backward: bool
    axes: tuple[int, ...]
    primitive: str
    factor: int
    of: str

    def full_bytes(self, before: Floats, after: Floats) -> Floats:
        """Full bytes for all pairs of the sizes before and after."""
        return Message(self.primitive, self.factor, self.of).full_bytes(before[:, None], after[None, :])


class Signatures:
    """Messages that each code means on one mesh; many codes mean the same. Filled as codes occur.

    The last bit of a code: True if the tensor gets no larger.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.terms: dict[MessageTerm, int] = {}
        self.sums: dict[tuple[int, ...], int] = {}  # positions of terms -> number of their sum
        self._known: dict[int, tuple[int, bool]] = {}

    def of(self, code: int) -> tuple[int, bool]:
        """Number of the sum of terms that a code means, and True if it really exchanges."""
        if code not in self._known:
            steps = _example_steps(code // 2, len(self.mesh.axes), bool(code % 2))
            positions = sorted(self.terms.setdefault(term, len(self.terms)) for term in _terms(steps, self.mesh))
            number = self.sums.setdefault(tuple(positions), len(self.sums))
            self._known[code] = number, really_exchanges(steps)
        return self._known[code]


signatures = lru_cache(maxsize=64)(Signatures)


def _terms(steps: Sequence[Step], mesh: Mesh) -> list[MessageTerm]:
    """Messages of a direct way. A step of the table next to the exchange changes no size."""
    terms = []
    side = "before" if any(step.by_index for step in steps) else "after"
    for step in steps:
        for backward, message in enumerate(messages(step, mesh)):
            if message.primitive:
                factor = message.factor * (2 if message.of == "both" and not step.by_index else 1)
                axes = step.axes if message.primitive in CARRIED else ()
                of = message.of if step.by_index else side
                terms.append(MessageTerm(bool(backward), axes, message.primitive, factor, of))
            if message.packed:
                terms.append(MessageTerm(bool(backward), (), COPY, 1, "both"))
        side = "after" if step.by_index else side
    return terms


@lru_cache(maxsize=65536)
def _example_steps(code: int, axes: int, shrinks: bool) -> tuple[Step, ...]:
    before: list[Placement] = []
    after: list[Placement] = []
    for axis in range(axes):
        digit = code // _PAIRS ** (axes - 1 - axis) % _PAIRS
        if digit == _SAME:
            pair: tuple[Placement, Placement] = REPLICATE, REPLICATE
        elif digit == _INSIDE:
            dim = next(p.dim for x, y in zip(before, after, strict=True) for p in (x, y) if isinstance(p, Shard))
            pair = Shard(dim), Shard(dim)
        else:
            pair = _example(digit // 4, 2 * axis), _example(digit % 4, 2 * axis + 1)
        before.append(pair[0])
        after.append(pair[1])
    return direct_steps(Layout(tuple(before)), Layout(tuple(after)), shrinks)


def _example(kind: int, dim: int) -> Placement:
    return (Shard(dim), REPLICATE, REPLICATE_PARTIAL, PARTIAL)[kind]


def direct_seconds(
    codes: Integers,
    before_bytes: Floats,
    after_bytes: Floats,
    mesh: Mesh,
    term_seconds: Callable[[MessageTerm, Floats, Floats], Floats | float],
) -> tuple[Floats, NDArray[np.bool_]]:
    """[source, target] -> seconds, and a mask of the pairs that really exchange.

    `term_seconds` prices a term for all pairs of the sizes before and after.
    """
    before, row = np.unique(before_bytes, return_inverse=True)
    after, column = np.unique(after_bytes, return_inverse=True)
    known = signatures(mesh)
    codes = 2 * codes + (after_bytes <= before_bytes[:, None])
    some, position = distinct(codes, 2 * _PAIRS ** len(mesh.axes))
    numbers = np.array([known.of(code) for code in some.tolist()], dtype=np.int64).reshape(-1, 2)
    prices = np.zeros((len(known.sums), len(before), len(after)))
    sums, terms = list(known.sums), list(known.terms)
    seconds: dict[int, Floats | float] = {}
    for number in set(numbers[:, 0].tolist()):
        for term in sums[number]:
            if term not in seconds:
                seconds[term] = term_seconds(terms[term], before, after)
            prices[number] += seconds[term]
    return prices[numbers[:, 0][position], row[:, None], column], numbers[:, 1].astype(bool)[position]


def distinct(codes: Integers, count: int) -> tuple[Integers, Integers]:
    """Codes below `count` that occur, ascending, and the position of each of `codes` among them."""
    if count > codes.size * codes.size.bit_length():  # to sort them is less work
        uniques, position = np.unique(codes, return_inverse=True)
        return uniques, position.reshape(codes.shape)
    present = np.zeros(count, dtype=bool)
    present[codes] = True
    uniques = np.flatnonzero(present)
    place = np.empty(count, dtype=np.int64)
    place[uniques] = np.arange(len(uniques))
    return uniques, place[codes]
