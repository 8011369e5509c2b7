"""Solves a problem with repeated blocks: each different block is eliminated once.

The block becomes a table over the nodes at its two ends; the table is joined with itself by repeated doubling, and what
is left is a small problem with one more term for each run of blocks. On the way back every block reads off its
strategies from those at its ends, which blocks between equal ends share. Exact, or nothing is returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common.effort import BUDGET_ENTRIES, ROUNDS, SOON_ENTRIES, WIDE
from autoshard.solvers.elimination import elimination_order, min_plus
from autoshard.solvers.elimination.compress_blocks import Fold, Short, shortened
from autoshard.solvers.elimination.cost_tables import Contents, CostTerm, Store
from autoshard.solvers.elimination.dominance import reduce_nearby
from autoshard.solvers.elimination.encoding_choice import KEYS, encodings, fitting
from autoshard.solvers.elimination.factor_encoding import Encoded
from autoshard.solvers.elimination.weighted_sum import Additive, unary


@dataclass(frozen=True, eq=False)
class Folded:
    """The minimum `value`, a `choice` of the whole problem that attains it, and the joint entries minimised."""

    value: float
    choice: tuple[int, ...]
    work: int


@dataclass(frozen=True, eq=False)
class _Start:
    """An encoding of the short problem, and a plan for the block of each fold."""

    store: Store
    encoded: Encoded
    key: elimination_order.Key
    plans: tuple[elimination_order.Elimination, ...]

    @property
    def work(self) -> int:
        return sum(plan.work for plan in self.plans)


@dataclass(frozen=True, eq=False)
class _Begun:
    """A short problem with the strategies kept of its nodes, and how it is eliminated."""

    sum_: Additive
    short: Short
    choices: list[Integers]
    start: _Start


def solve_folded(sum_: Additive, contents: Contents, budget: int) -> Folded | None:
    """The minimum of a problem with blocks that repeat; None where they don't, or it is not exact within the budget.

    Strategies are left out beforehand where that is worth the margins it needs at the ends of a run, whose nodes take
    longer than the tables of small domains. Raises InfeasibleError where no combination is allowed.
    """
    begun: list[_Begun] = []
    for rounds in _rounds(sum_, contents):
        short = shortened(sum_, contents, rounds)
        candidate = _begun(sum_, short, contents, budget) if short else None
        if candidate is not None:
            begun.append(candidate)
            if candidate.start.work <= SOON_ENTRIES:
                break
        contents.wide |= short is not None and not rounds
    for candidate in sorted(begun, key=lambda candidate: candidate.start.work):
        folded = _finished(candidate, budget)
        if folded is not None:
            return folded
    return None


def _rounds(sum_: Additive, contents: Contents) -> tuple[int, ...]:
    """Rounds of the reduction beforehand, in the order in which they are tried: prices change little of what tables
    take."""
    if _largest(sum_) > WIDE:
        return (ROUNDS,)
    return (ROUNDS, 0) if contents.wide else (0, ROUNDS)


def _largest(sum_: Additive) -> int:
    return max((len(node.seconds) for node in sum_.problem.nodes), default=0)


def _begun(sum_: Additive, short: Short, contents: Contents, budget: int) -> _Begun | None:
    contents.also(short.problem)
    here = replace(sum_, problem=short.problem)
    choices = reduce_nearby(here, contents, short.rounds)
    start = _start(here, short, choices, contents, budget)
    return None if start is None else _Begun(here, short, choices, start)


def _finished(begun: _Begun, budget: int) -> Folded | None:
    here, short, choices, start = begun.sum_, begun.short, begun.choices, begun.start
    chains = [
        _Chain(here, fold, start.store, plan, choices) for fold, plan in zip(short.folds, start.plans, strict=True)
    ]
    remainder = _outside_folds(short, start, chains, budget)
    if remainder is None:
        return None
    value, picked, work = remainder
    whole = np.zeros(len(short.line.nodes), np.int64)
    for node in _outside(short):
        whole[_position(short, node)] = choices[node][picked[node]]
    for chain in chains:
        fold = chain.fold
        rows = np.concatenate(chain.rows(picked))
        last = [node - fold.start - fold.period for node in fold.right]  # the last block's end is chosen by the rest
        rows[last] = whole[[_position(short, node) for node in fold.right]]
        whole[fold.position : fold.position + len(rows)] = rows
    choice = np.empty(len(whole), np.int64)
    choice[short.line.nodes] = whole
    value += sum(chain.constant for chain in chains)
    return Folded(value, tuple(choice.tolist()), work + sum(chain.work for chain in chains))


def foreseen(sum_: Additive, short: Short, contents: Contents, budget: int) -> bool:
    """True if the blocks' tables fit the budget with all strategies kept."""
    contents.also(short.problem)
    every = [np.arange(len(node.seconds)) for node in short.problem.nodes]
    return _start(replace(sum_, problem=short.problem), short, every, contents, budget) is not None


