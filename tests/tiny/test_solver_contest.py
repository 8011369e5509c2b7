"""The contest's format, contraction and the search for large problems, against brute force on small ones."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError, InvalidFileError
from autoshard.ir.problem import Node, Problem, Value, memory, objective
from autoshard.solvers import solve
from autoshard.solvers.common.result import Solution
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.heuristics import brute_force
from benchmarks.contest import anytime, asplos_format
from benchmarks.contest.core_problem import core
from benchmarks.contest.messages import Ascent
from tests.looks import Looks
from tests.random_problems import limited, random_problem

pytestmark = pytest.mark.slow  # benchmarks/contest is not part of autoshard

SEEDS = st.integers(0, 10**9)
EXAMPLE: dict[str, Any] = {
    "nodes": {
        "intervals": [[3, 7], [4, 7], [5, 12], [11, 14], [11, 15]],
        "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
        "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
    },
    "edges": {
        "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
        "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
    },
    "usage_limit": 50,
}


def saved(folder: Path, content: Any, name: str = "p.json") -> Path:
    path = folder / name
    text = json.dumps({"problem": content}).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def changed(**parts: Any) -> dict[str, Any]:
    """The example with other entries, named as nodes_costs and the like."""
    copy = json.loads(json.dumps(EXAMPLE))
    for key, content in parts.items():
        group, _, part = key.partition("_")
        if group in ("nodes", "edges"):
            copy[group][part] = content
        else:
            copy[key] = content
    return dict(copy)


def brute(problem: Problem) -> Solution | None:
    try:
        return brute_force.solve(problem)
    except InfeasibleError:
        return None


def fenced(seed: int) -> Problem:
    """Values with one consumer and many forbidden pairs, as contraction likes them; mostly feasible."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, most_nodes=7, forbid=float(rng.choice([0.0, 0.3, 0.6])))
    keep = [
        replace(v, consumers=v.consumers[:1], targets=v.targets[:1], intervals=((0, 0),), bytes=0.0 * v.bytes)
        for v in problem.values
    ]
    return replace(problem, values=tuple(keep))


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_the_example(tmp_path: Path, name: str) -> None:
    problem = asplos_format.read(saved(tmp_path, EXAMPLE, name))
    choice = (0, 0, 1, 1, 0)  # worked out by hand: 15 + 55 + 45 + 75 + 95 and the edges 30, 10, 10, 20, 60
    assert objective(problem, choice) == 285 + 130
    assert memory(problem, choice).tolist() == [0] * 3 + [10] + [35] + [55, 55] + [20] * 4 + [45] + [25] * 2 + [15]
    assert anytime.search(problem, Clock()).objective == brute(problem).objective  # type: ignore[union-attr]


COSTS = EXAMPLE["edges"]["costs"]
BAD = [
    (changed(nodes_costs=[[15], [55, -65], [25, 45, 35], [85, 75], [95]]), "node 1 has no cost, or one that is no"),
    (changed(nodes_costs=[[15], [], [25, 45, 35], [85, 75], [95]]), "node 1 has no cost, or one that is no"),
    (changed(nodes_costs=[[15], [55], [25, 45, 35], [85, 75], [95]]), "the usage of node 1 has 2 costs, expected 1"),
    (changed(edges_costs=[[30], *COSTS[1:]]), "edge 0 has 1 costs, expected 2"),
    (changed(edges_nodes=[[0, 9], [0, 2], [1, 3], [2, 4], [3, 4]]), "index out of range"),
    (changed(edges_nodes=[[0, 1, 0], [0, 2], [1, 3], [2, 4], [3, 4]]), "too many values"),
    (changed(edges_nodes=[[0, 0], [0, 2], [1, 3], [2, 4], [3, 4]]), r"edge 0 is over \[0, 0\], expected two different"),
    (changed(edges_nodes=[[0, -1], [0, 2], [1, 3], [2, 4], [3, 4]]), r"edge 0 is over \[0, -1\]"),
    (changed(usage_limit="much"), "could not convert string to float: 'much'"),
    (changed(nodes_intervals=[[-3, 7], [4, 7], [5, 12], [11, 14], [11, 15]]), "node 0 is alive from -3 to 7"),
    ({"nodes": {}}, "no entry 'intervals'"),
    ([], "list indices"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InvalidFileError, match=message) as caught:
        asplos_format.read(saved(tmp_path, content))
    assert caught.value.exit_code == 5
    assert "\n" not in caught.value.message


def test_damaged_files(tmp_path: Path) -> None:
    for name, data in (("cut.json.gz", gzip.compress(b"{}")[:-4]), ("text.json", b"hello"), ("none.json", None)):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidFileError, match=name):
            asplos_format.read(tmp_path / name)


