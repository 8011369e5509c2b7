"""Plans that people know by name, for comparison: the best of each style on a plan's own mesh, simulated as any plan.

Memory does not limit them: one that does not fit shows it by its peak. A baseline is what an expert would run: styles
that gather weights do so in the low precision of a mixed one, tables that are looked up too, where that is faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache as once
from typing import Any

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.errors import InfeasibleError, UserError
from autoshard.formulation.fewer_choices import Keep, narrowed
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import context_of
from autoshard.formulation.step_resources import StepResources, in_a_row
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan, StepPlan
from autoshard.search.build_plan import Origin, plan_of, priced
from autoshard.search.cached.search_cache import Figures, SearchCache, answers_of, formulated, unhurried
from autoshard.search.fixed_step import predicted
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import Solution
from autoshard.solvers.common.solver_options import Clock, Options, PartialClock
from autoshard.styles.known_styles import STYLES
from autoshard.styles.low_weights import with_low_weights
from autoshard.system.disk_cache import DiskCache


@dataclass(frozen=True)
class StylePlan:
    """The step and peak of a style's program; both 0, with the `reason`, where there is none."""

    name: str
    meaning: str
    predicted_seconds: float = 0.0
    predicted_peak_bytes: float = 0.0
    reason: str = ""


def style_choices(formulation: Formulation, resources: StepResources) -> Iterator[tuple[str, Choice]]:
    """(name of a style, the least choice in a row among those of the style), whatever its memory; of styles that there
    are here."""
    costs = resources.likely(in_a_row(resources))
    priced_so = replace(formulation, problem=replace(costs, capacity_bytes=float("inf")))
    for name, style in STYLES.items():
        keep = style.keep(formulation)
        choice = None if isinstance(keep, str) else _least(priced_so, keep, Clock())
        if choice is not None and not isinstance(choice, str):
            yield name, choice


def style_plans(
    plan: Plan,
    graph: Graph,
    hardware: Hardware,
    clock: Clock | None = None,
    formulation: Formulation | None = None,
    known: Mapping[str, Plan | Figures] | None = None,
    cache: DiskCache | None = None,
) -> tuple[StylePlan, ...]:
    """Best plan of each style, in a fixed order; those that `clock` leaves no time for say so.

    `formulation`: of all strategies on the plan's mesh, if the search has made it already; `known`: figures of the
    styles' programs that it has simulated. `cache`: what earlier commands found.
    """
    clock = clock or Clock()
    if plan.step.is_whole:
        return _of_step(plan, graph, hardware, clock, formulation)
    formulation = (formulation or formulated(cache, context_of(plan, graph, hardware))).within()
    answers = answers_of(cache, formulation.context)
    itself = _itself(plan)
    low = with_low_weights(graph)

    @once
    def gathered_low() -> Formulation:
        return formulate(replace(formulation.context, graph=low, on_host=frozenset()))

    def comparison(name: str) -> _Comparison:
        also = gathered_low if low is not graph and STYLES[name].low_weights and name not in itself else None
        return _Comparison(name, formulation, {**(known or {}), **itself}, also)

    plans = tuple(_cached_plan(comparison(name), clock, answers) for name in STYLES)
    answers.save()
    return plans


def _of_step(
    plan: Plan, graph: Graph, hardware: Hardware, clock: Clock, formulation: Formulation | None
) -> tuple[StylePlan, ...]:
    """Plans of each style on the plan's own step: its stages, schedule, micro-batches and what is recomputed. What a
    style shards, it gathers for each use."""
    formulation = (formulation or formulate(context_of(plan, graph, hardware))).within()
    plans = []
    for name, style in STYLES.items():
        meaning = f"{style.meaning}; --strategy {name}"
        try:
            draft = _style_plan(name, formulation, clock)
            if not isinstance(draft, str):
                draft = predicted(replace(draft, step=replace(plan.step, zero=StepPlan().zero, batch_shares=())), graph)
        except UserError as error:
            draft = error.message
        if isinstance(draft, str):
            plans.append(StylePlan(style.title, meaning, reason=draft))
        else:
            plans.append(StylePlan(style.title, meaning, draft.step_seconds, draft.step_peak_bytes))
    return tuple(plans)