def _start(sum_: Additive, short: Short, choices: Sequence[Integers], contents: Contents, budget: int) -> _Start | None:
    """The least work of the encodings and orders that fit the budget."""
    starts: list[_Start] = []
    for store, encoded in encodings(sum_, choices, contents, budget, exact=True):
        for key in KEYS:
            fork = store.fork()
            plans = [_block_plan(fork, encoded, short, fold, key, budget) for fold in short.folds]
            exact = tuple(plan for plan in plans if plan)
            if len(exact) == len(plans):
                starts.append(_Start(fork, encoded, key, exact))
                if starts[-1].work <= SOON_ENTRIES:
                    return starts[-1]
        if starts and starts[-1].work <= BUDGET_ENTRIES:
            break
    return min(starts, key=lambda start: start.work, default=None)


def _block_plan(
    store: Store, encoded: Encoded, short: Short, fold: Fold, key: elimination_order.Key, budget: int
) -> elimination_order.Elimination | None:
    terms = [term for term, owner in zip(encoded.terms, _owners(encoded, short), strict=True) if owner is fold]
    ends = {*fold.left, *fold.right}
    inner = sorted({v for term in terms for v in term.variables} - ends)
    plan = fitting(store, encoded, terms, key, budget, inner)
    states = math.prod(encoded.domains[node] for node in fold.right)
    return plan if states * states <= budget // len(short.folds) else None


def _owners(encoded: Encoded, short: Short) -> list[Fold | None]:
    """The fold that each term is in the block of: by its last node, but ends pay for themselves elsewhere."""
    by_node: dict[int, Fold] = {node: fold for fold in short.folds for node in fold.block}
    ends = {node for fold in short.folds for node in fold.right}
    owners = []
    for term, v in zip(encoded.terms, encoded.origins, strict=True):
        if v < 0:
            (node,) = term.scope
            owners.append(None if node in ends else by_node.get(node))
        else:
            value = short.problem.values[v]
            owners.append(by_node.get(max(value.producer, *value.consumers)))
    return owners


def _outside(short: Short) -> list[int]:
    """The nodes that are not within a block: those at its right end are decided with the rest."""
    gone = {node for fold in short.folds for node in fold.block} - {n for fold in short.folds for n in fold.right}
    return [node for node in range(len(short.problem.nodes)) if node not in gone]


def _position(short: Short, node: int) -> int:
    """Place in the whole line of a node outside: those at the right end of a fold belong to its last block."""
    moved = sum((fold.count - 1) * fold.period for fold in short.folds if node in fold.right)
    return int(short.positions[node]) + moved


def _outside_folds(
    short: Short, start: _Start, chains: Sequence[_Chain], budget: int
) -> tuple[float, list[int], int] | None:
    """(minimum, strategies of the nodes outside the folds as kept indices, work): each fold is one more term."""
    owners = _owners(start.encoded, short)
    terms = [term for term, owner in zip(start.encoded.terms, owners, strict=True) if owner is None]
    terms += [chain.term() for chain in chains]
    variables = sorted({v for term in terms for v in term.variables})
    for key in (start.key, *(key for key in KEYS if key != start.key)):
        store = start.store.fork()
        plan = fitting(store, start.encoded, terms, key, budget, variables)
        if plan is not None:
            value = min_plus.run(store, plan)
            if np.isinf(value):
                raise InfeasibleError("every combination of strategies is forbidden: none of all nodes go together")
            return value, min_plus.backtrack(store, plan), plan.work
    return None