def test_a_limit_below_any_use_names_what_is_alive(tmp_path: Path) -> None:
    with pytest.raises(
        InfeasibleError, match=r"10 B more than the capacity of 40 B \(at time 5.*node 1 25 B"
    ) as caught:
        asplos_format.read(saved(tmp_path, changed(usage_limit=40)))
    assert caught.value.exit_code == 3


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_contraction_keeps_the_plans_their_costs_and_their_memory(seed: int) -> None:
    problem = fenced(seed)
    try:
        reduced = core(problem)
    except InfeasibleError:
        assert brute(problem) is None
        return
    sizes = [len(costs) for costs in reduced.graph.unary]
    best = math.inf
    for choice in np.ndindex(*sizes) if math.prod(sizes) <= 5000 else []:
        picked = np.array(choice, np.int64)
        plan = reduced.lifted(picked)
        assert math.isclose(reduced.cost(picked), objective(problem, plan), rel_tol=1e-12, abs_tol=1e-12)
        assert math.isinf(reduced.cost(picked)) or math.isclose(
            reduced.items.alive(picked).max(initial=0.0), memory(problem, plan).max(), rel_tol=1e-12, abs_tol=1e-9
        )
        best = min(best, reduced.cost(picked))
    exact = brute(problem)
    assert math.prod(sizes) > 5000 or math.isclose(best, exact.objective if exact else math.inf, rel_tol=1e-12)


@given(SEEDS)
@settings(max_examples=250, deadline=None)
def test_the_search_is_exact_on_small_problems(seed: int) -> None:
    problem = limited(fenced(seed), seed)
    expected = brute(problem)
    try:
        solution = anytime.search(problem, Clock(), seed=seed)
    except InfeasibleError as error:
        assert expected is None and error.proven
        return
    assert expected is not None and solution.status == "optimal"
    assert math.isclose(solution.objective, expected.objective, rel_tol=1e-9)
    assert solution.objective == objective(problem, solution.choice) and solution.peak_bytes <= problem.capacity_bytes
    assert solution.choice == anytime.search(problem, Clock(), seed=seed).choice


@pytest.mark.parametrize("seed", range(60))
def test_a_limit_in_fractions_is_that_of_the_plan_which_fills_it(seed: int) -> None:
    """What fits by the problem's own sums is never taken for a plan that does not."""
    whole = fenced(seed)
    problem = replace(whole, nodes=tuple(replace(node, bytes=node.bytes * 0.1) for node in whole.nodes))
    best = brute(problem)
    if best is None:
        return
    problem = replace(problem, capacity_bytes=best.peak_bytes)
    solution = anytime.search(problem, Clock(), seed=seed)
    assert solution.status == "optimal" and math.isclose(solution.objective, best.objective, rel_tol=1e-9)


@given(SEEDS)
@settings(max_examples=150, deadline=None)
def test_bounds_of_messages_are_below_the_optimum(seed: int) -> None:
    problem = limited(fenced(seed), seed)
    expected = brute(problem)
    if expected is None:
        return
    climb = Ascent(core(problem))
    for _ in range(15):
        assert climb.step().bound <= expected.objective * (1 + 1e-9) + 1e-9


