"""Every plan and every bound met of a problem, each checked against all of the other kind: a bound holds for all plans.

A plan that fits a limit is one of the problem with that limit, whoever found it and under whatever other limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from autoshard.ir.problem import Node, Problem, Value
from autoshard.solvers.common.result import WRONG, FalseProof, Solution, fits
from autoshard.units import EXACT


class _Bound(NamedTuple):
    capacity_bytes: float
    objective: float
    solver: str


class _Plan(NamedTuple):
    peak_bytes: float
    objective: float


@dataclass
class _Known:
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    plans: list[_Plan] = field(default_factory=list)
    bounds: list[_Bound] = field(default_factory=list)


class SeenPlans:
    """Solutions of problems; those that share nodes and values are one, whatever their limits."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Known] = {}

    def add(self, problem: Problem, solution: Solution) -> None:
        """Raises FalseProof where its bound is above a plan met before, or a bound met before above its plan."""
        of = self._of(problem)
        plan = _Plan(solution.peak_bytes, solution.objective)
        bound = _Bound(problem.capacity_bytes, solution.lower_bound, solution.solver)
        for other in (*of.bounds, bound):
            _check(other, plan)
        for met in of.plans:
            _check(bound, met)
        of.plans.append(plan)
        of.bounds.append(bound)

    def bound(self, problem: Problem, capacity_bytes: float) -> float:
        """Bound proved of all plans within a capacity, also if under a larger one; 0 if none was."""
        bounds = self._of(problem).bounds
        return max((b.objective for b in bounds if b.capacity_bytes >= capacity_bytes), default=0.0)

    def _of(self, problem: Problem) -> _Known:
        key = id(problem.nodes), id(problem.values)
        return self._known.setdefault(key, _Known(problem.nodes, problem.values))


def _check(bound: _Bound, plan: _Plan) -> None:
    if fits(plan.peak_bytes, bound.capacity_bytes) and bound.objective > plan.objective * (1 + WRONG) + EXACT:
        said, objective = bound.objective, plan.objective
        raise FalseProof(f"{bound.solver}: a lower bound of {said!r} stands above a plan of {objective!r}")
