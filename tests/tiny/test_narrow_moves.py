"""Moves that hold a few hubs and choose the rest anew, against every choice of small graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoshard.ir.problem import Floats, Integers, Node, Problem, Value, memory, objective
from autoshard.solvers.common.solver_options import Clock
from benchmarks.contest import anytime, narrow_moves, narrow_search
from benchmarks.contest.core_problem import Inner, Items, NodeCosts, core, either
from benchmarks.contest.messages import Ascent, Round
from benchmarks.contest.narrow_moves import Move, NarrowMoves, NarrowOrder, narrow_order
from benchmarks.contest.narrow_search import NarrowSearch
from benchmarks.contest.presolve import PairGraph

pytestmark = pytest.mark.slow  # benchmarks/contest is not part of autoshard


def graph_of(seed: int, *, nodes: int = 6, density: float = 0.5, forbidden: float = 0.1, fewest: int = 1) -> PairGraph:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(fewest, 4, nodes).tolist()
    edges = {}
    for a, b in itertools.combinations(range(nodes), 2):
        if rng.random() < density:
            cost = rng.integers(0, 50, (sizes[a], sizes[b])).astype(float)
            edges[a, b] = np.where(rng.random(cost.shape) < forbidden, np.inf, cost)
    return PairGraph(tuple(rng.integers(0, 50, size).astype(float) for size in sizes), edges)


def cost_of(graph: PairGraph, choice: Integers | tuple[int, ...]) -> float:
    node_cost = sum(float(costs[s]) for costs, s in zip(graph.unary, choice, strict=True))
    return node_cost + sum(float(cost[choice[a], choice[b]]) for (a, b), cost in graph.edges.items())


def after(choice: Integers, moves: list[Move]) -> Integers:
    new = choice.copy()
    for move in moves:
        new[move.nodes] = move.choices
    return new


def costs_of(graph: PairGraph) -> NodeCosts:
    return NodeCosts(np.concatenate(graph.unary), np.cumsum([len(costs) for costs in graph.unary]))


def least(graph: PairGraph, allowed: list[Integers] | None = None) -> float:
    some = allowed or [np.arange(len(costs)) for costs in graph.unary]
    return min(cost_of(graph, choice) for choice in itertools.product(*(s.tolist() for s in some)))


@pytest.mark.parametrize("seed", range(40))
def test_where_all_tables_fit_one_move_finds_the_optimum(seed: int) -> None:
    """Six nodes of three choices have tables of 729 entries at most: none is held, whatever the order."""
    graph, rng = graph_of(seed), np.random.default_rng(seed)
    start = np.array([rng.integers(len(costs)) for costs in graph.unary])
    moves = NarrowMoves(graph).changes(costs_of(graph), start, rng)
    new = after(start, moves)
    assert cost_of(graph, new) == pytest.approx(min(least(graph), cost_of(graph, start)))
    if np.isfinite(cost_of(graph, start)):
        assert cost_of(graph, new) == pytest.approx(cost_of(graph, start) + sum(move.gain for move in moves))


@pytest.mark.parametrize("seed", range(40))
def test_held_nodes_stay_and_the_others_are_best_around_them(seed: int) -> None:
    graph, rng = graph_of(seed, density=1.0, forbidden=0.0, fewest=2), np.random.default_rng(seed)
    narrow, sizes = NarrowMoves(graph), [len(costs) for costs in graph.unary]
    narrow.orders = [narrow_order(narrow.costs, sizes, 9.0, 1.0, rng)] * 8  # tables of two nodes
    held = narrow.orders[0].held
    assert held, "else this test says nothing"
    narrow._order = lambda rng: narrow.orders[0]  # type: ignore[method-assign]
    start = np.array([rng.integers(size) for size in sizes])
    new = after(start, narrow.changes(costs_of(graph), start, rng))
    allowed = [start[n : n + 1] if n in held else np.arange(size) for n, size in enumerate(sizes)]
    assert cost_of(graph, new) == pytest.approx(least(graph, allowed))


@pytest.mark.parametrize("seed", range(40))
def test_mixed_is_the_best_of_the_choices_kept(seed: int) -> None:
    graph, rng = graph_of(seed, forbidden=0.0), np.random.default_rng(seed)
    start, other = (np.array([rng.integers(len(costs)) for costs in graph.unary]) for _ in range(2))
    joined: set[int] = {n for pair in graph.edges for n in pair}
    among = np.array([other[n] if n in joined else start[n] for n in range(len(start))])
    allowed = [np.unique(pair) for pair in np.stack([start, among], axis=1)]
    new = after(start, NarrowMoves(graph).mixed(costs_of(graph), start, either(start, among), rng))
    assert cost_of(graph, new) == pytest.approx(least(graph, allowed))


@pytest.mark.parametrize("seed", range(40))
def test_mixed_is_the_best_beside_what_has_to_be_held(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, rng = graph_of(seed, density=1.0, forbidden=0.0, fewest=2), np.random.default_rng(seed)
    start, other = (np.array([rng.integers(len(costs)) for costs in graph.unary]) for _ in range(2))
    ways = list[NarrowOrder]()

    def noted(*args: Any) -> NarrowOrder:
        ways.append(narrow_order(*args[:2], 4.0, *args[3:]))  # tables of two nodes of two choices
        return ways[-1]

    monkeypatch.setattr(narrow_moves, "narrow_order", noted)
    new = after(start, NarrowMoves(graph).mixed(costs_of(graph), start, either(start, other), rng))
    held = ways[0].held
    allowed = [np.unique([a] if n in held else [a, b]) for n, (a, b) in enumerate(zip(start, other, strict=True))]
    assert cost_of(graph, new) == pytest.approx(least(graph, allowed))
    assert held or (start == other).sum() >= 4


@pytest.mark.parametrize("seed", range(40))
def test_every_move_is_worth_what_it_says_whatever_others_are_made(seed: int) -> None:
    graph, rng = graph_of(seed, nodes=8, density=0.25, forbidden=0.0), np.random.default_rng(seed)
    start = np.array([rng.integers(len(costs)) for costs in graph.unary])
    for moves in (
        NarrowMoves(graph).changes(costs_of(graph), start, rng),
        NarrowMoves(graph).mixed(costs_of(graph), start, either(start, np.zeros_like(start)), rng),
    ):
        for count in range(len(moves) + 1):
            for some in itertools.combinations(moves, count):
                expected = cost_of(graph, start) + sum(move.gain for move in some)
                assert cost_of(graph, after(start, list(some))) == pytest.approx(expected)
        assert [move.gain for move in moves] == sorted(move.gain for move in moves)


def test_nodes_that_change_apart_are_moves_of_their_own() -> None:
    """Ends of a chain whose middle stays: one elimination, two moves."""
    same, loose = np.array([[0.0, 9.0], [9.0, 0.0]]), np.zeros((2, 2))
    worse = np.array([5.0, 0.0])
    graph = PairGraph((worse, worse, np.zeros(2), worse), {(0, 1): same, (1, 2): loose, (2, 3): loose})
    moves = NarrowMoves(graph).changes(costs_of(graph), np.zeros(4, np.int64), np.random.default_rng(0))
    assert [(move.gain, sorted(move.nodes)) for move in moves] == [(-10.0, [0, 1]), (-5.0, [3])]


def whole(graph: PairGraph, sizes: list[Floats], capacity: float) -> Inner:
    """A graph whose nodes are all alive at one time."""
    items = [(n, 0, 1, size) for n, size in enumerate(sizes)]
    return Inner(graph, Items(items, np.zeros(1), capacity, costs_of(graph).ends))


@pytest.mark.parametrize("seed", range(8))
def test_a_hub_that_messages_doubt_changes_with_all_that_read_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers in a ring that agree with the hub: it is the first to be held, and then nothing changes."""
    monkeypatch.setattr(narrow_moves, "_ENTRIES", (8.0,))  # tables of three nodes: the hub is held, or a reader or two
    monkeypatch.setattr(narrow_moves, "_NOISE", (0.0,))
    agree = np.array([[0.0, 1.0], [1.0, 0.0]])
    edges = {(0, n): 4 * agree for n in range(1, 13)} | {(min(n, m), max(n, m)): agree for n, m in ring_of(12)}
    graph = PairGraph((np.array([10.0, 0.0]), *[np.array([0.1, 0.0])] * 12), edges)
    core_, start = whole(graph, [np.zeros(2)] * 13, 1.0), np.zeros(13, np.int64)
    ascent = Ascent(core_)
    for _ in range(30):
        ascent.step(move=False)
    reached = []
    for doubted in (0, 1):
        monkeypatch.setattr(narrow_search, "_DOUBTED", (doubted,))
        search = NarrowSearch(core_, NarrowMoves(graph), start, np.zeros(1), np.random.default_rng(seed))
        for _ in range(3):
            search.better(ascent)
        reached.append(search.choice.sum())
    assert reached == [0, 13]


