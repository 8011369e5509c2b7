"""A problem with repeated blocks without most of them: of each run one block is left, and how often it recurs.

What is kept near the ends of a run is more than one block: as far as the reduction of domains can look, so that every
block that is left out keeps the same strategies as the one that stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Integers, Problem, Value, changed
from autoshard.solvers.common.clock import Pace
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.repeated_blocks import LEAST_BLOCKS, BlockRun, Line, runs
from autoshard.solvers.elimination.weighted_sum import Additive

ROUNDS = 2  # of the reduction of domains


@dataclass(frozen=True, eq=False)
class Fold:
    """`count` equal blocks of `period` nodes. In the short problem the block from node `start` stands for all; in the
    line of the whole problem the first of them begins at `position`.

    `left`: the nodes before a block that values which end in it reach. `right`: the same before the next block.
    """

    start: int
    position: int
    period: int
    count: int
    left: tuple[int, ...]

    @property
    def block(self) -> range:
        return range(self.start, self.start + self.period)

    @property
    def right(self) -> tuple[int, ...]:
        return tuple(node + self.period for node in self.left)


@dataclass(frozen=True, eq=False)
class Short:
    """Nodes in the order of the line; `positions[node]`: where it stands in that of the whole problem. `rounds` of a
    reduction of domains leave the blocks equal that one stands for."""

    problem: Problem
    line: Line
    positions: Integers
    folds: tuple[Fold, ...]
    rounds: int = ROUNDS


def shortened(sum_: Additive, contents: Contents, rounds: int = ROUNDS) -> Short | None:
    """Short problem; None without enough repeats. `rounds`: see `Short`; the fewer, the less is left at the ends."""
    placed, block_runs = runs(sum_, contents)
    shared = np.array([len(value.consumers) > 1 for value in sum_.problem.values], bool)
    folds, pace = [], Pace(len(block_runs))
    for number, run in enumerate(block_runs):
        pace.step(number)
        fold = _fold(sum_.problem, placed, run, shared, rounds)
        folds += [fold] if fold else []
    return _shortened(sum_.problem, placed, folds, rounds) if folds else None


def _fold(problem: Problem, placed: Line, run: BlockRun, shared: NDArray[np.bool_], rounds: int) -> Fold | None:
    """Fold of the blocks whose every node has the same surroundings, split where the fewest strategies meet. `start` is
    that of the line still. `shared`: of each value whether it has several consumers."""
    period = run.period * max(1, math.ceil(run.reach / run.period))
    low, high = run.start + (rounds + 1) * run.reach, run.stop - rounds * run.reach
    count = (high - low - run.period + 1) // period
    if count < LEAST_BLOCKS:
        return None
    touches = (placed.first >= run.start) | (placed.last < run.stop) | shared  # others pass over the run
    near = [spots for spots in _spots(problem, placed, low, low + run.period, touches) if _inside(spots, run)]
    sizes = {spot: len(problem.nodes[placed.nodes[spot]].seconds) for spots in near for spot in spots}

    def border(cut: int) -> tuple[int, ...]:
        crossing = (spots for spots in near if min(spots) < cut <= max(spots))
        return tuple(sorted({spot for spots in crossing for spot in spots if spot < cut}))

    cuts = [(math.prod(sizes[spot] for spot in border(cut)), cut) for cut in range(low, low + run.period)]
    cut = min(cuts)[1]
    return Fold(cut, cut, period, count, border(cut))


def _spots(problem: Problem, placed: Line, low: int, high: int, some: NDArray[np.bool_]) -> Iterator[list[int]]:
    """The positions of the nodes of those values of `some` that cross a cut from low to high."""
    for v in np.flatnonzero(some & (placed.first < high) & (placed.last >= low)):
        value = problem.values[v]
        yield [int(placed.positions[n]) for n in (value.producer, *value.consumers)]


def _inside(spots: Sequence[int], run: BlockRun) -> bool:
    return any(run.start <= spot < run.stop for spot in spots)


def _shortened(problem: Problem, placed: Line, folds: Sequence[Fold], rounds: int) -> Short:
    stays = np.ones(len(problem.nodes), dtype=bool)
    stand_in = np.arange(len(problem.nodes))
    for fold in folds:
        first, last = fold.position + fold.period, fold.position + fold.count * fold.period
        stays[first:last] = False
        stand_in[last - fold.period : last] -= (fold.count - 1) * fold.period  # what comes after sees the last block
    places = np.cumsum(stays) - 1
    moved = places[stand_in][placed.positions]
    positions = np.flatnonzero(stays)
    values = [_moved(problem.values[v], moved) for v in np.flatnonzero(stays[placed.last])]
    nodes = tuple(problem.nodes[n] for n in placed.nodes[positions])
    short = replace(problem, nodes=nodes, values=tuple(values))
    short_folds = [_in_short(fold, places) for fold in folds]
    return Short(short, placed, positions, tuple(short_folds), rounds)


def _moved(value: Value, moved: Integers) -> Value:
    return changed(value, producer=int(moved[value.producer]), consumers=tuple(int(moved[c]) for c in value.consumers))


def _in_short(fold: Fold, places: Integers) -> Fold:
    return replace(fold, start=int(places[fold.start]), left=tuple(int(places[spot]) for spot in fold.left))
