"""Solvers of the strategy-selection problem: `solve(problem, solver) -> Solution`. Without torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from autoshard.errors import NAMED, InfeasibleError, UsageError
from autoshard.ir.problem import Problem
from autoshard.solvers import portfolio
from autoshard.solvers.common.effort import BUDGET_ENTRIES
from autoshard.solvers.common.infeasibility import least, short
from autoshard.solvers.common.restrict import original, restricted
from autoshard.solvers.common.result import FalseProof, Solution, fits, none_within
from autoshard.solvers.common.solver_options import Clock, Options, PartialClock
from autoshard.solvers.common.validate import check, check_pins
from autoshard.units import ROUNDING

__all__ = ["SOLVERS", "Clock", "Options", "check_names", "solve"]


def _module(name: str) -> Callable[[Problem, Options], Solution]:
    """`solve` of a module that is read when it is asked for."""
    return lambda problem, options: import_module(f"autoshard.solvers.{name}").solve(problem, options)


SOLVERS: dict[str, Callable[[Problem, Options], Solution]] = {
    "auto": portfolio.auto,
    "dp": lambda problem, options: portfolio.solve(
        problem,
        budget_entries=options.budget_entries or BUDGET_ENTRIES,
        clock=options.clock,
        rough=options.rough,
        unfit=options.unfit,
    ),
    "ilp": _module("ilp.branch_and_bound"),
    "propagation": _module("heuristics.propagation"),
    "recursive": _module("heuristics.bisection"),
    "exhaustive": lambda problem, options: _exhaustive(problem),
}


def _exhaustive(problem: Problem) -> Solution:
    from autoshard.solvers.heuristics import brute_force

    return brute_force.solve(problem)


def check_names(solver: str, engine: str | None = None) -> None:
    """UsageError that lists the solvers where this is none of them, or the engines where ilp does not have this one."""
    if solver not in SOLVERS:
        near = difflib.get_close_matches(solver, SOLVERS, 1) or ["auto"]
        known = ", ".join(sorted(SOLVERS))
        raise UsageError(f"unknown solver {solver!r}: expected one of {known}", f"--solver {near[0]}")
    if solver == "ilp" and engine not in (None, "highs"):
        from autoshard.solvers.ilp import pulp_engine

        pulp_engine.maker(str(engine))


def solve(problem: Problem, solver: str = "auto", options: Options | None = None) -> Solution:
    """Solve the problem; pins (`options.pinned`) hold in every solver.

    Raises UsageError that lists the known solvers or names what is wrong with the problem, InfeasibleError where no
    plan exists or fits.
    """
    options = options or Options()
    check_names(solver)
    check(problem)
    check_pins(problem, options.pinned)
    pinned, clock = dict(options.pinned), PartialClock(options.clock.left, whole=options.clock)
    small = restricted(problem, pinned)
    needed = least(small).bytes if math.isfinite(small.capacity_bytes) else 0.0
    try:
        if none_within(needed, small.capacity_bytes):  # which no search has to find
            raise short(small, needed - small.capacity_bytes)
        solution = SOLVERS[solver](small, replace(options, pinned=dict.fromkeys(pinned, 0), clock=clock))
    except InfeasibleError as error:
        from autoshard.solvers.refutation import checked  # what few answers need is not read for each

        claim = checked(small, error, solver, options.clock)
        if not pinned:
            raise claim from error
        names = [problem.nodes[n].name for n in sorted(pinned)]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        said = f"{claim.message} (pinned: {', '.join(names[:NAMED])}{more})"
        raise InfeasibleError(said, claim.hint or "without some of the pins", proven=claim.proven) from error
    answer = audited(problem, original(solution.choice, pinned), solution, clock.cut)
    options.clock.cut |= answer.cut
    return answer


def audited(problem: Problem, choice: tuple[int, ...], solution: Solution, cut: bool) -> Solution:
    """Solution of `choice`, checked against the problem's own arrays. Raises FalseProof if the solver's is false."""
    answer = Solution(problem, choice, solution.lower_bound, solution.solver, solution.seconds, cut)
    if abs(answer.objective - solution.objective) > ROUNDING * answer.objective:
        raise FalseProof(f"{solution.solver}: a plan of {answer.objective!r}, reported as {solution.objective!r}")
    if not fits(answer.peak_bytes, problem.capacity_bytes):
        raise FalseProof(f"{solution.solver}: {answer.peak_bytes} bytes, with a capacity of {problem.capacity_bytes}")
    return answer
