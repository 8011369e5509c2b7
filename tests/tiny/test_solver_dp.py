"""Exact min-plus elimination against brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError, UsageError
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Node, Problem, Value, memory, objective
from autoshard.solvers import portfolio, solve
from autoshard.solvers.common.result import Solution
from autoshard.solvers.elimination import elimination_order, min_plus
from autoshard.solvers.elimination.cost_tables import Contents, Store
from autoshard.solvers.elimination.dominance import _Comparisons, finite, reduce, reduce_nearby
from autoshard.solvers.elimination.factor_encoding import Style, encode
from autoshard.solvers.elimination.min_plus import TableView
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.heuristics import brute_force
from tests.graphs import mlp_graph
from tests.random_problems import random_problem

# --- the dp solver against brute force, below its budget and above it ---


SEEDS = st.integers(0, 10**9)


def attempt(problem: Problem, solver: str = "exhaustive") -> Solution | None:
    try:
        return solve(problem, solver)
    except InfeasibleError:
        return None


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


@given(SEEDS)
@settings(max_examples=60)
def test_the_oracle_is_the_definition(seed: int) -> None:
    problem = replace(random_problem(seed, most_nodes=4), capacity_bytes=14.0)
    every = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    fitting = [c for c in every if memory(problem, c).max() <= 14.0 and math.isfinite(objective(problem, c))]
    solution = attempt(problem)
    assert (solution is None) == (not fitting)
    if solution is not None:
        assert close(solution.objective, min(objective(problem, c) for c in fitting))
        assert solution.objective == solution.lower_bound == objective(problem, solution.choice)
        assert solution.peak_bytes == memory(problem, solution.choice).max()


@given(SEEDS, st.sampled_from([0.0, 0.1, 0.4]))
@settings(max_examples=500)
def test_dp_is_optimal(seed: int, forbid: float) -> None:
    problem = random_problem(seed, forbid=forbid)
    expected, solution = attempt(problem), attempt(problem, "dp")
    assert (expected is None) == (solution is None)
    if expected is not None and solution is not None:
        assert solution.status == "optimal"
        assert close(solution.objective, expected.objective)
        assert solution.objective == objective(problem, solution.choice)
        assert solution.choice == portfolio.solve(problem).choice


@given(SEEDS, st.sampled_from([0, 4, 20, 100]))
@settings(max_examples=80)
def test_a_small_budget_never_gives_a_wrong_optimum(seed: int, budget: int) -> None:
    problem = random_problem(seed, forbid=0.05)
    expected = attempt(problem)
    try:
        solution = portfolio.solve(problem, budget_entries=budget)
    except InfeasibleError as error:
        assert expected is None or not error.proven
        return
    assert expected is not None
    assert solution.lower_bound <= expected.objective + 1e-9
    assert expected.objective <= solution.objective + 1e-9
    assert (solution.status == "optimal") == (solution.lower_bound == solution.objective)


def test_a_small_budget_still_finds_good_plans() -> None:
    worse = []
    for seed in range(60):
        problem = random_problem(seed, forbid=0.0)
        best, solution = solve(problem, "exhaustive"), portfolio.solve(problem, budget_entries=10)
        worse.append(solution.objective - best.objective > 1e-9)
    assert np.mean(worse) < 0.05


STYLES = st.sampled_from(["product", "gates", "sets"])


@given(SEEDS, STYLES, st.sampled_from(["size", "left"]), st.sampled_from([1, 8, 1e9]))
@settings(max_examples=600)
def test_every_encoding_and_order_is_exact_or_says_so(
    seed: int, style: Style, key: elimination_order.Key, limit: float
) -> None:
    problem = random_problem(seed)
    expected = attempt(problem)
    if expected is None:
        return
    sum_, contents, store = additive(problem), Contents(problem), Store()
    allowed = finite(problem)
    encoded = encode(store, sum_, allowed, contents, limit, style)
    assert encoded is not None
    whole = encode(Store(), sum_, allowed, contents, limit, style, exact=True)
    assert (whole is None) == bool(encoded.relaxed)
    plan = elimination_order.plan(store, encoded.terms, encoded.domains, key, gates=encoded.gates, limit=limit)
    assert plan is not None
    bound = min_plus.run(store, plan)
    if plan.exact and not encoded.relaxed:
        picked = min_plus.backtrack(store, plan)
        choice = [some[s] for some, s in zip(allowed, picked, strict=False)]
        assert close(bound, expected.objective) and close(objective(problem, choice), bound)
    else:
        assert bound <= expected.objective + 1e-9
    assert plan.entries == sum(store.table(number).size for number in plan.tables)


@given(SEEDS)
@settings(max_examples=200)
def test_reduction_keeps_an_optimum(seed: int) -> None:
    problem = random_problem(seed)
    expected = attempt(problem)
    if expected is None:
        return
    remaining = reduce(additive(problem), Contents(problem))
    best = min(objective(problem, choice) for choice in itertools.product(*remaining))
    assert close(best, expected.objective)


@given(SEEDS, st.booleans())
def test_reduction_asks_again_where_something_changed_and_only_there(seed: int, nearby: bool) -> None:
    """As if every node were asked in every round."""
    problem = random_problem(seed, forbid=0.05)
    sum_, contents = additive(problem, np.ones(problem.horizon)), Contents(problem)
    try:
        reduced = reduce_nearby(sum_, contents, 3) if nearby else reduce(sum_, contents)
    except InfeasibleError:
        return
    nodes = _Comparisons(sum_, contents)
    start = [np.flatnonzero(np.isfinite(n.seconds)) for n in problem.nodes] if nearby else finite(problem)
    remaining = [nodes.same(some) for some in start]
    for _ in range(3 if nearby else 4):
        before = list(remaining)
        for n in range(len(remaining)):
            remaining[n] = nodes.undominated(n, before if nearby else remaining)
    assert [some.tolist() for some in reduced] == [some.tolist() for some in remaining]


def test_reduction_drops_the_dominated_and_keeps_the_lowest_of_equals() -> None:
    remaining = reduce(additive(chain(2, [1.0, 1.0, 9.0])), Contents(None))
    assert [some.tolist() for some in remaining] == [[0], [0]]


def test_min_plus_in_slabs() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 12, 70)
    tables = [rng.random(shape) for shape in ((40, 60, 1, 1), (40, 1, 12, 1), (40, 60, 1, 30), (40, 1, 1, 1))]
    each = slice(None)
    seen = ((each, each, None, None), (each, None, rows, None), (each, each, None, each), (each, None, None, None))
    parts = [min_plus.TableView(table, axes) for table, axes in zip(tables, seen, strict=True)]
    expected = (tables[0] + tables[1][:, :, rows] + tables[2] + tables[3]).min(axis=0)
    assert np.allclose(min_plus.min_plus(parts, (40, 60, 70, 30)), expected, rtol=0, atol=1e-12)


def chain(length: int, costs: list[float], seconds: np.ndarray | None = None) -> Problem:
    """Nodes in a row, each strategy its own layout; free redistribution unless given."""
    k = len(costs)
    ids, table = np.arange(k), np.zeros((k, k)) if seconds is None else seconds
    nodes = tuple(Node(f"n{i}", np.array(costs), np.zeros(k)) for i in range(length))
    values = tuple(Value(f"v{i}", i, (i + 1,), ids, (ids,), table, np.zeros(k), ((0, 0),)) for i in range(length - 1))
    return Problem(nodes, values)


def blocks(count: int, k: int = 8) -> Problem:
    """Residual blocks with equal content: input -> a -> b, and add(input, b)."""
    rng = np.random.default_rng(1)
    ids, move = np.arange(k), rng.random((k, k))
    costs = [rng.random(k) for _ in range(3)]
    nodes, values = [Node("input", np.zeros(k), np.zeros(k))], []
    for _ in range(count):
        base = len(nodes) - 1
        nodes += [Node(f"n{base + 1 + i}", cost, np.zeros(k)) for i, cost in enumerate(costs)]
        for producer, consumers in ((base, (base + 1, base + 3)), (base + 1, (base + 2,)), (base + 2, (base + 3,))):
            spans = ((0, 0),) * len(consumers)
            targets = tuple((ids * (1 + 2 * (c - base))) % k for c in consumers)
            values.append(Value(f"v{len(values)}", producer, consumers, ids, targets, move, np.zeros(k), spans))
    return Problem(tuple(nodes), tuple(values))


def test_equal_blocks_are_computed_once() -> None:
    work = {}
    for count in (16, 64, 256):
        problem = blocks(count)
        sum_, store = additive(problem), Store()
        encoded = encode(store, sum_, finite(problem), Contents(problem), 1e9, "product")
        plan = elimination_order.plan(store, encoded.terms, encoded.domains, "size")
        assert plan is not None
        work[count] = plan.work
        assert plan.exact and plan.largest <= 8**3
    folding = 3 * 8**3  # what the inside of one block costs
    assert work[256] - work[64] < 192 * folding / 20, "each further block costs one message along the chain"
    assert work[64] - work[16] < 48 * folding / 20


def test_equal_blocks_by_brute_force() -> None:
    problem = blocks(2, 5)
    assert close(portfolio.solve(problem).objective, solve(problem, "exhaustive").objective)


def test_a_hub_with_many_consumers_is_exact() -> None:
    rng = np.random.default_rng(2)
    spread, k = 24, 12
    nodes = [Node(f"n{i}", rng.random(k), np.zeros(k)) for i in range(spread + 1)]
    targets = tuple(rng.integers(0, 4, k) for _ in range(spread))
    ends = (0, tuple(range(1, spread + 1)), np.arange(k) % 4, targets)
    hub = Value("hub", *ends, rng.random((4, 4)), np.zeros(4), ((0, 0),) * spread)
    problem = Problem(tuple(nodes), (hub,))
    solution = portfolio.solve(problem)
    best = min(_hub_objective(problem, hub, source, layouts) for source in range(4) for layouts in _subsets(4))
    assert solution.status == "optimal" and close(solution.objective, best)


def test_what_a_gate_keeps_apart_is_not_joined() -> None:
    """A value read twice whose readers meet again, as in a rotary embedding: the gate goes last, not where the joint
    table is smallest."""
    rng, sizes = np.random.default_rng(5), (24, 32, 10, 32, 24, 4)
    nodes = tuple(Node(f"n{i}", rng.random(k), np.zeros(k)) for i, k in enumerate(sizes))
    reads = ((0, (1, 2)), (2, (3,)), (1, (4,)), (3, (4,)), (4, (5,)))
    values = []
    for v, (producer, consumers) in enumerate(reads):
        layouts = max(sizes[c] for c in consumers)
        targets = tuple(rng.permutation(layouts)[: sizes[c]] for c in consumers)
        seconds, none = rng.random((sizes[producer], layouts)), ((0, 0),) * len(consumers)
        values.append(
            Value(f"v{v}", producer, consumers, np.arange(sizes[producer]), targets, seconds, np.zeros(layouts), none)
        )
    sum_ = additive(problem := Problem(nodes, tuple(values)))
    contents, by_key = Contents(problem), {}
    for key in ("size", "left"):
        store = Store()
        encoded = encode(store, sum_, finite(problem), contents, 1e9, "gates")
        assert encoded is not None
        plan = elimination_order.plan(store, encoded.terms, encoded.domains, key, gates=encoded.gates)
        assert plan is not None
        by_key[key] = plan.entries, min_plus.run(store, plan)
    assert by_key["left"][0] < by_key["size"][0] and close(by_key["left"][1], by_key["size"][1])


def _subsets(count: int) -> list[tuple[int, ...]]:
    return [pick for size in range(1, count + 1) for pick in itertools.combinations(range(count), size)]


def _hub_objective(problem: Problem, hub: Value, source: int, layouts: tuple[int, ...]) -> float:
    """The best where the producer leaves `source` and everything in `layouts` is paid for."""
    total = problem.nodes[0].seconds[hub.source == source].min() + hub.seconds[source, list(layouts)].sum()
    for node, targets in zip(problem.nodes[1:], hub.targets, strict=True):
        total += node.seconds[np.isin(targets, layouts)].min(initial=np.inf)
    return float(total)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="dp, exhaustive"):
        solve(Problem((), ()), "magic")
    with pytest.raises(UsageError, match="at most"):
        brute_force.solve(chain(30, [1.0, 2.0]))
    with pytest.raises(InfeasibleError, match="none of its 2 strategies"):
        portfolio.solve(chain(2, [1.0, 2.0], np.full((2, 2), np.inf)))
    odd = np.array([[np.inf, 0.0], [0.0, np.inf]])
    triangle = chain(3, [1.0, 1.0], odd)
    ids = np.arange(2)
    closing = Value("back", 0, (2,), ids, (ids,), odd, np.zeros(2), ((0, 0),))
    with pytest.raises(InfeasibleError, match="every combination"):
        portfolio.solve(replace(triangle, values=(*triangle.values, closing)))


def test_an_empty_problem() -> None:
    assert portfolio.solve(Problem((), ())).choice == () == solve(Problem((), ()), "exhaustive").choice


# --- min-plus products in parts ---


MIN_PLUS_PARTS_SEEDS = range(30)


@pytest.mark.parametrize("seed", MIN_PLUS_PARTS_SEEDS)
def test_parts_added_once_make_the_same_table(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 4)))
    parts, total = [TableView(rng.random((shape[0], *(1 for _ in shape[1:]))), _rows(shape, {0}, rng))], np.zeros(shape)
    for _ in range(int(rng.integers(1, 6))):
        axes = {a for a in range(len(shape)) if rng.random() < 0.6}
        rows = _rows(shape, axes, rng)
        lengths = [1 if row is None else shape[a] for a, row in enumerate(rows)]
        parts.append(TableView(rng.random(lengths), rows))
    for part in parts:
        total = total + part.array()
    for slab, deep in ((1, 256), (7, 256), (1 << 17, 256), (1, 1), (7, 3), (1, 7)):
        monkeypatch.setattr(min_plus, "SLAB", slab)
        monkeypatch.setattr(min_plus, "WIDE", deep)
        assert np.allclose(min_plus.min_plus(parts, shape), total.min(axis=0), rtol=1e-14, atol=0)


def _rows(shape: tuple[int, ...], axes: set[int], rng: np.random.Generator) -> tuple[slice | np.ndarray | None, ...]:
    return tuple(
        None if a not in axes else rng.integers(0, n, n) if rng.random() < 0.5 else slice(None)
        for a, n in enumerate(shape)
    )


def test_what_parts_say_of_the_same_axes_is_added() -> None:
    every, n = slice(None), 40
    rng = np.random.default_rng(0)
    unary, first, second, third = (
        rng.random((n, 1, 1)),
        rng.random((n, n, 1)),
        rng.random((n, 1, n)),
        rng.random((n, 1, n)),
    )
    parts = [
        TableView(unary, (every, None, None)),
        TableView(first, (every, every, None)),
        TableView(second, (np.arange(n), None, every)),
        TableView(third, (every, None, every)),
    ]
    expected = (unary + first + second + third).min(axis=0)
    assert np.allclose(min_plus.min_plus(parts, (n, n, n)), expected, rtol=0, atol=1e-12)


# --- a formulation with fewer choices costs what the whole one does, and forbids what it should ---


WHOLE = formulate(PlanningContext(mlp_graph(3, 64, 64), Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")))


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_the_same_choice_costs_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [len(node.seconds) for node in WHOLE.problem.nodes]
    some = [n for n in range(len(sizes)) if rng.random() < 0.4]
    keep = {n: sorted(rng.choice(sizes[n], int(rng.integers(1, sizes[n] + 1)), replace=False).tolist()) for n in some}
    small = narrowed(WHOLE, keep)
    choice = [int(rng.integers(len(node.seconds))) for node in small.problem.nodes]
    same = [keep[n][s] if n in keep else s for n, s in enumerate(choice)]
    assert objective(small.problem, choice) == objective(WHOLE.problem, same)
    assert np.array_equal(memory(small.problem, choice), memory(WHOLE.problem, same))
    for n, site in enumerate(small.sites):
        narrow, whole = (s.strategies or s.layouts for s in (site, WHOLE.sites[n]))
        assert narrow[choice[n]] == whole[same[n]]


def test_equal_layers_go_on_sharing_arrays() -> None:
    linears = [n for n, site in enumerate(WHOLE.sites) if site.name in ("linear_1", "linear_2")]
    small = narrowed(WHOLE, {n: [0, 2] for n in linears})
    one, other = (small.problem.nodes[n].seconds for n in linears)
    before = [WHOLE.problem.nodes[n].seconds for n in linears]
    assert (one is other) == (before[0] is before[1])
    assert before[0] is before[1]
    assert small.sites[linears[0]].strategies is small.sites[linears[1]].strategies


@pytest.mark.parametrize("kept", [0, 1])
def test_a_target_that_is_not_taken_is_forbidden(kept: int) -> None:
    v = next(v for v, site in enumerate(WHOLE.values) if site.tensor == "linear_0")
    small = narrowed(WHOLE, {}, {v: [kept]})
    seconds = small.problem.values[v].seconds
    assert np.isinf(np.delete(seconds, kept, axis=1)).all()
    assert np.array_equal(seconds[:, kept], WHOLE.problem.values[v].seconds[:, kept])
