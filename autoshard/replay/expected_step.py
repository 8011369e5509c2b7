"""One plan for a histogram of dynamic sizes: the least expected step, memory held at the largest sizes.

A plan's expected step is sum_k w_k step_k, over sizes k with share w_k, each step simulated at its sizes. The plans
that are compared are the best for each size alone, the best for the largest, and the one with the least expected sum of
costs: operators and redistributions are sums, so that is the same problem with other numbers (`weighted`). No plan's
step at k is below the bound b_k of the search at k, so none is expected to take less than sum_k w_k b_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.size_histogram import SizePoint
from autoshard.errors import InfeasibleError, UsageError, UserError
from autoshard.formulation.formulate import Formulation
from autoshard.graph_capture.dynamic_sizes.numbers import resized
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan, SizeStep
from autoshard.ir.problem import Node, Problem, Value, changed
from autoshard.replay.size_buckets import Held, bucket_words, bucketed
from autoshard.replay.sized_plans import Sized, SizedRequest
from autoshard.search.objectives import RATIO, SPEED, ratio_problem
from autoshard.search.search_request import SearchRequest
from autoshard.search.style_plans import StylePlan
from autoshard.solvers.common.result import Solution, proved, status

Own = TypeVar("Own", Node, Value)


class Planned(Protocol):
    """Result of a search at one size."""

    @property
    def plan(self) -> Plan: ...


def expected_plan(
    graph: Graph,
    hardware: Hardware,
    wanted: SearchRequest,
    points: Sequence[SizePoint],
    search: Callable[[Graph], Planned],
    completed: Callable[[Plan], Plan],
    styles: Callable[[float], Iterable[Plan]],
    held: Held,
) -> Plan:
    """Plan with the least expected step at `points`, of those that fit at the largest sizes of `graph`.

    `search` plans a graph at one size; `completed` gives a plan of a mesh the whole requested step; `styles` are plans
    of known styles that may be expected to take less than so many seconds; `held` gives plans with pins, for buckets
    with strategies of their own, if `wanted` asks for several. Level 0 minimises the mean of communication and repeated
    work, level 1 the memory at the largest sizes. InfeasibleError if none fits there.
    """
    workload = SizedRequest(graph, hardware, wanted, points, [resized(graph, dict(point.sizes)) for point in points])
    largest = search(graph).plan
    if wanted.level != SPEED:
        plan = largest
        if wanted.level == RATIO:
            plan = completed(_least_ratio(largest, workload))
        pairs = zip(points, workload.steps(plan), strict=True)
        rows = tuple(SizeStep(point.sizes, point.weight, step, step, 0.0) for point, step in pairs)
        return replace(plan, search=replace(largest.search, sizes=rows))
    plans = [search(at).plan for at in workload.graphs]
    candidates = [Sized("the largest sizes", largest, workload.steps(largest))]
    candidates += _carried(plans, workload)
    candidates += _weighted(largest, workload, completed)
    for plan in styles(min(one.expected(points) for one in candidates)):
        if workload.holds(plan):
            candidates.append(Sized("a known style", plan, workload.steps(plan)))
    best = min(candidates, key=lambda one: one.expected(points))
    split = bucketed(candidates, workload, wanted.buckets, held) if wanted.buckets > 1 else None
    chosen, seconds = (best.plan, best.seconds) if split is None else (split.plan, split.seconds)
    bounds = [_bound(plan) for plan in plans]
    rows = tuple(
        SizeStep(point.sizes, point.weight, step, min(step, plan.step_seconds), proved(step, bound))
        for point, step, plan, bound in zip(points, seconds, plans, bounds, strict=True)
    )
    expected = sum(point.weight * step for point, step in zip(points, seconds, strict=True))
    cut = any(plan.search.cut_short for plan in (largest, *plans))
    bound = proved(expected, sum(row.weight * row.bound_seconds for row in rows))
    outcome = status(expected, bound, cut)
    certificate = replace(chosen.certificate, level_objective=expected, level_bound=bound, status=outcome)
    gain = [] if wanted.buckets == 1 else [bucket_words(chosen, expected, best.expected(points))]
    notes = (*largest.search.notes, *_notes(candidates, best, points), *gain)
    record = replace(largest.search, sizes=rows, notes=notes, cut_short=cut)
    return replace(chosen, certificate=certificate, search=record)


def expected_styles(
    largest: Sequence[StylePlan], each: Sequence[Sequence[StylePlan]], points: Sequence[SizePoint]
) -> tuple[StylePlan, ...]:
    """The styles, whose memory is that of the largest sizes, with their mean step: each at its best at every size."""
    averaged = []
    for style in largest:
        variants = [next((one for one in at if one.name == style.name), style) for at in each]
        known = all(one.predicted_seconds > 0 for one in (style, *variants))
        seconds = sum(point.weight * one.predicted_seconds for point, one in zip(points, variants, strict=True))
        averaged.append(replace(style, predicted_seconds=seconds) if known else style)
    return tuple(averaged)


def _least_ratio(largest: Plan, workload: SizedRequest) -> Plan:
    """Optimum of level 0 of the weighted problem: communication and repeated work alone."""
    task, others = workload.formulated(largest.mesh)
    ratios = [replace(one, problem=ratio_problem(one)) for one in others]
    problem = weighted(replace(task.formulation, problem=ratio_problem(task.formulation)), ratios, workload.weights)
    if problem is None:
        message = "the choices at the sizes of the histogram differ, so that level 0 has no mean over them"
        raise UsageError(message, "--level 2, or no --sizes")
    solution = task.solve(problem)
    plan = task.plan(Solution(task.formulation.problem, solution.choice, 0.0, solution.solver))
    bound = proved(solution.objective, solution.lower_bound)
    outcome = status(solution.objective, bound, solution.cut)
    certificate = replace(plan.certificate, level_objective=solution.objective, level_bound=bound, status=outcome)
    return replace(plan, certificate=certificate)


def _notes(candidates: Sequence[Sized], best: Sized, points: Sequence[SizePoint]) -> Iterator[str]:
    """Sentences on how the other candidates compare."""
    others = [one for one in candidates if one is not best]
    if others:
        listed = ", ".join(f"{one.name} {one.expected(points) * 1e3:.4g} ms" for one in others)
        yield f"expected step of the plan that is best for {best.name}; of those best for others: {listed}"


def _bound(plan: Plan) -> float:
    """Lower bound on every plan's step at these sizes; 0 if none is proved (whole steps, and searches over meshes)."""
    return 0.0 if plan.step.is_whole or plan.search.meshes else plan.certificate.level_bound


