"""Solves a problem with repeated blocks: each different block is eliminated once.

The block becomes a table over the nodes at its two ends; the table is joined with itself by repeated doubling, and what
is left is a small problem with one more term for each run of blocks. On the way back every block reads off its
strategies from those at its ends, which blocks between equal ends share. Exact, or nothing is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.problem import Floats, Integers, Problem
from autoshard.solvers import eliminate
from autoshard.solvers.additive import Additive, unary
from autoshard.solvers.choose import Candidate, fitting
from autoshard.solvers.domains import reduce_nearby
from autoshard.solvers.shorten import ROUNDS, Fold, Short
from autoshard.solvers.tables import Contents, Store, Term


@dataclass(frozen=True, eq=False)
class Folded:
    """The minimum `value`, a `choice` of the whole problem that attains it, and the joint entries minimised."""

    value: float
    choice: tuple[int, ...]
    work: int


def solve_short(sum_: Additive, short: Short, contents: Contents, budget: int) -> Folded | None:
    """The minimum of the whole problem `sum_`; None where it is not exact within the budget of entries.

    Raises InfeasibleError where no combination is allowed.
    """
    contents.also(short.problem)
    here = replace(sum_, problem=short.problem)
    kept = reduce_nearby(here, contents, ROUNDS)
    chains = [_chain(here, kept, contents, fold, budget) for fold in short.folds]
    rest = _rest(here, kept, contents, short, [chain for chain in chains if chain], budget)
    if rest is None or None in chains:
        return None
    value, choice, work = rest
    whole = np.zeros(len(short.line.nodes), np.int64)
    for fold, chain in zip(short.folds, chains, strict=True):
        assert chain is not None
        rows = chain.rows([choice[n] for n in fold.left], [choice[n] for n in fold.right])
        whole[fold.position : fold.position + fold.count * fold.period] = np.concatenate(rows)
    for node, strategy in choice.items():
        whole[_position(short, node)] = kept[node][strategy]
    picked = np.empty(len(whole), np.int64)
    picked[short.line.nodes] = whole
    value += sum(chain.constant for chain in chains if chain)
    return Folded(value, tuple(picked.tolist()), work + sum(chain.work for chain in chains if chain))


def _position(short: Short, node: int) -> int:
    """Where a node of the rest stands in the whole line: those at the right end of a fold are of its last block."""
    moved = sum((fold.count - 1) * fold.period for fold in short.folds if node in fold.right)
    return int(short.positions[node]) + moved


def _part(problem: Problem, nodes: Sequence[int], values: Sequence[int], silent: Sequence[int]) -> Problem:
    """Some nodes and values of a problem; the nodes of `silent` cost nothing by themselves."""
    index = {node: place for place, node in enumerate(nodes)}
    own = [problem.nodes[node] for node in nodes]
    for node in silent:
        zeros = np.zeros(len(problem.nodes[node].seconds))
        own[index[node]] = replace(problem.nodes[node], seconds=zeros, bytes=zeros)
    moved = [
        replace(value, producer=index[value.producer], consumers=tuple(index[c] for c in value.consumers))
        for value in (problem.values[v] for v in values)
    ]
    return replace(problem, nodes=tuple(own), values=tuple(moved))


def _last(problem: Problem, v: int) -> int:
    value = problem.values[v]
    return max(value.producer, *value.consumers)


def _rest(
    sum_: Additive, kept: Sequence[Integers], contents: Contents, short: Short, chains: Sequence[_Chain], budget: int
) -> tuple[float, dict[int, int], int] | None:
    """(minimum, strategy of each node of the short problem outside the folds, work)."""
    problem, folds = short.problem, short.folds
    gone = {node for fold in folds for node in fold.block} - {node for fold in folds for node in fold.right}
    nodes = [node for node in range(len(problem.nodes)) if node not in gone]
    inside = {node for fold in folds for node in fold.block}
    values = [v for v in range(len(problem.values)) if _last(problem, v) not in inside]
    index = {node: place for place, node in enumerate(nodes)}
    part = _part(problem, nodes, values, ())
    contents.also(part)

    def more(store: Store) -> list[Term]:
        return [chain.term(store, index) for chain in chains]

    found = fitting(replace(sum_, problem=part), [kept[node] for node in nodes], contents, budget, more=more)
    if found is None or found[1].relaxed or not found[2].exact:
        return None
    store, _, plan = found
    value = eliminate.run(store, plan)
    if np.isinf(value):
        raise InfeasibleError("every combination of strategies is forbidden: no strategies of all nodes go together")
    picked = eliminate.backtrack(store, plan)
    return value, {node: picked[place] for node, place in index.items()}, plan.work


def _chain(sum_: Additive, kept: Sequence[Integers], contents: Contents, fold: Fold, budget: int) -> _Chain | None:
    """The blocks of a fold as a chain of equal tables."""
    problem = sum_.problem
    nodes = [*fold.left, *fold.block]
    values = [v for v in range(len(problem.values)) if _last(problem, v) in fold.block]
    part = _part(problem, nodes, values, (*fold.left, *fold.right))
    contents.also(part)
    index = {node: place for place, node in enumerate(nodes)}
    left, right = [index[node] for node in fold.left], [index[node] for node in fold.right]
    block = replace(sum_, problem=part)
    own = [kept[node] for node in nodes]
    assert all(np.array_equal(own[before], own[after]) for before, after in zip(left, right, strict=True))
    found = fitting(block, own, contents, budget, stay={*left, *right})
    if found is None or found[1].relaxed or not found[2].exact:
        return None
    costs = [unary(sum_, node)[kept[node]] for node in fold.right]
    return _Chain(fold, found, own, left, right, costs, budget)


class _Chain:
    """`count` equal blocks. A state is a class of strategies that blocks don't tell apart, of each node at an end.

    `least[state]`: the least that the nodes themselves cost in it. `powers[k]`: the table of 2 ** k blocks.
    """

    def __init__(
        self,
        fold: Fold,
        found: Candidate,
        kept: Sequence[Integers],
        left: Sequence[int],
        right: Sequence[int],
        costs: Sequence[Floats],
        budget: int,
    ) -> None:
        self.fold, self.kept, self.left, self.right = fold, kept, left, right
        self.store, _, self.plan = found
        self.constant = fold.count * eliminate.run(self.store, self.plan)
        self.work = self.plan.work
        self.terms = [term for term in self.plan.left if self.store.table(term.table).any()]
        joined = [self._class_map(pair) for pair in zip(left, right, strict=True)]
        self.classes = [self.store.maps[map_] for map_ in joined]
        self.counts = [self.store.counts[map_] for map_ in joined]
        table = eliminate.table_of(self.store, self.terms, [*left, *right], [*joined, *joined])
        states = int(np.prod(self.counts))
        self._choose(costs)
        self.powers = [table.reshape(states, states)]
        self.plan_of: dict[tuple[int, int], Integers] = {}
        self.known: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._join()

    def _class_map(self, pair: tuple[int, int]) -> int:
        """The coarsest classes that every term over the left or the right node is a table of."""
        strategies = len(self.kept[pair[1]])
        maps = [map_ for term in self.terms for n, map_ in zip(term.scope, term.maps, strict=True) if n in pair]
        return self.store.join([self.store.map_id(np.zeros(strategies, np.int64)), *maps])

    def _choose(self, costs: Sequence[Floats]) -> None:
        """The cheapest strategy of each class at an end, and what it costs, by state."""
        self.cheapest: list[Integers] = []
        self.least: Floats = np.zeros(())
        for own, classes, count in zip(costs, self.classes, self.counts, strict=True):
            order = np.lexsort((np.arange(len(own)), own))[::-1]
            cheapest = np.empty(count, np.int64)
            cheapest[classes[order]] = order  # the last written is the cheapest, of equals the first
            self.cheapest.append(cheapest)
            self.least = self.least[..., None] + own[cheapest]
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
        parts = [eliminate.Part(middle, (every, every, None)), eliminate.Part(second[:, None, :], (every, None, every))]
        return eliminate.min_plus(parts, (len(self.least), len(first), second.shape[1]))

    def term(self, store: Store, index: dict[int, int]) -> Term:
        """All blocks as one term over the nodes at the two ends, which pay for themselves elsewhere."""
        scope = tuple(index[node] for node in (*self.fold.left, *self.fold.right))
        maps = tuple(store.map_id(classes) for classes in (*self.classes, *self.classes))
        return Term(scope, maps, store.base(self.partial[-1].reshape([*self.counts, *self.counts])))

    def rows(self, left: Sequence[int], right: Sequence[int]) -> list[Integers]:
        """The strategies of the nodes of every block, between the chosen ones (kept indices) at the two ends."""
        states = self.path(self.state(left), self.state(right))
        return [self.row(pair) for pair in pairwise(states)]

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
        if pair not in self.plan_of:
            ends = [np.unravel_index(state, self.counts) if self.counts else () for state in pair]
            given: dict[int, int] = {}
            for nodes, at in zip((self.left, self.right), ends, strict=True):
                given |= {n: int(self.cheapest[i][int(c)]) for i, (n, c) in enumerate(zip(nodes, at, strict=True))}
            picked = eliminate.backtrack(self.store, self.plan, given)
            block = range(len(self.left), len(self.kept))
            self.plan_of[pair] = np.array([self.kept[n][picked[n]] for n in block], np.int64)
        return self.plan_of[pair]
