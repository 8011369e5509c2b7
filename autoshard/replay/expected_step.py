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
from autoshard.replay.sized_plans import Asked, Sized
from autoshard.search.objectives import RATIO, SPEED, ratio_problem
from autoshard.search.search_request import SearchRequest
from autoshard.search.style_plans import StylePlan
from autoshard.solvers.common.result import Solution, proved, status

Own = TypeVar("Own", Node, Value)


class Planned(Protocol):
    """What a search of one size gives."""

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
    """The plan with the least expected step at `points`, of those that fit at the largest sizes of `graph`.

    `search` plans a graph at one size; `completed` gives a plan of a mesh the whole step that is asked for; `styles`
    are plans of known styles that may be expected to take less than so many seconds; `held` plans with pins, for
    buckets with strategies of their own, where `wanted` asks for several. At level 0
    what is minimised is the mean of communication and repeated work, at level 1 the memory at the largest sizes.
    InfeasibleError where none fits there.
    """
    asked = Asked(graph, hardware, wanted, points, [resized(graph, dict(point.sizes)) for point in points])
    largest = search(graph).plan
    if wanted.level != SPEED:
        plan = largest
        if wanted.level == RATIO:
            plan = completed(_least_ratio(largest, asked))
        pairs = zip(points, asked.steps(plan), strict=True)
        rows = tuple(SizeStep(point.sizes, point.weight, step, step, 0.0) for point, step in pairs)
        return replace(plan, search=replace(largest.search, sizes=rows))
    own = [search(at).plan for at in asked.graphs]
    found = [Sized("the largest sizes", largest, asked.steps(largest))]
    found += _carried(own, asked)
    found += _weighted(largest, asked, completed)
    for plan in styles(min(one.expected(points) for one in found)):
        if asked.holds(plan):
            found.append(Sized("a known style", plan, asked.steps(plan)))
    best = min(found, key=lambda one: one.expected(points))
    split = bucketed(found, asked, wanted.buckets, held) if wanted.buckets > 1 else None
    chosen, seconds = (best.plan, best.seconds) if split is None else (split.plan, split.seconds)
    bounds = [_bound(plan) for plan in own]
    rows = tuple(
        SizeStep(point.sizes, point.weight, step, min(step, plan.step_seconds), proved(step, bound))
        for point, step, plan, bound in zip(points, seconds, own, bounds, strict=True)
    )
    expected = sum(point.weight * step for point, step in zip(points, seconds, strict=True))
    cut = any(plan.search.cut_short for plan in (largest, *own))
    bound = proved(expected, sum(row.weight * row.bound_seconds for row in rows))
    outcome = status(expected, bound, cut)
    certificate = replace(chosen.certificate, level_objective=expected, level_bound=bound, status=outcome)
    gain = [] if wanted.buckets == 1 else [bucket_words(chosen, expected, best.expected(points))]
    notes = (*largest.search.notes, *_notes(found, best, points), *gain)
    record = replace(largest.search, sizes=rows, notes=notes, cut_short=cut)
    return replace(chosen, certificate=certificate, search=record)


def expected_styles(
    largest: Sequence[StylePlan], each: Sequence[Sequence[StylePlan]], points: Sequence[SizePoint]
) -> tuple[StylePlan, ...]:
    """The styles, whose memory is that of the largest sizes, with their mean step: each at its best at every size."""
    made = []
    for style in largest:
        own = [next((one for one in at if one.name == style.name), style) for at in each]
        known = all(one.predicted_seconds > 0 for one in (style, *own))
        seconds = sum(point.weight * one.predicted_seconds for point, one in zip(points, own, strict=True))
        made.append(replace(style, predicted_seconds=seconds) if known else style)
    return tuple(made)


