"""Prices of steps, and the cheapest way: a shortest path by the pair table, or the direct way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.graph import DTYPE_BYTES
from autoshard.ir.layout import Layout, largest_shape
from autoshard.ir.mesh import Mesh
from autoshard.redistribute.collective_table import CARRIED, COLLECTIVES, CollectiveSeconds
from autoshard.redistribute.exchange_prices import MessageTerm, direct_seconds, pair_codes
from autoshard.redistribute.exchanges import direct_steps, really_exchanges, representative_pairs
from autoshard.redistribute.shortest_paths import StepGraph, shortest, step_graph
from autoshard.redistribute.space import ACTIONS, Integers, Space
from autoshard.redistribute.steps import Message, Path, Step, messages, table_step
from autoshard.units import EXACT

Floats = NDArray[np.float64]

_ACTIONS = sorted({action for pair in ACTIONS for action in pair})
_FORWARDS, _BACKWARDS = (np.array([_ACTIONS.index(pair[side]) for pair in ACTIONS]) for side in (0, 1))
_DONE = [COLLECTIVES[action] for action in _ACTIONS]
_GIVEN, _BOTH, _CUT = (np.array([row.bytes_of == of for row in _DONE]) for of in ("given", "both", "smaller"))
_EXCHANGES = np.array([row.route == "exchange" for row in _DONE])


@dataclass(frozen=True)
class Pass:
    """Cost of a local slice, mask or padding: one kernel, whatever the number of axes."""

    launch_seconds: float
    seconds_per_byte: float  # read or written

    def seconds(self, size_bytes: Floats | float) -> Floats | float:
        return self.launch_seconds + self.seconds_per_byte * size_bytes


NOMINAL = Pass(5e-6, 0.0)  # where no device is known


@dataclass(frozen=True)
class Terms:
    """A tensor of global `shape` on a mesh, and what moving it costs.

    `seconds(axes, kind, full_bytes)`: axes joined, kind of CARRIED, full_bytes the whole message of a group (output
    of an all_gather, input of a reduce_scatter, tensor of an all_reduce, local input of an all_to_all). `local`: a
    step without communication. `forward_times`: how often a forward is paid. Without `all_to_all` nothing is exchanged.
    `gradient_dtype`: that in which gradients are moved, "" for `dtype`.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    differentiable: bool
    seconds: CollectiveSeconds
    local: Pass = NOMINAL
    forward_times: float = 1.0
    all_to_all: bool = True
    gradient_dtype: str = ""