def network(layers: int, seed: int = 0, k: int = 12) -> Problem:
    """Blocks of eight nodes with a residual, some fenced, and weights that are alive throughout."""
    rng = np.random.default_rng(seed)
    ids, zero = np.arange(k), np.zeros(k)
    same = np.where(np.eye(k, dtype=bool), 0.0, np.inf)
    moves = [np.round(rng.random((k, k)) ** 2 * 100) for _ in range(6)]
    count = 8 * layers
    nodes, values = [], []

    def link(a: int, b: int, cost: np.ndarray) -> None:
        values.append(Value(f"v{len(values)}", a, (b,), ids, (ids,), cost, zero, ((0, 0),)))

    for n in range(count):
        span = (0, count) if n % 8 == 0 else (n, min(n + 4, count))
        size = np.round(64 / 2.0 ** rng.integers(0, 4, k))
        nodes.append(Node(f"n{n}", np.round(640 / (1 + size) * rng.random(k)), size, span))
        if n:
            link(n - 1, n, same if n % 8 in (2, 5, 6) else moves[n % 6])
        if n >= 8:
            link(n - 8, n, moves[(n // 8) % 6])
    least = np.sum([node.bytes.min() for node in nodes if node.interval[1] == count])
    return Problem(tuple(nodes), tuple(values), capacity_bytes=float(2.0 * least), horizon=count)


@pytest.mark.parametrize("limit", [20_000.0, 25_000.0])
def test_the_time_limit_holds_and_the_gap_is_honest(limit: float) -> None:
    problem = network(80)
    clock = Clock(limit, timer=Looks())
    solution = anytime.search(problem, clock)
    assert clock.seconds <= limit + 500.0
    assert solution.peak_bytes <= problem.capacity_bytes
    assert 0 < solution.lower_bound <= solution.objective == objective(problem, solution.choice)


def test_ctrl_c_gives_the_best_so_far() -> None:
    class Pressed(Looks):
        def __call__(self) -> float:
            if self.number == 20_000:
                clock.stop()
            return super().__call__()

    clock = Clock(timer=Pressed())
    problem = network(120)
    solution = anytime.search(problem, clock)
    assert clock.seconds < 20_500.0
    assert clock.stopped and solution.peak_bytes <= problem.capacity_bytes


def test_nothing_fits_names_what_is_alive() -> None:
    problem = replace(network(80), capacity_bytes=100.0)
    with pytest.raises(
        InfeasibleError, match=r"no plan fits: every plan needs at least .*at time \d+, at their smallest: n"
    ):
        solve(problem, "dp")


@given(SEEDS, st.sampled_from([1.0, 0.1]))
@settings(max_examples=250, deadline=None)
def test_a_core_under_a_limit_holds_a_best_plan(seed: int, part: float) -> None:
    """Bytes in whole numbers and in fractions, of which a plan may fill the limit exactly."""
    whole = limited(fenced(seed), seed)
    problem = replace(
        whole,
        nodes=tuple(replace(node, bytes=node.bytes * part) for node in whole.nodes),
        capacity_bytes=whole.capacity_bytes * part,
    )
    expected = brute(problem)
    try:
        reduced = core(problem)
    except InfeasibleError as error:
        assert expected is None and error.proven
        return
    sizes, best = [len(costs) for costs in reduced.graph.unary], math.inf
    assume(math.prod(sizes) <= 300)
    for choice in np.ndindex(*sizes):
        picked = np.array(choice, np.int64)
        if reduced.fits(picked):
            best = min(best, reduced.cost(picked))
            assert math.isclose(reduced.cost(picked), objective(problem, reduced.lifted(picked)), rel_tol=1e-12) or (
                math.isinf(reduced.cost(picked))
            )
    assert math.isclose(best, math.inf if expected is None else expected.objective, rel_tol=1e-9)
