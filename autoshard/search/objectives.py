"""Objective of each level, which defines "best", and the bound that certifies it.

0 `ratio`   least communication + repeated work: a device's share of the unsharded work is a constant, so this is the
            most useful computation per unit of the rest
1 `memory`  smallest peak of a device; ties by seconds, nearly where tables are too large to be exact
2 `speed`   least seconds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from autoshard.errors import InfeasibleError, UsageError
from autoshard.formulation.cost_breakdown import Split
from autoshard.formulation.formulate import Formulation
from autoshard.ir.problem import Floats, Problem, objective
from autoshard.solvers.common.effort import CLOSE
from autoshard.solvers.common.result import Solution, fits, peak, proved, status
from autoshard.solvers.portfolio import FEW_CHOICES
from autoshard.solvers.relax.low_memory_plans import LowMemoryPlans, minimum_memory_bound
from autoshard.units import ROUNDING

NAMES = ("ratio", "memory", "speed")
RATIO, MEMORY, SPEED = range(3)
Solver = Callable[[Problem], Solution]
_RATIO: WeakKeyDictionary[Formulation, Problem] = WeakKeyDictionary()
_LEAN: WeakKeyDictionary[Formulation, LowMemoryPlans] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Levelled:
    """A solution of the additive problem, with what its level minimises and the bound on that; 0: none was proved.

    `solution.objective` and its bound are seconds of a step. `cut`: the search for it was stopped early.
    """

    solution: Solution
    objective: float
    bound: float
    cut: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", proved(self.objective, self.bound))

    @property
    def status(self) -> str:
        """Status of what the level minimises."""
        return status(self.objective, self.bound, self.cut)


def parse_level(text: str) -> int:
    """Level of its text: `0` or `ratio`, `1` or `memory`, `2` or `speed`."""
    if text in NAMES:
        return NAMES.index(text)
    if text in ("0", "1", "2"):
        return int(text)
    raise UsageError(f"unknown level {text!r}: expected 0 (ratio), 1 (memory) or 2 (speed)", "--level speed")


def solve_level(
    formulation: Formulation,
    level: int,
    capacity_bytes: float,
    solver: Solver,
    stop: Callable[[], bool] = lambda: False,
    quickly: bool = False,
) -> Levelled:
    """Best choice of a level within the capacity. `solver` minimises seconds within a problem's capacity; `quickly`:
    level 1 may do without, see `LowMemoryPlans`.

    Once `stop()` is true nothing better than the first plan found is searched for.
    """
    problem = replace(formulation.problem, capacity_bytes=capacity_bytes)
    if level == RATIO:
        return _least_ratio(formulation, problem, solver)
    if level == MEMORY:
        return smallest_memory(problem, solver, stop, lean_plans(formulation) if quickly else None)
    solution = solver(problem)
    return Levelled(solution, solution.objective, solution.lower_bound, solution.cut)


def level_value(formulation: Formulation, level: int, choice: Sequence[int]) -> float:
    """Value of a choice that the level minimises: seconds (levels 0 and 2) or bytes (level 1)."""
    if level == MEMORY:
        return peak(formulation.problem, choice)
    return objective(ratio_problem(formulation) if level == RATIO else formulation.problem, choice)


def ratio_problem(formulation: Formulation) -> Problem:
    """Problem with the same choices, each at its communication and repeated work; made once for a formulation."""
    if formulation not in _RATIO:
        _RATIO[formulation] = _ratio_problem(formulation)
    return _RATIO[formulation]


def _ratio_problem(formulation: Formulation) -> Problem:
    split = Split(formulation)
    shared: dict[tuple[int, int], Floats] = {}
    nodes = []
    for n, node in enumerate(formulation.problem.nodes):
        computed, repeated = split.seconds(n)
        key = (id(node.seconds), id(computed))
        if key not in shared:
            shared[key] = np.maximum(node.seconds - computed, 0.0) + repeated
        nodes.append(replace(node, seconds=shared[key]))
    return replace(formulation.problem, nodes=tuple(nodes))


def lean_plans(formulation: Formulation) -> LowMemoryPlans:
    """Plans of little memory, and the bound on it; made once for a formulation."""
    if formulation not in _LEAN:
        _LEAN[formulation] = LowMemoryPlans(formulation.problem)
    return _LEAN[formulation]


def _least_ratio(formulation: Formulation, problem: Problem, solver: Solver) -> Levelled:
    ratio = replace(ratio_problem(formulation), capacity_bytes=problem.capacity_bytes)
    solution = solver(ratio)
    in_seconds = Solution(problem, solution.choice, 0.0, solution.solver, solution.seconds)
    return Levelled(in_seconds, solution.objective, solution.lower_bound, solution.cut)


def smallest_memory(
    problem: Problem, solver: Solver, stop: Callable[[], bool] = lambda: False, lean: LowMemoryPlans | None = None
) -> Levelled:
    """Halves the range between the bound and the smallest peak found, then takes the fastest plan at that peak; or of
    the plans `lean`, if passed, one at the bound if they meet it. If choices are many, one near it is enough."""
    bound = lean.bound if lean is not None else minimum_memory_bound(problem)
    roughly = sum(len(node.seconds) for node in problem.nodes) > FEW_CHOICES
    leanest = lean.at_bound(roughly=roughly) if lean is not None else None
    if leanest is not None and fits(peak(problem, leanest), problem.capacity_bytes):
        met = Solution(problem, leanest, 0.0, "auto")
        return Levelled(met, met.peak_bytes, bound)
    low = bound
    best = _within(problem, bound, solver) if fits(bound, problem.capacity_bytes) else None
    cut = False
    if best is None:
        best = solver(problem)
        while best.peak_bytes > low * (1 + CLOSE):
            if stop():
                cut = True
                break
            middle = (low + best.peak_bytes) / 2
            solution = _within(problem, middle, solver)
            best, low = (solution, low) if solution else (best, middle)
        best = min(best, _within(problem, best.peak_bytes, solver) or best, key=lambda s: (s.peak_bytes, s.objective))
    in_seconds = Solution(problem, best.choice, 0.0, best.solver, best.seconds)  # its bound is of a tighter limit
    return Levelled(in_seconds, best.peak_bytes, bound, cut or best.cut)


def _within(problem: Problem, capacity_bytes: float, solver: Solver) -> Solution | None:
    try:
        return solver(replace(problem, capacity_bytes=capacity_bytes * (1 + ROUNDING)))
    except InfeasibleError:
        return None
