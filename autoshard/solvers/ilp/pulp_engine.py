"""The linear program through PuLP, for users with a solver of their own: `--ilp-engine pulp:CBC`, `pulp:GUROBI`.

PuLP's `status` is "Optimal" where a time limit stopped a solver; `sol_status` distinguishes the two, and is read. A
solver's own bound does not come back through PuLP: unless it reports that its solution is optimal, the bound reported
is that of dp's start.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from autoshard.errors import UsageError
from autoshard.ir.problem import Floats, Problem, memory, objective
from autoshard.solvers.common.clock import watched
from autoshard.solvers.common.effort import MOST_ROUNDS
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import Solution, finish, fits
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.solvers.ilp import warm_start
from autoshard.solvers.linear_program.memory_constraints import MemoryRows
from autoshard.solvers.linear_program.rows import SCALED_TOTAL, Linear, Rows, linear
from autoshard.solvers.relax.memory_columns import condensed
from autoshard.solvers.relax.memory_presolve import infeasible, overflows, starting_plan, worth_keeping
from autoshard.solvers.relax.trws_layouts import message_bound

# What a user says -> PuLP's names for it, the first that is available is used.
_NAMES = {
    "CBC": ("PULP_CBC_CMD", "COIN_CMD"),
    "GUROBI": ("GUROBI", "GUROBI_CMD"),
    "CPLEX": ("CPLEX_PY", "CPLEX_CMD"),
    "SCIP": ("SCIP_PY", "SCIP_CMD", "FSCIP_CMD"),
    "HIGHS": ("HiGHS", "HiGHS_CMD"),
    "GLPK": ("GLPK_CMD",),
    "XPRESS": ("XPRESS_PY", "XPRESS"),
    "MOSEK": ("MOSEK",),
    "COPT": ("COPT", "COPT_CMD"),
}


def solve(problem: Problem, options: Options) -> Solution:
    """The fastest plan within the capacity, by the solver that `options.engine` names.

    Raises UsageError that lists the solvers that are there, InfeasibleError where no plan fits or none was found.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces what PuLP 4, outside our range, renames
        return _solve(problem, options)


def _solve(problem: Problem, options: Options) -> Solution:
    started = time.perf_counter()
    make = maker(options.engine)
    small = condensed(problem)
    with watched(options.clock):
        best, known, _ = starting_plan(small, options)
    best = warm_start.plan(small) if best is None and options.clock.cut else best
    value = objective(problem, best) if best is not None else math.inf
    program = _PulpProgram(small, value)
    for _ in range(MOST_ROUNDS):
        x, proven = program.solve(make, options.clock, best)
        if x is None:
            if best is None:
                raise infeasible(problem, proven=proven)
            break
        choice = program.model.picked(x)
        over = overflows(small, memory(small, choice), program.memory.times)
        if not over:
            within = fits(memory(small, choice).max(initial=0.0), small.capacity_bytes)
            if within and objective(small, choice) <= value:
                best, value = choice, objective(small, choice)
            proven = proven and within
            break
        program.add(program.memory.rows(over))
        proven = False
        if options.clock.over:
            break
    if best is None:
        raise infeasible(problem, proven=False)
    return finish(problem, best, value if proven else min(value, max(known, message_bound(problem))), "ilp", started)


def available() -> list[str]:
    """Names that may follow "pulp:" here: solvers that are installed."""
    import pulp

    there = set(pulp.listSolvers(onlyAvailable=True))
    return [name for name, known in _NAMES.items() if there.intersection(known)]


def maker(engine: str) -> Callable[..., Any]:
    """A function of (time limit in seconds) that makes PuLP's solver. Raises UsageError."""
    import pulp

    kind, _, name = engine.partition(":")
    here = available()
    known = _NAMES.get(name.upper() or "CBC")
    if kind != "pulp" or known is None or (name.upper() or "CBC") not in here:
        engines = ", ".join(["highs", *(f"pulp:{n}" for n in here)])
        reason = "is not installed" if known is not None and kind == "pulp" else "is not known"
        raise UsageError(f"the ilp engine {engine!r} {reason}: available here are {engines}", "--ilp-engine highs")
    first = next(n for n in known if n in pulp.listSolvers(onlyAvailable=True))
    accepted = inspect.signature(type(pulp.getSolver(first)).__init__).parameters

    def make(seconds: float, start: bool) -> Any:
        wanted = {"msg": False, "gapRel": 0.0, "threads": 1, "warmStart": start, "timeMode": "cpu"}
        if math.isfinite(seconds):
            wanted["timeLimit"] = seconds
        return pulp.getSolver(first, **{key: x for key, x in wanted.items() if key in accepted})

    return make


class _PulpProgram:
    """A `Linear` in PuLP's objects; rows are added to it."""

    def __init__(self, problem: Problem, value: float) -> None:
        import pulp

        self.model: Linear = linear(problem, worth_keeping(problem))
        self.memory = MemoryRows(problem, self.model, len(self.model.cost))
        cost = self.model.cost * (
            SCALED_TOTAL / value if 0 < value < math.inf else SCALED_TOTAL / max(1e-30, self.model.cost.max())
        )
        self.columns = self._columns(0, self.model.choices, "Integer")
        self.columns += self._columns(self.model.choices, len(cost), "Continuous")
        self.program = pulp.LpProblem("autoshard", pulp.LpMinimize)
        self.program += pulp.LpAffineExpression(zip(self.columns, cost.tolist(), strict=True))
        self.rows(self.model.rows)

    def _columns(self, low: int, high: int, kind: str) -> list[Any]:
        import pulp

        return [pulp.LpVariable(f"x{j}", 0, 1, kind) for j in range(low, high)]

    def add(self, more: Rows) -> None:
        self.columns += self._columns(len(self.columns), len(self.columns) + more.columns, "Continuous")
        self.model = self.model.extended(more)
        self.rows(more)

    def rows(self, rows: Rows) -> None:
        import pulp

        entries = rows.entries.tolist()
        for a, b, low, high in zip(rows.starts[:-1], rows.starts[1:], rows.lower, rows.upper, strict=True):
            terms = [(self.columns[j], x) for j, x in zip(rows.indices[a:b], entries[a:b], strict=True)]
            sense = (
                pulp.LpConstraintEQ if low == high else pulp.LpConstraintGE if high == np.inf else pulp.LpConstraintLE
            )
            bound = float(high) if sense == pulp.LpConstraintLE else float(low)
            self.program += pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=bound)

    def solve(self, make: Callable[..., Any], clock: Clock, start: Choice | None) -> tuple[Floats | None, bool]:
        """Integer columns, None without a solution; and True if the solver reports that it is proven."""
        import pulp

        if start is not None:
            chosen = set(self.model.columns_of(start).tolist())
            for j in range(self.model.choices):
                self.columns[j].setInitialValue(float(j in chosen))
        self.program.solve(make(clock.left, start is not None))
        said = self.program.sol_status
        if said not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None, said == pulp.LpSolutionInfeasible
        values = [column.varValue or 0.0 for column in self.columns[: self.model.choices]]
        return np.array(values), said == pulp.LpSolutionOptimal
