"""Repeated blocks: what is folded is what is there, and the folded minimum is the unfolded one and the true one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Node, Problem, Value, memory, objective
from autoshard.solvers import portfolio, solve
from autoshard.solvers.common.result import OPTIMAL
from autoshard.solvers.elimination import min_plus
from autoshard.solvers.elimination.block_doubling import _begun, _finished
from autoshard.solvers.elimination.compress_blocks import shortened
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.dominance import _Comparisons, finite, reduce
from autoshard.solvers.elimination.encoding_choice import best, encodings, fitting
from autoshard.solvers.elimination.factor_encoding import _Encoder
from autoshard.solvers.elimination.minimise import minimise
from autoshard.solvers.elimination.repeated_blocks import runs
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax.reader_shares import ReaderShares

SEEDS = st.integers(0, 10**9)
BUDGET = 10**8


def repeated(seed: int, blocks: int, forbid: float = 0.0, charged: bool = False) -> Problem:
    """`blocks` equal random blocks in a row between a random head and a random tail; some values reach the next block,
    one may pass over all of them, and the blocks share their arrays or have equal copies of them."""
    rng = np.random.default_rng(seed)
    width, copies = int(rng.integers(1, 5)), rng.random() < 0.3
    head, tail = int(rng.integers(0, 4)), int(rng.integers(0, 4))
    count = head + blocks * width + tail
    sizes = [int(rng.integers(1, 4)) for _ in range(width)]
    block = [_costs(rng, (size,), forbid / 2) for size in sizes]
    other = [_costs(rng, (int(rng.integers(1, 4)),), forbid / 2) for _ in range(head + tail)]
    seconds = [*other[:head], *(block * blocks), *other[head:]]
    horizon = 2 * count
    own_bytes = rng.random() < 0.5
    spans = [(n, horizon - n) if charged else (0, 0) for n in range(count)]
    nodes = tuple(
        Node(f"n{n}", costs.copy() if copies else costs, np.arange(len(costs)) % 3.0, spans[n] if own_bytes else (0, 0))
        for n, costs in enumerate(seconds)
    )
    values: list[Value] = []

    def value(producer: int, consumers: tuple[int, ...], like: Value | None = None) -> Value:
        if like is not None:
            return replace(like, producer=producer, consumers=consumers, intervals=tuple(spans[c] for c in consumers))
        sources, targets = (int(x) for x in rng.integers(1, 4, 2))
        return Value(
            f"v{producer}",
            producer,
            consumers,
            rng.integers(0, sources, len(seconds[producer])),
            tuple(rng.integers(0, targets, len(seconds[c])) for c in consumers),
            _costs(rng, (sources, targets), forbid),
            rng.integers(0, 3, targets).astype(float),
            tuple(spans[c] for c in consumers),
        )

    for within in range(width):  # offsets to consumers in the own and the next block
        reach = np.arange(within + 1, within + width + 1)
        offsets = np.sort(rng.permutation(reach)[: int(rng.integers(1, 4))]) - within
        first = None
        for b in range(blocks):
            producer = head + b * width + within
            consumers = tuple(int(producer + o) for o in offsets if producer + o < head + blocks * width)
            if len(consumers) == len(offsets):
                first = value(producer, consumers, first)
                values.append(first)
    for _ in range(int(rng.integers(0, 4))):  # ends, and what passes over all blocks
        producer = int(rng.integers(0, max(1, head)))
        pool = [n for n in (*range(head + 1), *range(count - tail - 1, count)) if n > producer]
        if pool:
            values.append(value(producer, (int(rng.choice(pool)),)))
    if tail and head + blocks * width:
        values.append(value(count - tail - 1, (count - 1,)))
    return Problem(nodes, tuple(values), horizon=horizon)


def _costs(rng: np.random.Generator, shape: tuple[int, ...], forbid: float) -> np.ndarray:
    costs = rng.integers(0, 8, shape).astype(float)
    return np.where(rng.random(shape) < forbid, np.inf, costs)


def plainly(problem: Problem, multipliers: np.ndarray | None = None) -> float:
    """The minimum without any folding; inf where nothing is allowed."""
    contents, sum_ = Contents(problem), additive(problem, multipliers)
    try:
        store, _, plan = best(sum_, reduce(sum_, contents), contents, BUDGET)
    except InfeasibleError:
        return math.inf
    assert plan.exact
    return min_plus.run(store, plan)


@given(SEEDS, st.integers(12, 40), st.sampled_from([0.0, 0.1]), st.sampled_from([0, 2]))
@settings(max_examples=140)
def test_folded_is_unfolded(seed: int, blocks: int, forbid: float, rounds: int) -> None:
    problem = repeated(seed, blocks, forbid)
    contents, sum_ = Contents(problem), additive(problem)
    short = shortened(sum_, contents, rounds)
    expected = plainly(problem)
    if short is None:
        return
    assert len(short.problem.nodes) < len(problem.nodes)
    try:
        begun = _begun(sum_, short, contents, BUDGET)
        assert begun is not None
        minimum = _finished(begun, BUDGET)
    except InfeasibleError:
        assert math.isinf(expected)
        return
    assert minimum is not None
    assert math.isclose(minimum.value, expected, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(objective(problem, minimum.choice), expected, rel_tol=1e-9, abs_tol=1e-9)


def test_blocks_are_eliminated_and_that_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exact elimination is cheap, `auto` does that and nothing else: no round of shares."""

    def never(*_: object) -> bool:
        raise AssertionError("shares of readers where elimination is exact")

    monkeypatch.setattr(ReaderShares, "search", never)
    solved = 0
    for seed in range(40):
        problem = repeated(seed, 30)
        shared = {len(value.consumers) for value in problem.values} - {1}
        if shared and shortened(additive(problem), Contents(problem)) is not None:
            solution = solve(problem, "auto")
            assert solution.status == OPTIMAL and math.isclose(solution.objective, plainly(problem), abs_tol=1e-9)
            solved += 1
    assert solved >= 5