def ring_of(count: int) -> list[tuple[int, int]]:
    return [(n, n % count + 1) for n in range(1, count + 1)]


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_made_to_fit_by_as_few_changes_as_do(seed: int) -> None:
    """Ten nodes alike but for what their smaller choice costs: three have to change, and the cheapest do."""
    rng = np.random.default_rng(seed)
    dear = rng.permutation(10) / 100.0
    graph = PairGraph(tuple(np.array([1.0, 1.0 + more]) for more in dear), {(0, 1): np.zeros((2, 2))})
    core_ = whole(graph, [np.array([2.0, 1.0])] * 10, 17.0)
    search = NarrowSearch(core_, NarrowMoves(graph), np.zeros(10, np.int64), np.zeros(1), rng)
    while not search.fits:
        search.fit()
    assert np.flatnonzero(search.choice).tolist() == sorted(np.argsort(dear)[:3].tolist())


def test_order_leaves_tables_within_the_limit_and_holds_freed_nodes_last() -> None:
    """A hub with twenty readers that stand in a ring: the ring is narrow once a node or two are held."""
    ring = {n: {0, 1 + n % 20, 1 + (n - 2) % 20} for n in range(1, 21)}
    around: dict[int, set[int]] = {0: set(range(1, 21)), **ring}
    sizes, rng = [5] * 21, np.random.default_rng(0)
    usual = narrow_order(around, sizes, 125.0, 0.0, rng)
    assert usual.held == {0}
    freed = narrow_order(around, sizes, 125.0, 0.0, rng, kept=[0])
    assert 0 not in freed.held and freed.held
    for node_order in (usual, freed):
        place = {n: i for i, (n, _) in enumerate(node_order.order)}
        assert sorted([*place, *node_order.held]) == list(range(21))
        for n, others in node_order.order:
            assert 5.0 ** (1 + len(others)) <= 125.0
            assert all(place[o] > place[n] for o in others)