class _Chain:
    """`count` equal blocks. A state is a class of strategies that blocks don't tell apart, of each node at an end.

    `least[state]`: the least that the nodes themselves cost in it. `powers[k]`: the table of 2 ** k blocks.
    """

    def __init__(
        self, sum_: Additive, fold: Fold, store: Store, plan: elimination_order.Elimination, choices: Sequence[Integers]
    ) -> None:
        self.fold, self.store, self.plan, self.choices = fold, store, plan, choices
        assert all(np.array_equal(choices[a], choices[b]) for a, b in zip(fold.left, fold.right, strict=True))
        self.constant = fold.count * min_plus.run(store, plan)
        self.work = plan.work
        self.terms = [term for term in plan.left if store.table(term.table).any()]
        self.maps = [self._class_map(pair) for pair in zip(fold.left, fold.right, strict=True)]
        self.classes = [store.maps[map_] for map_ in self.maps]
        self.counts = [store.counts[map_] for map_ in self.maps]
        table = min_plus.table_of(store, self.terms, [*fold.left, *fold.right], [*self.maps, *self.maps])
        states = math.prod(self.counts)
        self._choose([unary(sum_, node)[choices[node]] for node in fold.right])
        self.powers = [table.reshape(states, states)]
        self.blocks: dict[tuple[int, int], Integers] = {}
        self.known: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._join()

    def _class_map(self, pair: tuple[int, int]) -> int:
        """The coarsest classes that every term over the left or the right node is a table of."""
        strategies = len(self.choices[pair[1]])
        maps = [map_ for term in self.terms for n, map_ in zip(term.scope, term.maps, strict=True) if n in pair]
        return self.store.join([self.store.map_id(np.zeros(strategies, np.int64)), *maps])

    def _choose(self, costs: Sequence[Floats]) -> None:
        """The cheapest strategy of each class at an end, and what it costs, by state."""
        self.cheapest: list[Integers] = []
        self.least: Floats = np.zeros(())
        for node_costs, classes, count in zip(costs, self.classes, self.counts, strict=True):
            order = np.lexsort((np.arange(len(node_costs)), node_costs))[::-1]
            cheapest = np.empty(count, np.int64)
            cheapest[classes[order]] = order  # the last written is the cheapest, of equals the first
            self.cheapest.append(cheapest)
            self.least = self.least[..., None] + node_costs[cheapest]
        self.least = self.least.reshape(-1)

    def _join(self) -> None:
        """Doubles the table, and joins those of the binary digits of `count`, the lowest first."""
        self.digits = [k for k in range(self.fold.count.bit_length()) if self.fold.count >> k & 1]
        while len(self.powers) <= self.digits[-1]:
            self.powers.append(self._product(self.powers[-1], self.powers[-1]))
        self.partial = [self.powers[self.digits[0]]]
        for k in self.digits[1:]:
            self.partial.append(self._product(self.partial[-1], self.powers[k]))

    def _product(self, first: Floats, second: Floats) -> Floats:
        """The least over the state between, which costs `least`."""
        self.work += first.size * second.shape[1]
        every = slice(None)
        middle = (first + self.least).T[:, :, None]
        parts = [
            min_plus.TableView(middle, (every, every, None)),
            min_plus.TableView(second[:, None, :], (every, None, every)),
        ]
        return min_plus.min_plus(parts, (len(self.least), len(first), second.shape[1]))

    def term(self) -> CostTerm:
        """Term of all blocks over the nodes at the two ends, which pay for themselves elsewhere."""
        table = self.store.base(self.partial[-1].reshape([*self.counts, *self.counts]))
        return CostTerm((*self.fold.left, *self.fold.right), (*self.maps, *self.maps), table)

    def rows(self, picked: Sequence[int]) -> list[Integers]:
        """The strategies of the nodes of every block, those at the two ends (kept indices in `picked`) being chosen."""
        first, last = (self.state([picked[node] for node in nodes]) for nodes in (self.fold.left, self.fold.right))
        return [self.row(pair) for pair in pairwise(self.path(first, last))]

    def state(self, strategies: Sequence[int]) -> int:
        at = [int(classes[s]) for classes, s in zip(self.classes, strategies, strict=True)]
        return int(np.ravel_multi_index(at, self.counts)) if at else 0

    def path(self, first: int, last: int) -> tuple[int, ...]:
        """The state before the first block, between any two, and after the last."""
        path: tuple[int, ...] = (last,)
        for place in range(len(self.digits) - 1, 0, -1):
            power = self.powers[self.digits[place]]
            middle = int(np.argmin(self.partial[place - 1][first] + self.least + power[:, path[0]]))
            path = self.doubled(self.digits[place], middle, path[0])[:-1] + path
        return self.doubled(self.digits[0], first, path[0])[:-1] + path

    def doubled(self, k: int, first: int, last: int) -> tuple[int, ...]:
        """The path through 2 ** k blocks."""
        if k == 0:
            return first, last
        if (k, first, last) not in self.known:
            half = self.powers[k - 1]
            middle = int(np.argmin(half[first] + self.least + half[:, last]))
            path = self.doubled(k - 1, first, middle)[:-1] + self.doubled(k - 1, middle, last)
            self.known[k, first, last] = path
        return self.known[k, first, last]

    def row(self, pair: tuple[int, int]) -> Integers:
        """The strategies of the nodes of a block between two states."""
        if pair not in self.blocks:
            fixed: dict[int, int] = {}
            for nodes, state in zip((self.fold.left, self.fold.right), pair, strict=True):
                at = np.unravel_index(state, self.counts) if self.counts else ()
                fixed |= {n: int(best[int(c)]) for n, best, c in zip(nodes, self.cheapest, at, strict=True)}
            picked = min_plus.backtrack(self.store, self.plan, fixed)
            self.blocks[pair] = np.array([self.choices[node][picked[node]] for node in self.fold.block], np.int64)
        return self.blocks[pair]