@pytest.mark.slow
@given(SEEDS, st.integers(12, 40), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=2), st.sampled_from([0, 2]))
@settings(max_examples=80)
def test_folded_is_unfolded_under_prices_of_memory(seed: int, blocks: int, at: list[float], rounds: int) -> None:
    """Prices at one or two times: the runs break where a price begins to count, and fold between."""
    problem = repeated(seed, blocks, charged=True)
    prices = np.zeros(problem.horizon)
    prices[[int(t * (problem.horizon - 1)) for t in at]] = 0.5
    contents, sum_ = Contents(problem), additive(problem, prices)
    short = shortened(sum_, contents, rounds)
    if short is None:
        return
    begun = _begun(sum_, short, contents, BUDGET)
    assert begun is not None
    minimum = _finished(begun, BUDGET)
    assert minimum is not None
    assert math.isclose(minimum.value, plainly(problem, prices), rel_tol=1e-9, abs_tol=1e-9)
    true = objective(problem, minimum.choice) + float(prices @ memory(problem, minimum.choice))
    assert math.isclose(minimum.value, true, rel_tol=1e-9, abs_tol=1e-9)


def test_runs_are_found_whatever_the_arrays_are_called() -> None:
    """12 blocks of 3 nodes between a head and a tail: equal copies count as equal."""
    shared, copied = (chain_of(12, copies) for copies in (False, True))
    for problem in (shared, copied):
        (run,) = runs(additive(problem), Contents(problem))[1]
        assert (run.period, run.reach) == (3, 1) and run.stop - run.start >= 3 * 12 - 2


def chain_of(blocks: int, copies: bool) -> Problem:
    costs = [np.array([float(i), 1.0, 2.0]) for i in range(3)]
    every = [np.array([7.0, 0.0, 0.0]), *(costs[i % 3].copy() if copies else costs[i % 3] for i in range(3 * blocks))]
    ids, move = np.arange(3), np.ones((3, 3)) - np.eye(3)
    nodes = tuple(Node(f"n{i}", each, np.zeros(3)) for i, each in enumerate(every))
    values = tuple(
        Value(f"v{i}", i, (i + 1,), ids, (ids,), move, np.zeros(3), ((0, 0),)) for i in range(len(nodes) - 1)
    )
    return Problem(nodes, values)


