"""Costs of the cheapest ways between layouts: seconds of local passes and of each group of axes, by phase.

A bound on a step counts these; it may count too little, never too much. So it leaves out packing for an exchange, and
the cost of a way for which all-to-all is forbidden and the pair table has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.layout import Layout, Shard
from autoshard.redistribute.collective_table import CARRIED, COLLECTIVES
from autoshard.redistribute.exchange_prices import MessageTerm, distinct, pair_codes, signatures
from autoshard.redistribute.prices import Floats, Prices, Terms
from autoshard.redistribute.space import ACTIONS, PAIRS, Integers, Space, pair_table, space

FORWARD, BACKWARD = "forward", "backward"
GATHER = "gather"  # the all-gathers of the forward once more: a weight is gathered again for backward
EXCHANGED = "exchanged"  # the same of exchanges: these go by themselves
SCATTER = "scatter"  # the gradients of all-gathers: those of weights go together, beside the backward
SUM = "sum"  # all-reduces of a gradient that a parameter may leave to a bucket: R -> R+
AGAIN = (GATHER, EXCHANGED)
PARTS = (*AGAIN, SCATTER)  # of other phases: in these already
_EXCHANGES = {row.primitive for row in COLLECTIVES.values() if row.by_index} & CARRIED.keys()  # what an exchange sends
Axes = tuple[int, ...]
Least = Callable[[Axes, str, float], float]


@dataclass(frozen=True, eq=False)
class PathParts:
    """`seconds[phase, axes][source, target]`: of collectives over the joined `axes`, of local passes where there are
    none; those of GATHER and EXCHANGED are in FORWARD too, those of SCATTER in BACKWARD.
    `tasks[phase][source, target]`: how many a host issues. `summed[source, target]`: the axes of SUM, as bits.

    `deferred[source, target]`: those of them over which the way has no other step, so that what a parameter's only use
    leaves to a bucket is just these. `elements[source]`: the local ones.
    """

    seconds: dict[tuple[str, Axes], Floats]
    tasks: dict[str, Floats]
    summed: Integers
    deferred: Integers
    elements: Integers

    def goes_alone(self, sources: Sequence[Layout]) -> NDArray[np.bool_]:
        """[source, target]: True if no collective of the forward can join a gather of many weights: there are several,
        or one that is no gather, and no two become one."""
        alone = np.zeros(self.summed.shape, bool)
        for (phase, axes), seconds in self.seconds.items():
            if phase == FORWARD and axes:
                alone |= seconds > self.seconds.get((GATHER, axes), np.zeros(alone.shape))
        for (there, _), (also, _) in combinations(self._gathers(sources), 2):
            alone |= there & also
        return alone & ~self.may_join(sources)

    def may_join(self, sources: Sequence[Layout]) -> NDArray[np.bool_]:
        """[source, target]: True if two gathers of a way may become one, as those of one dim that the source shards."""
        joined = np.zeros(self.summed.shape, bool)
        for (there, dims), (also, more) in combinations(self._gathers(sources), 2):
            joined |= there & also & ((dims & more) != 0)
        return joined

    def _gathers(self, sources: Sequence[Layout]) -> list[tuple[NDArray[np.bool_], Integers]]:
        """Mask of the pairs that gather, and the dims of each source that this gathers, for each group of axes."""
        gathers = [(axes, seconds) for (phase, axes), seconds in self.seconds.items() if phase == GATHER and axes]
        return [(got > 0, np.array([_dims(source, axes) for source in sources])[:, None]) for axes, got in gathers]


def path_parts(
    sources: Sequence[Layout], targets: Sequence[Layout], terms: Terms, least: Least | None = None
) -> PathParts:
    """Costs of the ways that `path` gives for all pairs; with `least`, at these seconds of a collective."""
    return PathCosts(sources, targets, terms).parts(least)


class PathCosts:
    """Cheapest ways between all pairs, found once, whatever their parts are counted in. `seconds[source, target]`: of
    `path`, with the forward counted as often as it is paid."""

    def __init__(self, sources: Sequence[Layout], targets: Sequence[Layout], terms: Terms) -> None:
        self.sources, self.targets = sources, targets
        state_space = space(tuple(sources), tuple(targets), terms.shape, terms.mesh, terms.differentiable)
        self.starts, self.stops = state_space.state_of(sources, "source"), state_space.state_of(targets, "target")
        self.seconds, previous, self.direct = Prices(state_space, terms).paths(sources, targets)
        self.prices = Prices(state_space, terms)  # without the steps, which are many
        self.previous = previous.astype(np.int16) if state_space.states <= np.iinfo(np.int16).max else previous

    def parts(self, least: Least | None = None, *, tasks: bool = True) -> PathParts:
        """Parts of the costs. With `least`, at these seconds of a collective; without `tasks`, these are left out."""
        prices = copy(self.prices)
        if least is not None:
            prices.seconds = least
        count = _Count(prices, (len(self.starts), len(self.stops)), tasks)
        for moves in self.moves:
            count.add_steps(moves)
        if self.exchanges is not None:
            _add_direct(count, prices, self.exchanges)
        deferred, elements = count.summed & ~count.others, prices.space.elements[self.starts]
        return PathParts(dict(count.seconds), dict(count.tasks), count.summed, deferred, elements)

    def forget(self) -> None:
        """Frees the steps, which are found again when needed."""
        for name in ("moves", "exchanges"):
            vars(self).pop(name, None)

    @cached_property
    def exchanges(self) -> _Exchanges | None:
        """Direct ways. Without all-to-all, those that only sum."""
        direct = self.direct
        if not self.prices.all_to_all:
            direct = direct & self.prices.space.only_sums(self.starts, self.stops)
        return _exchanges(self.prices, self.sources, self.targets, direct) if direct.any() else None

    @cached_property
    def moves(self) -> list[_LikeSteps]:
        """Steps of all ways by the pair table, followed back from their ends at once."""
        moves: list[_LikeSteps] = []
        ways = np.flatnonzero(~self.direct)
        row, here = ways // len(self.stops), self.stops[ways % len(self.stops)]
        steps = _Steps(self.prices.space)
        while True:
            before = self.previous[row, here]
            going = before >= 0  # negative at the start
            if not going.any():
                return moves
            ways, row, here, before = ways[going], row[going], here[going], before[going].astype(np.int64)
            moves += steps.alike(ways, before, here)
            here = before


@dataclass(frozen=True, eq=False)
class _LikeSteps:
    """One step of each of `ways`, which are places in a flat table: all do the same `pair` over the same axes. `place`:
    each step's edge among those whose ends hold `before` and `after` elements."""

    axes: Axes
    pair: int
    ways: Integers
    place: Integers
    before: Integers
    after: Integers