def _least_ratio(largest: Plan, asked: Asked) -> Plan:
    """Of level 0: the optimum of the weighted problem, of communication and repeated work alone."""
    task, own = asked.formulated(largest.mesh)
    ratios = [replace(one, problem=ratio_problem(one)) for one in own]
    problem = weighted(replace(task.formulation, problem=ratio_problem(task.formulation)), ratios, asked.weights)
    if problem is None:
        message = "the choices at the sizes of the histogram differ, so that level 0 has no mean over them"
        raise UsageError(message, "--level 2, or no --sizes")
    found = task.solve(problem)
    plan = task.plan(Solution(task.formulation.problem, found.choice, 0.0, found.solver))
    bound = proved(found.objective, found.lower_bound)
    outcome = status(found.objective, bound, found.cut)
    certificate = replace(plan.certificate, level_objective=found.objective, level_bound=bound, status=outcome)
    return replace(plan, certificate=certificate)


def _notes(found: Sequence[Sized], best: Sized, points: Sequence[SizePoint]) -> Iterator[str]:
    """How the others compare."""
    others = [one for one in found if one is not best]
    if others:
        listed = ", ".join(f"{one.name} {one.expected(points) * 1e3:.4g} ms" for one in others)
        yield f"expected step of the plan that is best for {best.name}; of those best for others: {listed}"


def _bound(plan: Plan) -> float:
    """Of every plan's step at these sizes; 0 where none is proved (of whole steps, and of a search over meshes)."""
    return 0.0 if plan.step.is_whole or plan.search.meshes else plan.certificate.level_bound


def _carried(plans: Sequence[Plan], asked: Asked) -> Iterator[Sized]:
    """The plans of single sizes that fit at the largest."""
    seen: set[tuple[object, ...]] = set()
    for plan, at, point in zip(plans, asked.graphs, asked.points, strict=True):
        decided = (plan.mesh, plan.step.parts, tuple(op.strategy for op in plan.ops), plan.parameters)
        if decided in seen:
            continue
        seen.add(decided)
        try:
            carried = asked.at(plan, at, asked.graph)
            if asked.holds(carried):
                yield Sized(point.words(), carried, asked.steps(carried))
        except UserError:  # a redistribution that is another one there
            continue


def _weighted(largest: Plan, asked: Asked, completed: Callable[[Plan], Plan]) -> Iterator[Sized]:
    """The plan with the least expected sum of costs, on the mesh of `largest`."""
    task, others = asked.formulated(largest.mesh)
    problem = weighted(task.formulation, others, asked.weights)
    if problem is None:
        return
    try:
        choice = task.quickly(problem).choice
    except InfeasibleError:
        return
    plan = completed(task.plan(Solution(task.formulation.problem, choice, 0.0, "auto")))
    if asked.holds(plan):
        yield Sized("the expected sum of costs", plan, asked.steps(plan))


def weighted(base: Formulation, others: Sequence[Formulation], weights: Sequence[float]) -> Problem | None:
    """`base`, with the seconds of `others` by their weights, and its own bytes; None where their choices differ."""
    if any(_choices(own) != _choices(base) for own in others):
        return None
    shared: dict[tuple[int, ...], object] = {}
    problems = [own.problem for own in others]
    nodes = tuple(
        _mixed(node, [own.nodes[n] for own in problems], weights, shared) for n, node in enumerate(base.problem.nodes)
    )
    values = tuple(
        _mixed(value, [own.values[v] for own in problems], weights, shared)
        for v, value in enumerate(base.problem.values)
    )
    return replace(base.problem, nodes=nodes, values=values)


def _choices(formulation: Formulation) -> list[tuple[object, ...]]:
    sites = [(own.kind, own.name, own.layouts, tuple(map(str, own.strategies))) for own in formulation.sites]
    return [*sites, *((own.tensor, own.sources, own.targets) for own in formulation.values)]


def _mixed(own: Own, others: Sequence[Own], weights: Sequence[float], shared: dict[tuple[int, ...], object]) -> Own:
    """Equal nodes share their arrays, by which a solver sees what repeats."""
    key = tuple(id(other.seconds) for other in others)
    if key not in shared:
        shared[key] = np.sum([w * other.seconds for w, other in zip(weights, others, strict=True)], axis=0)
    return changed(own, seconds=shared[key])