class Prices:
    """A space with the seconds of each step.

    Without all-to-all the direct way gathers; it is then taken only where there is no other.
    """

    def __init__(self, space: Space, terms: Terms) -> None:
        self.space, self.differentiable, self.seconds = space, terms.differentiable, terms.seconds
        self.forward_times, self.all_to_all, self.local = terms.forward_times, terms.all_to_all, terms.local
        self.item_bytes = DTYPE_BYTES[terms.dtype]
        self.widening = DTYPE_BYTES[terms.gradient_dtype or terms.dtype] / self.item_bytes  # of gradients
        self.sizes, self.size_of = np.unique(space.elements, return_inverse=True)
        self._sizes_bytes = (self.sizes * float(self.item_bytes)).tolist()

    # --- one step ---

    def path_seconds(self, start: Layout, steps: Sequence[Step]) -> tuple[float, float]:
        """(forward, backward) seconds of steps taken one after the other from `start`."""
        forward = backward = 0.0
        for step in steps:
            stop = step.applied(start)
            sizes = self._bytes(start), self._bytes(stop)
            there, back = messages(step, self.space.mesh)
            forward += self._message_seconds(there, step.axes, sizes)
            wide = sizes[0] * self.widening, sizes[1] * self.widening
            backward += self._message_seconds(back, step.axes, wide) if self.differentiable else 0.0
            start = stop
        return forward, backward

    def _bytes(self, layout: Layout) -> float:
        return float(self.item_bytes * math.prod(largest_shape(self.space.shape, layout, self.space.mesh)))

    def _message_seconds(self, message: Message, axes: tuple[int, ...], sizes: tuple[float, float]) -> float:
        if not message.primitive:
            return 0.0
        size = float(message.full_bytes(*sizes))
        if message.primitive not in CARRIED:
            return float(self.local.seconds(size))
        packing = float(self.local.seconds(sum(sizes))) if message.packed else 0.0
        return packing + self.seconds(axes, message.primitive, size)

    def direct(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        return direct_steps(source, target, self._bytes(target) <= self._bytes(source), self.all_to_all)

    # --- the graph of the pair table ---

    @cached_property
    def table_steps(self) -> StepGraph:
        """Seconds of every step of the table, plus a little for each step."""
        parts = [self._weighted(m.axes, m.start, m.stop, m.pair) for m in self.space.moves()]
        start, stop, weight = (np.concatenate([part[i] for part in parts] or [np.zeros(0)]) for i in range(3))
        return step_graph(self.space.states, start.astype(np.int64), stop.astype(np.int64), weight)

    def _weighted(
        self, axes: tuple[int, ...], start: Integers, stop: Integers, pair: Integers
    ) -> tuple[Integers, Integers, Floats]:
        elements, tables = self.space.elements, {w: self._action_table(axes, w) for w in {1.0, self.widening}}
        larger, smaller = np.where(elements[start] > elements[stop], (start, stop), (stop, start))
        moved = np.stack([elements[start] + elements[stop], 2 * elements[smaller]])  # by local steps; by those that cut
        moved_seconds = (self.local.seconds_per_byte * self.item_bytes) * moved
        seconds = np.full(len(start), EXACT)  # prefers fewer steps where the price is the same
        ways = ((self.forward_times, 1.0, _FORWARDS, start), (1.0, self.widening, _BACKWARDS, stop))
        for times, widening, actions, states in ways:
            if actions is _FORWARDS or self.differentiable:
                action = actions[pair]
                whole = np.where(_GIVEN[action], states, larger)
                seconds += times * tables[widening][action, self.size_of[whole]]
                passed = widening * np.where(_CUT[action], moved_seconds[1], moved_seconds[0])
                seconds += times * np.where(_BOTH[action] | _CUT[action], passed, 0.0)
        if self.all_to_all:
            return start, stop, seconds
        possible = np.isfinite(seconds)
        return start[possible], stop[possible], seconds[possible]

    def _action_table(self, axes: tuple[int, ...], widening: float) -> Floats:
        """Seconds of each of _ACTIONS over these axes for each size that occurs, `widening` times as large."""
        table = np.zeros((len(_ACTIONS), len(self.sizes)))
        for row, action in enumerate(_ACTIONS):
            if action in CARRIED:
                table[row] = [self.seconds(axes, action, size * widening) for size in self._sizes_bytes]
            elif action:
                table[row] = self.local.launch_seconds
        if not self.all_to_all:
            table[_EXCHANGES] = np.inf
        return table

    # --- the cheapest ways ---

    def all_pairs(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> Floats:
        return self.paths(sources, targets)[0]

    def paths(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> tuple[Floats, Integers, NDArray[np.bool_]]:
        """Arrays: seconds [source, target]; the state before on the way by the table [source, state], negative at its
        start; and True if the direct way is taken [source, target]."""
        starts, stops = self.space.state_of(sources, "source"), self.space.state_of(targets, "target")
        reached, previous = shortest(self.table_steps, starts)
        seconds: Floats = reached[:, stops]
        if self.all_to_all:
            direct, goes = self._direct_or_not(sources, targets, seconds, previous)
            return np.where(goes, direct, seconds), previous, goes
        goes = np.isinf(seconds) | self._detours(starts, stops, previous)
        for i, j in zip(*np.nonzero(goes), strict=True):
            seconds[i, j] = self._direct_seconds(sources[i], targets[j])
        return seconds, previous, goes

    def _direct_or_not(
        self, sources: Sequence[Layout], targets: Sequence[Layout], seconds: Floats, previous: Integers
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Seconds of the direct way between all pairs, and a mask of the pairs that take it."""
        starts, stops = self.space.state_of(sources, "source"), self.space.state_of(targets, "target")
        direct, exchanges = self._all_direct(sources, targets, starts, stops)
        without = np.isinf(seconds) | self._detours(starts, stops, previous)
        return direct, without | exchanges & (direct < seconds)

    def _detours(self, starts: Integers, stops: Integers, previous: Integers) -> NDArray[np.bool_]:
        """[source, target] -> is the direct way taken whatever the one by the table costs, as that passes through a
        tensor larger than both its ends, or cuts and gathers what is only summed (its sum goes in a bucket, cheaper)?

        `previous` is a row for each of `starts`. Without all-to-all the larger tensor is passed through.
        """
        elements, rows = self.space.elements, np.arange(len(starts))[:, None]
        here = np.broadcast_to(stops, (len(starts), len(stops)))
        smallest = largest = np.broadcast_to(elements[stops], here.shape)
        while True:
            before = previous[rows, here]
            here = np.where(before >= 0, before, here)
            if not (before >= 0).any():
                break
            smallest, largest = np.minimum(smallest, elements[here]), np.maximum(largest, elements[here])
        swells = largest > np.maximum(elements[starts][:, None], elements[stops])
        return self.all_to_all & swells | self.space.only_sums(starts, stops) & (smallest < elements[stops])

    def _all_direct(
        self, sources: Sequence[Layout], targets: Sequence[Layout], starts: Integers, stops: Integers
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Seconds of the direct way between all pairs, and a mask of the pairs that really exchange."""
        before, after = (self.space.elements[s].astype(np.float64) * self.item_bytes for s in (starts, stops))
        codes = pair_codes(sources, targets)
        return direct_seconds(codes, before, after, self.space.mesh, self._term_seconds)

    def _term_seconds(self, term: MessageTerm, before: Floats, after: Floats) -> Floats | float:
        """Seconds of a message of the direct way for all pairs of the sizes before and after."""
        times = (1.0 if self.differentiable else 0.0) if term.backward else self.forward_times
        return times * self.term_seconds_once(term, before, after) if times else 0.0

    def term_seconds_once(self, term: MessageTerm, before: Floats, after: Floats) -> Floats | float:
        """Seconds of the message, paid once."""
        sizes = term.full_bytes(before, after) * (self.widening if term.backward else 1.0)
        if term.primitive not in CARRIED:
            return self.local.seconds(sizes)
        known = {size: self.seconds(term.axes, term.primitive, size) for size in set(sizes.flat)}
        return np.array([known[size] for size in sizes.flat]).reshape(sizes.shape)

    def _from(self, start: int) -> tuple[Floats, Integers]:
        """Seconds and previous states from `start`, (states,) each."""
        seconds, previous = shortest(self.table_steps, np.array([start]))
        return seconds[0], previous[0]

    def _direct_seconds(self, source: Layout, target: Layout) -> float:
        steps = self.direct(source, target)
        forward, backward = self.path_seconds(source, steps)
        return self.forward_times * forward + backward + EXACT * len(steps)

    def path(self, source: Layout, target: Layout) -> Path:
        start, stop = (int(self.space.state_of([x], role)[0]) for x, role in ((source, "source"), (target, "target")))
        seconds, previous = self._from(start)
        if source == target:
            return Path((), 0.0, 0.0)
        direct = self._is_direct(source, target, float(seconds[stop]), start, stop, previous)
        steps = self.direct(source, target) if direct else tuple(self._walked(start, stop, previous))
        return Path(steps, *self.path_seconds(source, steps))

    def _is_direct(
        self, source: Layout, target: Layout, seconds: float, start: int, stop: int, previous: Integers
    ) -> bool:
        """True if the direct way is taken, when the way by the table takes so many `seconds`."""
        detour = self._detours(np.array([start]), np.array([stop]), previous[None, :])[0, 0]
        if math.isinf(seconds) or detour or not self.all_to_all:
            return math.isinf(seconds) or bool(detour)
        better = self._direct_seconds(source, target) < seconds * (1 - 1e-12)
        return better and really_exchanges(self.direct(source, target))

    def _walked(self, start: int, stop: int, previous: Integers) -> list[Step]:
        steps: list[Step] = []
        while stop != start:
            before = int(previous[stop])
            steps += self._step(before, stop)
            stop = before
        return steps[::-1]

    def _step(self, start: int, stop: int) -> list[Step]:
        """Step between two neighbouring states; none if a letter only turns from source to target."""
        source, target = self.space.layout(start), self.space.layout(stop)
        pairs = zip(source.placements, target.placements, strict=True)
        axes = [axis for axis, (x, y) in enumerate(pairs) if x != y]
        return [table_step(axes, source, target)] if axes else []

    def steps_between(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> list[tuple[Layout, Step]]:
        edges: set[tuple[int, int]] = set()
        direct: list[tuple[int, int]] = []
        prices = self.all_pairs(sources, targets)
        stops = self.space.state_of(targets, "target")
        for i, start in enumerate(self.space.state_of(sources, "source").tolist()):
            seconds, previous = self._from(start)
            done = {start}
            detours = self._detours(np.array([start]), stops, previous[None, :])[0]
            for j, state in enumerate(stops.tolist()):
                if sources[i] != targets[j] and (detours[j] or not seconds[state] <= prices[i, j] * (1 + 1e-12)):
                    direct.append((i, j))
                    continue
                while state not in done:
                    done.add(state)
                    edges.add((int(previous[state]), state))
                    state = int(previous[state])
        steps = [(self.space.layout(start), step) for start, stop in sorted(edges) for step in self._step(start, stop)]
        for i, j in representative_pairs(sources, targets, direct):
            layout = sources[i]
            for step in self.direct(layout, targets[j]):
                steps.append((layout, step))
                layout = step.applied(layout)
        return list(dict.fromkeys(steps))