def limited(seed: int) -> tuple[Problem, list[tuple[int, ...]]]:
    """Seven nodes of which a twentieth of all plans fits; all plans."""
    rng = np.random.default_rng(seed)
    graph = graph_of(seed, nodes=7, forbidden=0.0, fewest=2)
    nodes = tuple(
        Node(f"n{n}", costs, rng.integers(0, 9, len(costs)).astype(float), (n, n + 3))
        for n, costs in enumerate(graph.unary)
    )
    each = [np.arange(len(costs)) for costs in graph.unary]
    values = tuple(
        Value(f"{a}-{b}", a, (b,), each[a], (each[b],), cost, np.zeros(len(each[b])), ((0, 0),))
        for (a, b), cost in graph.edges.items()
    )
    free = Problem(nodes, values, horizon=10)
    plans = list(itertools.product(*(some.tolist() for some in each)))
    peaks = sorted(memory(free, plan).max() for plan in plans)
    return replace(free, capacity_bytes=float(peaks[len(peaks) // 20])), plans


@pytest.mark.parametrize("comes", [True, False])
def test_the_rounding_that_fits_best_is_polished_until_a_plan_comes_of_it(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each round of 100, of which the last 15 are for a plan; half as many again where none comes."""
    monkeypatch.setattr(anytime, "_FIRST", 1000)  # none is polished for being near the bound
    monkeypatch.setattr(anytime, "_LAST", 86)
    problem, _ = limited(5)
    now = [0.0]
    run = anytime._PairwiseSearch(core(problem), Clock(1000.0, timer=lambda: now[0]), 0)
    step, rounds, polished = run.ascent.step, list[Round](), list[tuple[float, Integers]]()

    def counted() -> Round:
        now[0] += 1.0
        rounds.append(step())
        return rounds[-1]

    def noted(choice: Integers, multipliers: Floats, clock: Clock) -> None:
        polished.append((now[0], choice))
        if comes:
            run.best, run.value = choice, run.bound * 1.5 + 1e-9

    run.ascent.step, run.polish = counted, noted  # type: ignore[method-assign]
    run.value = np.inf
    anytime._PairwiseSearch.climb(run, 400, 100.0)
    assert polished[0][0] == 86.0 and now[0] == (86.0 if comes else 150.0)
    first = min(run.promise(rounding.choice) for rounding in rounds[:86])
    assert run.promise(polished[0][1]) == first
    fits = [run.core.fits(rounding.choice) for rounding in rounds[:86]]
    assert any(fits) and not all(fits) and run.core.fits(polished[0][1])


@pytest.mark.parametrize(("nodes", "moves"), [(10, 60), (20_000 // 30, 30), (20_000, 3)])
def test_small_cores_have_more_moves_in_a_row(nodes: int, moves: int) -> None:
    """A move over few nodes takes next to nothing beside the steps around it."""
    problem, _ = limited(5)
    run = anytime._PairwiseSearch(core(problem), Clock(), 0)
    run.best, calls = np.zeros(nodes, np.int64), list[bool]()
    run.narrow.fit = lambda *_: calls.append(True)  # type: ignore[method-assign]
    run.narrow.mix = run.narrow.fit  # type: ignore[assignment, method-assign]
    run.offer = lambda _: None  # type: ignore[method-assign]
    run.narrowly()
    assert len(calls) == moves


@pytest.mark.parametrize("seed", range(12))
def test_a_wide_problem_under_a_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of wide problems, on one that can be counted: what fits is found, the bound is one."""
    for name, value in {"_PROGRAM": -1, "_THIN_ENTRIES": -1, "_ROUNDS": 30}.items():
        monkeypatch.setattr(anytime, name, value)
    followed: list[bool] = []
    follow = anytime.NarrowSearch.follow
    monkeypatch.setattr(anytime.NarrowSearch, "follow", lambda self, by: (followed.append(True), follow(self, by)))
    problem, plans = limited(seed)
    solution = anytime.search(problem, Clock(), seed=seed)
    best = min(objective(problem, plan) for plan in plans if memory(problem, plan).max() <= problem.capacity_bytes)
    assert memory(problem, solution.choice).max() <= problem.capacity_bytes
    assert solution.lower_bound <= best + 1e-9 <= solution.objective + 2e-9
    assert solution.objective <= 1.05 * best
    assert followed or solution.lower_bound == solution.objective