class _Steps:
    """Steps of many ways, sorted by what they do."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.placed = [_numbered([letter.placement for letter in letters]) for letters in space.letters]
        self.codes = [np.array([letter.code for letter in letters]) for letters in space.letters]

    def alike(self, ways: Integers, start: Integers, stop: Integers) -> Iterator[_LikeSteps]:
        edges, position = distinct(start * self.space.states + stop, self.space.states**2)
        start, stop = edges // self.space.states, edges % self.space.states
        changed = np.zeros(len(edges), np.int64)
        for axis, (digits, placed) in enumerate(zip(self.space.digits, self.placed, strict=True)):
            changed |= (placed[digits[start]] != placed[digits[stop]]).astype(np.int64) << axis
        kinds: list[tuple[Axes, int]] = []
        kind = np.zeros(len(edges), np.int16)  # of each edge; 0: nothing changes
        for bits in set(changed.tolist()) - {0}:
            members = np.flatnonzero(changed == bits)
            axes = axes_of(bits)
            first = axes[0]
            before, after = (self.codes[first][self.space.digits[first][s[members]]] for s in (start, stop))
            pairs = pair_table(len(self.space.shape))[before, after]
            for pair in set(pairs.tolist()):
                kinds.append((axes, pair))
                kind[members[pairs == pair]] = len(kinds)
        of_way = kind[position]
        order = np.argsort(of_way, kind="stable")
        bounds = np.searchsorted(of_way[order], np.arange(1, len(kinds) + 2))
        for number, (axes, pair) in enumerate(kinds):
            some = order[bounds[number] : bounds[number + 1]]
            edges_ = np.flatnonzero(kind == number + 1)
            place = np.searchsorted(edges_, position[some])
            elements = (self.space.elements[end[edges_]] for end in (start, stop))
            yield _LikeSteps(axes, pair, ways[some], place, *elements)


class _Count:
    """Sums over the steps of all ways. A way has one step at a time, so each addition is for one step of it alone."""

    def __init__(self, prices: Prices, shape: tuple[int, int], counts_tasks: bool) -> None:
        self.prices, self.counts_tasks = prices, counts_tasks
        self.seconds: dict[tuple[str, Axes], Floats] = defaultdict(lambda: np.zeros(shape))
        self.tasks: dict[str, Floats] = defaultdict(lambda: np.zeros(shape))
        self.summed = np.zeros(shape, np.int64)
        self.others = np.zeros(shape, np.int64)  # axes of steps that are no sums, and of second ones

    def add_steps(self, moves: _LikeSteps) -> None:
        bits = sum(1 << axis for axis in moves.axes)
        ways, summed, others = moves.ways, self.summed.reshape(-1), self.others.reshape(-1)
        if sums := PAIRS[moves.pair] == ("R", "R+") and self.prices.differentiable:  # no gradient, no sum
            others[ways] |= summed[ways] & bits
            summed[ways] |= bits
        else:
            others[ways] |= bits
        forward, backward = ACTIONS[moves.pair]
        phases = [FORWARD, GATHER] if forward == "all_gather" else [FORWARD]
        self.add(phases, forward, moves, moves.before, moves.after, 1.0)
        if self.prices.differentiable:
            phases = [SUM] if sums else [BACKWARD, SCATTER] if forward == "all_gather" else [BACKWARD]
            self.add(phases, backward, moves, moves.after, moves.before, self.prices.widening)

    def add(
        self, phases: Sequence[str], action: str, moves: _LikeSteps, before: Integers, after: Integers, widening: float
    ) -> None:
        """Adds the seconds of one action in all of these phases."""
        if not action:
            return
        prices, item_bytes, axes = self.prices, self.prices.item_bytes * widening, moves.axes
        if action in CARRIED:
            whole = (before if COLLECTIVES[action].bytes_of == "given" else np.maximum(before, after)).tolist()
            known = {size: prices.seconds(axes, action, size * item_bytes) for size in set(whole)}
            edge_seconds = np.array([known[size] for size in whole])
        else:
            moved = 2 * np.minimum(before, after) if COLLECTIVES[action].bytes_of == "smaller" else before + after
            edge_seconds = np.asarray(prices.local.seconds(np.asarray(moved * item_bytes, float)))
        seconds = edge_seconds[moves.place]
        for phase in phases:
            self.take(phase, axes if action in CARRIED else (), moves.ways, seconds)

    def take(self, phase: str, axes: Axes, ways: Integers, seconds: Floats) -> None:
        """Adds a task of these seconds to each of the ways."""
        if self.counts_tasks:
            self.tasks[phase].reshape(-1)[ways] += seconds > 0
        self.seconds[phase, axes].reshape(-1)[ways] += seconds


@dataclass(frozen=True, eq=False)
class _Exchanges:
    """Direct ways. `before`, `after`: the distinct bytes at their ends; `kinds`: for each kind of exchange, its
    messages, its ways (places in a flat table) and the places of their bytes."""

    before: Floats
    after: Floats
    kinds: list[tuple[list[MessageTerm], Integers, Integers, Integers]]


def _exchanges(
    prices: Prices, sources: Sequence[Layout], targets: Sequence[Layout], where: NDArray[np.bool_]
) -> _Exchanges:
    elements = prices.space.elements
    starts, stops = prices.space.state_of(sources, "source"), prices.space.state_of(targets, "target")
    before, after = (elements[states].astype(np.float64) * prices.item_bytes for states in (starts, stops))
    sizes, of_source = np.unique(before, return_inverse=True)
    others, of_target = np.unique(after, return_inverse=True)
    ways = np.flatnonzero(where)
    rows, columns = ways // len(stops), ways % len(stops)
    codes = 2 * pair_codes(sources, targets)[rows, columns] + (after[columns] <= before[rows])
    known = signatures(prices.space.mesh)
    some, position = np.unique(codes, return_inverse=True)
    numbers = np.array([known.of(code)[0] for code in some.tolist()], np.int64)[position]
    sums, terms = list(known.sums), list(known.terms)
    order = np.argsort(numbers, kind="stable")
    kinds = []
    for group in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        sent = [terms[t] for t in sums[int(numbers[group[0]])] if prices.differentiable or not terms[t].backward]
        kinds.append((sent, ways[group], of_source[rows[group]], of_target[columns[group]]))
    return _Exchanges(sizes, others, kinds)


def _add_direct(count: _Count, prices: Prices, exchanges: _Exchanges) -> None:
    """Adds the cost of the direct ways to `count`."""
    shape = len(exchanges.before), len(exchanges.after)
    priced: dict[MessageTerm, Floats] = {}
    for terms, ways, row, column in exchanges.kinds:
        for term in terms:
            if term not in priced:
                seconds = prices.term_seconds_once(term, exchanges.before, exchanges.after)
                priced[term] = np.broadcast_to(seconds, shape)
            _add_term(count, term, ways, priced[term][row, column])


def _add_term(count: _Count, term: MessageTerm, ways: Integers, seconds: Floats) -> None:
    """Adds a message of direct ways, which are places in a flat table."""
    back = SUM if term.primitive == "all_reduce" else BACKWARD
    if term.backward and back == SUM:  # beside the exchange, over other axes: R -> R+
        count.summed.reshape(-1)[ways] |= sum(1 << axis for axis in term.axes)
    phase = back if term.backward else FORWARD
    count.take(phase, term.axes if term.primitive in CARRIED else (), ways, seconds)
    if phase == FORWARD and term.primitive in _EXCHANGES:
        count.seconds[EXCHANGED, term.axes].reshape(-1)[ways] += seconds


def _numbered(items: Sequence[object]) -> Integers:
    known: dict[object, int] = {}
    return np.array([known.setdefault(item, len(known)) for item in items], np.int64)


def _dims(layout: Layout, axes: Axes) -> int:
    """Dims that a layout shards over these axes, as bits; none if it does not shard over one of them."""
    places = [layout.placements[axis] for axis in axes]
    return sum({1 << p.dim for p in places if isinstance(p, Shard)}) if all(isinstance(p, Shard) for p in places) else 0


def axes_of(bits: int) -> Axes:
    return tuple(axis for axis in range(int(bits).bit_length()) if bits >> axis & 1)
