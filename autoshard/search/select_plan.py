"""Best plan on one mesh: solved, fitted to the memory, and the best few simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.host_offers import check_host_memory
from autoshard.errors import InfeasibleError
from autoshard.formulation.cost_breakdown import parts
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Candidate, Certificate, Plan, Search
from autoshard.search.build_plan import with_parts
from autoshard.search.cached.search_cache import Figures
from autoshard.search.contenders import Choice, contenders
from autoshard.search.memory_fit import fitted
from autoshard.search.min_memory import between, others
from autoshard.search.objectives import MEMORY, RATIO, SPEED, Levelled
from autoshard.search.propagated_choices import propagated
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import Log, SearchTask, SolvedLevel, prepare, timed
from autoshard.search.shortest_step import EACH
from autoshard.solvers.common.clock import watched
from autoshard.solvers.common.result import CUT_SHORT, Solution, proved, status
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.styles.known_styles import STYLES
from autoshard.units import format_bytes, format_seconds


def search(
    graph: Graph, hardware: Hardware, request: SearchRequest, *, options: Options | None = None, log: Log | None = None
) -> Plan:
    """Best plan on `request.mesh`: of the level and style that are asked for, within the memory limit.

    `log` receives the time of each part. Raises InfeasibleError if no plan fits, UsageError if a pin is not offered.
    """
    assert request.mesh is not None, "mesh_search looks for one"
    task = prepare(graph, request.mesh, hardware, request, options, log)
    begin(task)
    return best(*fitted(task))


def begin(task: SearchTask) -> None:
    """Simulates known styles before all else, whatever time there is: no plan is to be worse than the best of them."""
    if task.takes_styles and task.level != RATIO:
        with timed(task.log, "solving known styles"):
            simulate_styles(task)


def best(task: SearchTask, result: SolvedLevel) -> Plan:
    """Plan that is best after simulating a few, with its certificate and what was tried."""
    result = propagated(task, result) if task.solver == "propagation" else _simulated(task, result)
    choice = result.levelled.solution.choice
    site_parts = parts(task.formulation, choice)
    plan = with_parts(result.plan, task.formulation, site_parts)
    sinks = [part for part, site in zip(site_parts, task.formulation.sites, strict=True) if site.kind == "sink"]
    record = Search(
        task.level,
        tuple(map(str, task.pins)),
        result.candidates,
        notes=result.notes,
        outputs_seconds=sum(part.compute_seconds + part.communication_seconds for part in sinks),
        all_to_all=task.request.all_to_all,
    )
    check_host_memory(plan, task.formulation.graph, task.formulation.hardware.host_memory_bytes)
    certificate = _certificate(task, result, plan)
    task.answers.save()
    return marked(replace(plan, certificate=certificate, search=record), task.clock.cut)


def _certificate(task: SearchTask, result: SolvedLevel, plan: Plan) -> Certificate:
    """Certificate of the plan: a bound on what its level minimises, at level 2 on the simulated step."""
    levelled = result.levelled
    objective, bound, outcome = levelled.objective, levelled.bound, levelled.status
    if task.level == SPEED:
        known = [choice for _, choice in task.steps.plans] or [levelled.solution.choice]
        with timed(task.log, "bounding the step"), watched(task.clock):
            objective, bound = plan.predicted_seconds, task.steps.bound(known)
        bound = proved(objective, bound)
        outcome = status(objective, bound, levelled.cut)
    return replace(
        plan.certificate,
        status=outcome,
        lower_bound_seconds=levelled.solution.lower_bound,
        level_objective=objective,
        level_bound=bound,
    )


def marked(plan: Plan, cut: bool) -> Plan:
    """Plan whose status tells if its search was `cut`: what was not considered may be better."""
    if not cut:
        return plan
    certificate = replace(plan.certificate, status=CUT_SHORT)
    return replace(plan, certificate=certificate, search=replace(plan.search, cut_short=True))


def _simulated(task: SearchTask, result: SolvedLevel) -> SolvedLevel:
    """Simulates the contenders, too, and keeps the program that fits and is best by the level."""
    first = result.levelled
    levelled: dict[Choice, Levelled] = {first.solution.choice: first}
    plan = result.plan
    taken = {first.solution.choice: Figures(plan.predicted_seconds, plan.predicted_peak_bytes)}
    names = {first.solution.choice: result.candidates[-1].name}
    titles = {style.title: name for name, style in STYLES.items()}
    for name, choice in chain(_in_time(task.clock, _others(task, result)), _styles(task)):
        if choice not in taken:
            levelled[choice] = task.levelled(choice, first.solution.solver, cut=first.cut, least_bytes=first.bound)
            names[choice], taken[choice] = name, task.figures(levelled[choice].solution)
        if name in titles:
            task.styles[titles[name]] = taken[choice]
    winner = min((choice for choice in taken if task.holds(taken[choice])), key=lambda c: task.rank(taken[c]))
    if winner != first.solution.choice:
        plan = task.plan(levelled[winner].solution)
    rows = [
        Candidate(name, _outcome(task, taken[c], c == winner), levelled[c].solution.objective, *taken[c])
        for c, name in names.items()
        if name not in titles or c == winner  # the others are listed beside the plan
    ]
    notes = _slower(result.candidates[0], plan) if len(result.candidates) > 1 else ()
    candidates = (*result.candidates[:-1], *rows)
    return replace(result, levelled=levelled[winner], plan=plan, candidates=candidates, notes=notes)


def _in_time(clock: Clock, others: Iterator[tuple[str, Choice]]) -> Iterator[tuple[str, Choice]]:
    """Plans that fit the time left, each taking as long as the longest so far; `clock.cut` if some are left out."""
    longest, started = 0.0, clock.seconds
    for other in others:
        yield other
        longest, started = max(longest, clock.seconds - started), clock.seconds
        if clock.left <= longest:
            clock.cut = True
            return


def _others(task: SearchTask, result: SolvedLevel) -> Iterator[tuple[str, Choice]]:
    """Plans to simulate in addition to the optimum: none at level 0, which is not about the simulated step."""
    if task.level == RATIO or task.stopped():
        return
    best = result.levelled.solution
    if task.level == MEMORY:
        yield from others(task, best, result.plan.predicted_peak_bytes)
        return
    if result.target_bytes > task.memory_limit_bytes:  # no plan fits by the solver's count, some programs do
        fastest = task.quickly(replace(task.formulation.problem, capacity_bytes=float("inf")))
        yield from between(task, result.target_bytes, fastest.peak_bytes)
    if task.request.strategy in STYLES:  # what every plan is compared with
        yield "least sum of the style's costs", task.quickly(task.formulation.problem).choice
    if task.by_step and any(choice == best.choice for _, choice in task.steps.plans):  # it fits without the limit
        yield from task.steps.others()
        return
    limited = bool(task.by_step and task.steps.plans)
    if limited:
        yield from _within_limit(task, result.target_bytes)
    site_parts = parts(task.formulation, best.choice)
    priced = contenders(task.formulation, best.choice, site_parts, result.target_bytes, task.quickly)
    yield from islice(priced, EACH if limited else None)


def _within_limit(task: SearchTask, target_bytes: float) -> Iterator[tuple[str, Choice]]:
    """Plans within a limit that the first plan of a step exceeds: by its weights, and those found without a limit."""
    with contextlib.suppress(InfeasibleError):
        costs = replace(task.steps.weighed(), capacity_bytes=target_bytes)
        yield "least of a step within the limit", task.quickly(costs).choice
    yield from task.steps.others()


def _styles(task: SearchTask) -> Iterator[tuple[str, Choice]]:
    """Known styles, whatever time is left, so that no plan is worse than the best of them."""
    if task.takes_styles and task.level != RATIO:
        yield from ((STYLES[name].title, choice) for name, choice in task.known_styles())


def simulate_styles(task: SearchTask) -> None:
    """Simulates the styles that the search has not: one program of each, whatever the level and the limit."""
    left = [(name, choice) for name, choice in task.known_styles() if name not in task.styles]
    for name, choice in left:
        task.styles[name] = task.figures(Solution(task.formulation.problem, choice, 0.0, name))
    task.answers.save()


def _outcome(task: SearchTask, program: Figures, chosen: bool) -> str:
    if chosen:
        return "chosen"
    return "not better" if task.holds(program) else "too large"


def _slower(free: Candidate, plan: Plan) -> tuple[str, ...]:
    """Note on the time that the memory limit costs, if it does."""
    over = format_bytes(free.predicted_peak_bytes - plan.capacity_bytes, 3)
    extra = plan.predicted_seconds - free.predicted_seconds
    message = f"{format_seconds(extra, 3)} ({extra / free.predicted_seconds:.1%}) slower" if extra > 0 else "no slower"
    return (f"the fastest plan needs {over} more than the memory limit; this one fits and is {message}",)