def _carried(plans: Sequence[Plan], workload: SizedRequest) -> Iterator[Sized]:
    """Plans of single sizes that fit at the largest."""
    seen: set[tuple[object, ...]] = set()
    for plan, at, point in zip(plans, workload.graphs, workload.points, strict=True):
        decided = (plan.mesh, plan.step.parts, tuple(op.strategy for op in plan.ops), plan.parameters)
        if decided in seen:
            continue
        seen.add(decided)
        try:
            carried = workload.at(plan, at, workload.graph)
            if workload.holds(carried):
                yield Sized(point.words(), carried, workload.steps(carried))
        except UserError:  # a redistribution that is another one there
            continue


def _weighted(largest: Plan, workload: SizedRequest, completed: Callable[[Plan], Plan]) -> Iterator[Sized]:
    """Plan with the least expected sum of costs, on the mesh of `largest`."""
    task, others = workload.formulated(largest.mesh)
    problem = weighted(task.formulation, others, workload.weights)
    if problem is None:
        return
    try:
        choice = task.quickly(problem).choice
    except InfeasibleError:
        return
    plan = completed(task.plan(Solution(task.formulation.problem, choice, 0.0, "auto")))
    if workload.holds(plan):
        yield Sized("the expected sum of costs", plan, workload.steps(plan))


def weighted(base: Formulation, others: Sequence[Formulation], weights: Sequence[float]) -> Problem | None:
    """Problem of `base` with the weighted seconds of `others`, and its own bytes; None if their choices differ."""
    if any(_choices(other) != _choices(base) for other in others):
        return None
    shared: dict[tuple[int, ...], object] = {}
    problems = [other.problem for other in others]
    nodes = tuple(
        _mixed(node, [item.nodes[n] for item in problems], weights, shared) for n, node in enumerate(base.problem.nodes)
    )
    values = tuple(
        _mixed(value, [item.values[v] for item in problems], weights, shared)
        for v, value in enumerate(base.problem.values)
    )
    return replace(base.problem, nodes=nodes, values=values)


def _choices(formulation: Formulation) -> list[tuple[object, ...]]:
    sites = [(site.kind, site.name, site.layouts, tuple(map(str, site.strategies))) for site in formulation.sites]
    return [*sites, *((value.tensor, value.sources, value.targets) for value in formulation.values)]


def _mixed(base: Own, others: Sequence[Own], weights: Sequence[float], shared: dict[tuple[int, ...], object]) -> Own:
    """Weighted costs. Equal nodes share their arrays, by which a solver sees what repeats."""
    key = tuple(id(other.seconds) for other in others)
    if key not in shared:
        shared[key] = np.sum([w * other.seconds for w, other in zip(weights, others, strict=True)], axis=0)
    return changed(base, seconds=shared[key])
