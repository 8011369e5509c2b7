"""Plan of least memory: the solver's, and if its program does not fit, others that are simulated.

The solver's count is not the program's: it counts a value once for every layout that it is used in and gradients for
the whole step, and knows no operator's working bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import chain
from math import inf

from autoshard.errors import InfeasibleError
from autoshard.formulation.cost_breakdown import parts
from autoshard.formulation.memory_bound.memory_lower_bound import MemoryLowerBound, memory_lower_bound
from autoshard.ir.plan import Candidate
from autoshard.search.contenders import Choice, contenders
from autoshard.search.objectives import MEMORY, lean_plans, solve_level
from autoshard.search.search_task import SearchTask, SolvedLevel, candidate, timed
from autoshard.solvers.common.result import OPTIMAL, Solution, none_within
from autoshard.solvers.portfolio import FEW_CHOICES
from autoshard.styles.known_styles import STYLES
from autoshard.units import format_bytes

RATES = (5, 0.7, 0.1, 0.02)  # of seconds for bytes, both as parts of those of a plan near the least memory
_IN_A_ROW = 2  # programs that need more than another, after which no more are tried
SHARES = (0.25, 0.5, 0.75)  # of the way from the least memory to that of the fastest plan, in logarithms


def least(task: SearchTask, before: tuple[Candidate, ...]) -> SolvedLevel:
    """First plan that fits, the solver's plan of least memory before others, known styles last. InfeasibleError if none
    does: a count that programs may undercut proves nothing about them."""
    refused, quickly = None, task.solver == "auto"
    if task.level != MEMORY:  # here nothing within the limit was found
        refuse(task)
    try:
        levelled = solve_level(task.formulation, MEMORY, task.memory_limit_bytes, task.solve, task.stopped, quickly)
    except InfeasibleError as error:
        refused = error
        levelled = solve_level(task.formulation, MEMORY, float("inf"), task.solve, task.stopped, quickly)
    bound = levelled.bound
    if task.level != MEMORY:
        levelled = task.levelled(levelled.solution.choice, levelled.solution.solver, cut=levelled.cut)
    first, plan = levelled.solution, task.plan(levelled.solution)
    smallest, tried = plan.predicted_peak_bytes, before
    if task.holds(plan):
        return SolvedLevel(levelled, plan, first.peak_bytes, (*tried, candidate("least memory", plan, "")))
    if task.level == MEMORY:
        refuse(task, smallest)
    tried = (*tried, candidate("least memory by the solver's count", plan, "too large"))
    for name, choice in chain(others(task, first), _styles(task)):
        contender = task.levelled(choice, first.solver, cut=levelled.cut, least_bytes=bound)
        plan = task.plan(contender.solution)
        smallest = min(smallest, plan.predicted_peak_bytes)
        if task.holds(plan):
            return SolvedLevel(contender, plan, contender.solution.peak_bytes, (*tried, candidate(name, plan, "")))
        if task.stopped():
            break
    counted = f"; as the solver counts, {refused.message}" if refused else ""
    needs = f"the program of the smallest plan found needs {format_bytes(smallest)}"
    none = "no plan was found whose program fits (that none exists is not proven)"
    raise InfeasibleError(f"{none}: {needs}{counted}", proven=False)


def refuse(task: SearchTask, smallest_bytes: float = inf) -> None:
    """Raises InfeasibleError, proven, if every program of the task holds more than the limit. `smallest_bytes`: of the
    programs made so far. A step of several micro-batches, which also adds up gradients, holds no less."""
    with timed(task.log, "bounding the memory"):
        floor = memory_lower_bound(task.formulation)
    if none_within(floor.bytes, task.memory_limit_bytes, smallest_bytes):
        where, style = f"mesh {task.formulation.mesh}", task.request.strategy
        which = f"--strategy {style} on {where}" if style in STYLES else where
        size = format_bytes(floor.bytes)
        message = f"proved: no plan of {which} fits: each holds at least {size} {floor.moment} ({_parts_of(floor)})"
        raise InfeasibleError(message)


def _parts_of(floor: MemoryLowerBound) -> str:
    parts = [f"{format_bytes(floor.stored)} of parameters with what trains them, buffers and inputs"]
    if floor.saved:
        parts.append(f"{format_bytes(floor.saved)} that operators before it keep for backward")
    if floor.op:
        parts.append(f"{format_bytes(floor.bytes - floor.stored - floor.saved)} of its own")
    return ", ".join(parts)


def _styles(task: SearchTask) -> Iterator[tuple[str, Choice]]:
    if task.takes_styles:
        yield from ((STYLES[name].title, choice) for name, choice in task.known_styles())


def others(task: SearchTask, best: Solution, smallest_bytes: float = inf) -> Iterator[tuple[str, Choice]]:
    """Plans that may need less memory than `best`, the solver's plan of least memory, as a program.

    `smallest_bytes`: see `between`; if a program needs that, plans at prices of bytes come first, which are found soon,
    and often do; else last, for they are slower."""
    at_once = smallest_bytes < inf
    if at_once:
        rates_do = yield from at_rates(task, smallest_bytes)
        if rates_do and sum(len(node.seconds) for node in task.formulation.problem.nodes) > FEW_CHOICES:
            return
    fastest = task.quickly(replace(task.formulation.problem, capacity_bytes=float("inf")))
    yield "optimum", fastest.choice
    wider_are_larger = yield from between(task, best.peak_bytes, fastest.peak_bytes, smallest_bytes)
    if wider_are_larger:
        return
    if not at_once:
        yield from at_rates(task, smallest_bytes)
    site_parts = parts(task.formulation, best.choice)
    yield from contenders(task.formulation, best.choice, site_parts, float("inf"), task.quickly)


def at_rates(task: SearchTask, smallest_bytes: float) -> Generator[tuple[str, Choice], None, bool]:
    """Plans at lower and lower prices of a byte.

    Returns True if programs got larger: no lower rate is tried after a few programs in a row that need more than the
    smallest so far, `smallest_bytes` to begin with: one alone says little, as those of plans that are counted alike
    differ by a third."""
    lean, larger = lean_plans(task.formulation), 0
    sizes: dict[Choice, float] = {}  # of programs
    for rate in RATES:
        with timed(task.log, "solving at prices of bytes"):
            choice = lean.at_rate(rate)
        if choice is None:
            return False
        solution = Solution(task.formulation.problem, choice, 0.0, task.solver)
        if choice not in sizes:
            yield f"{rate:g} % of a step for 1 % of memory", choice
            sizes[choice] = task.figures(solution).predicted_peak_bytes
        larger = larger + 1 if sizes[choice] > smallest_bytes else 0
        smallest_bytes = min(smallest_bytes, sizes[choice])
        if larger >= _IN_A_ROW:
            return True
    return larger > 0


def between(
    task: SearchTask, least_bytes: float, most_bytes: float, smallest_bytes: float = inf
) -> Generator[tuple[str, Choice], None, bool]:
    """Optima under limits in between: the program needs memory that the additive model does not know.

    Wider limits are not tried once a program needs more than `smallest_bytes`, which another one needs; returns True if
    one did. If least memory is the goal, seconds only break ties: good plans do, without a proof.
    """
    solve = task.quickly if task.level == MEMORY else task.solve
    for share in SHARES if least_bytes < most_bytes else ():
        target = least_bytes * (most_bytes / least_bytes) ** share
        try:
            solution = solve(replace(task.formulation.problem, capacity_bytes=target))
        except InfeasibleError:
            continue
        what = "optimum" if solution.status == OPTIMAL else "best found"
        yield f"{what} within {format_bytes(target, 3)}", solution.choice
        if smallest_bytes < inf and task.figures(solution).predicted_peak_bytes > smallest_bytes:
            return True
    return False