@given(SEEDS, st.sampled_from([0.0, 0.1]), st.floats(0.0, 1.0), st.sampled_from([0.0, 1.0]))
@settings(max_examples=80)
def test_few_free_nodes_are_solved_by_themselves(seed: int, forbid: float, price: float, scale: float) -> None:
    """Two free nodes, the rest fixed: the least of all choices, under prices of memory too."""
    rng = np.random.default_rng(seed)
    problem = repeated(seed, 4, forbid, charged=True)
    counts = [len(node.seconds) for node in problem.nodes]
    fixed = [int(rng.integers(count)) for count in counts]
    free = [int(n) for n in rng.permutation(len(counts))[:2]]
    allowed = [np.arange(count) if n in free else np.array([fixed[n]]) for n, count in enumerate(counts)]
    prices = np.where(rng.random(problem.horizon) < 0.2, price, 0.0)

    def cost(choice: list[int]) -> float:
        return scale * objective(problem, choice) + float(prices @ memory(problem, choice))

    every = [[int(s) for s in choice] for choice in itertools.product(*allowed)]
    expected = min((cost(choice) for choice in every if math.isfinite(objective(problem, choice))), default=math.inf)
    try:
        minimum = minimise(problem, Contents(problem), multipliers=prices, scale=scale, allowed=allowed)
    except InfeasibleError:
        assert math.isinf(expected)
        return
    assert math.isclose(minimum.bound, expected, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(cost(list(minimum.choice)), expected, rel_tol=1e-9, abs_tol=1e-9)


@given(SEEDS)
@settings(max_examples=20)
def test_shares_of_a_hub_bound_the_optimum(seed: int) -> None:
    """One value that nine nodes in a chain read: exact where it says so, else a bound, and the same choice is valid."""
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(f"n{n}", _costs(rng, (2,), 0.0), np.zeros(2)) for n in range(10))
    hub_seconds, ids = _costs(rng, (2, 3), 0.0), np.arange(2)
    none = ((0, 0),) * 9
    targets = tuple(rng.integers(0, 3, 2) for _ in range(9))
    hub = Value("hub", 0, tuple(range(1, 10)), ids, targets, hub_seconds, np.zeros(3), none)
    chained = tuple(
        Value(f"v{n}", n, (n + 1,), ids, (ids,), _costs(rng, (2, 2), 0.0), np.zeros(2), none[:1]) for n in range(1, 9)
    )
    problem = Problem(nodes, (hub, *chained))
    expected = min(objective(problem, choice) for choice in itertools.product(range(2), repeat=10))
    contents, sum_ = Contents(problem), additive(problem)
    allowed, relaxed = finite(problem), set()
    for store, encoded in encodings(sum_, allowed, contents, BUDGET):
        plan = fitting(store, encoded, encoded.terms, "size", BUDGET)
        assert plan is not None
        bound = min_plus.run(store, plan)
        relaxed.add(bool(encoded.relaxed))
        assert bound <= expected + 1e-9
        assert encoded.relaxed or math.isclose(bound, expected, rel_tol=1e-9, abs_tol=1e-9)
    assert relaxed == {False, True}
    assert math.isclose(portfolio.solve(problem).objective, expected, rel_tol=1e-9, abs_tol=1e-9)


def test_most_random_problems_with_blocks_fold() -> None:
    folded = [shortened(additive(p), Contents(p)) is not None for p in (repeated(seed, 30) for seed in range(60))]
    assert np.mean(folded) > 0.8


def test_what_is_alike_is_compared_and_written_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of both grows with the blocks that differ, not with the layers."""
    called: list[str] = []
    answer, product = _Comparisons.answer, _Encoder.product
    monkeypatch.setattr(_Comparisons, "answer", lambda *a: (called.append("compared"), answer(*a))[1])
    monkeypatch.setattr(_Encoder, "product", lambda *a: (called.append("written"), product(*a))[1])
    counts = []
    for blocks in (8, 24):
        called.clear()
        problem = chain_of_layers(blocks)
        sum_, contents = additive(problem), Contents(problem)
        assert list(encodings(sum_, reduce(sum_, contents), contents, 1_000_000))
        counts.append((called.count("compared"), called.count("written")))
    assert counts[0] == counts[1] and min(counts[0]) > 0


def chain_of_layers(count: int) -> Problem:
    """Layers of two nodes, alike but for the first and the last, whose arrays are the same objects."""
    draw = np.random.default_rng(5)
    costs = [draw.random(4) for _ in range(2)]
    ways = [draw.random((4, 4)) for _ in range(2)]
    each, none = np.arange(4), np.zeros(4)
    nodes = tuple(Node(f"n{n}", costs[n % 2], none, (0, 0)) for n in range(2 * count))
    values = tuple(
        Value(f"v{n}", n, (n + 1,), each, (each,), ways[n % 2], none, ((0, 0),)) for n in range(2 * count - 1)
    )
    return Problem(nodes, values)