@dataclass(frozen=True)
class _Comparison:
    """`known`: steps of styles that are simulated already. `low`: the formulation whose weights are all gathered in the
    low precision, where the style has them so."""

    name: str
    formulation: Formulation
    known: Mapping[str, Plan | Figures]
    low: Callable[[], Formulation] | None

    @property
    def title(self) -> str:
        return STYLES[self.name].title

    @property
    def meaning(self) -> str:
        return f"{STYLES[self.name].meaning}; --strategy {self.name}"


def _itself(plan: Plan) -> dict[str, Plan]:
    """True if the plan was searched within this style: then there is nothing to compare."""
    decided = {op.decided_by for op in plan.ops}
    return {name: plan for name in decided & STYLES.keys() if len(decided) == 1 and not plan.step.parts}


def _cached_plan(comparison: _Comparison, clock: Clock, answers: SearchCache) -> StylePlan:
    """Plan of a style by the sum of costs, cached unless a search has simulated it: equal for every level and limit."""
    key = f"style {comparison.name}" + (", weights gathered low" if comparison.low else "")
    if comparison.name in comparison.known or not unhurried(clock):
        return _fastest(comparison, clock)
    match answers.get(key):
        case [float(seconds), float(size), str(reason)]:
            return StylePlan(comparison.title, comparison.meaning, seconds, size, reason)
    plan = _fastest(comparison, clock)
    if unhurried(clock):
        answers.put(key, [float(plan.predicted_seconds), float(plan.predicted_peak_bytes), plan.reason])
    return plan


def _style_plan(name: str, formulation: Formulation, clock: Clock) -> Plan | str:
    """The style's plan, or why there is none."""
    if clock.left <= 0:
        return "not simulated: the search was out of time"
    keep = STYLES[name].keep(formulation)
    choice = keep if isinstance(keep, str) else _least(formulation, keep, clock)
    if isinstance(choice, str):
        return choice
    return plan_of(formulation, Solution(formulation.problem, choice, 0.0, name), Origin(), float("inf"), name)


def _fastest(comparison: _Comparison, clock: Clock) -> StylePlan:
    """Faster plan of two: with autocast, or with all weights gathered in the low precision."""
    plan = _simulated(comparison, clock)
    if comparison.low is None or plan.reason:
        return plan
    other = _simulated(replace(comparison, formulation=comparison.low(), known={}, low=None), clock)
    return plan if other.reason else min(plan, other, key=lambda candidate: candidate.predicted_seconds)


def _simulated(comparison: _Comparison, clock: Clock) -> StylePlan:
    name, formulation = comparison.name, comparison.formulation
    if name in comparison.known:
        known = comparison.known[name]
        return StylePlan(comparison.title, comparison.meaning, known.predicted_seconds, known.predicted_peak_bytes)
    draft = _style_plan(name, formulation, clock)
    if isinstance(draft, str):
        return StylePlan(comparison.title, comparison.meaning, reason=draft)
    draft = priced(draft, formulation.graph, formulation.hardware)
    return StylePlan(comparison.title, comparison.meaning, draft.predicted_seconds, draft.predicted_peak_bytes)


def _least(formulation: Formulation, keep: Keep, clock: Clock) -> Choice | str:
    """The choice of least seconds among those kept; why there is none."""
    small = narrowed(formulation, keep)
    try:
        choice = solvers.solve(small.problem, "auto", Options(PartialClock(clock.left, whole=clock), rough=True)).choice
    except InfeasibleError as error:
        return error.message
    return tuple(int(keep[n][s]) if n in keep else s for n, s in enumerate(choice))


def as_json(styles: Sequence[StylePlan]) -> str:
    """Seconds and bytes."""
    return json.dumps({"styles": [asdict(style) for style in styles]}, indent=1, ensure_ascii=False) + "\n"


def from_json(content: Any) -> tuple[StylePlan, ...]:
    """Style plans from what `as_json` writes. Raises ValueError for anything else."""
    try:
        return tuple(_style(row) for row in content["styles"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of styles: {error}") from error


def _style(row: Any) -> StylePlan:
    seconds, peak = float(row["predicted_seconds"]), float(row["predicted_peak_bytes"])
    return StylePlan(str(row["name"]), str(row["meaning"]), seconds, peak, str(row["reason"]))
