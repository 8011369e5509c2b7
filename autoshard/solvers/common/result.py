"""Plan with what is proved of it. Figures, bound and status are made here and nowhere else: from the problem's own
arrays, the choice itself, and a proved finite bound."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace

from autoshard.ir.plan import Certificate
from autoshard.ir.problem import Problem, memory, objective
from autoshard.units import EXACT, ROUNDING

WRONG = 1e-6  # relative: a bound that is further above a plan than this (tolerances of HiGHS) is none
OPTIMAL, FEASIBLE, CUT_SHORT = "optimal", "feasible", "cut short"


class FalseProof(AssertionError):
    """A bound above a plan that it should hold for: a bug of a solver, reported before anyone believes it."""


def proved(value: float, bound: float) -> float:
    """`bound` on what is at least 0, as it may stand next to a plan's `value`: equal to it up to rounding.

    0, the trivial bound, where none was proved (minus infinity). Raises FalseProof where it is above the value.
    """
    if not math.isfinite(value) or value < 0:
        raise FalseProof(f"a plan's value is {value}: expected a finite one of 0 or more")
    if math.isnan(bound) or bound - value > WRONG * value + EXACT:
        raise FalseProof(f"a lower bound of {bound!r} stands above a plan of {value!r}")
    known = max(bound, 0.0)
    return value if value - known <= ROUNDING * value else known


def fits(size: float, limit: float) -> bool:
    """True if `size` bytes are within `limit`, up to the rounding of sums of parts of bytes."""
    return size <= limit * (1 + EXACT)


def none_within(least: float, limit: float, best: float = math.inf) -> bool:
    """True if `least` bytes, proved of every plan up to rounding, show that no plan is within `limit`. `best`: the
    least that a plan met so far needs. Raises FalseProof if that is below `least`."""
    if math.isfinite(best):
        proved(best, least)
    return math.isfinite(least) and least > limit * (1 + ROUNDING)


def tightened(bound: float, other: float, value: float) -> float:
    """The better of two bounds, `value` being that of the best plan so far. Raises FalseProof where one is above it."""
    if math.isfinite(value):
        proved(value, other)
    return max(bound, min(other, value))


def status(value: float, bound: float, cut: bool) -> str:
    """Status of a plan; `bound` is from `proved`. What the bound proves stays proved where the clock ended the rest."""
    return OPTIMAL if value == bound else CUT_SHORT if cut else FEASIBLE


def without_proof(certificate: Certificate, objective: float, seconds: float | None = None) -> Certificate:
    """The certificate of a plan without a proof: what its level minimises is `objective`, its sum of costs
    `seconds` (None: as before)."""
    proved(objective, 0.0)
    total = certificate.objective_seconds if seconds is None else seconds
    return Certificate(certificate.solver, FEASIBLE, total, 0.0, objective)


def within_wider(certificate: Certificate, whatever_memory: bool) -> Certificate:
    """Rest of a certificate from a tighter memory limit that holds within a wider one; `whatever_memory`: the level's
    bound is one of plans of any memory."""
    left = replace(certificate, lower_bound_seconds=0.0)
    if whatever_memory:
        return left
    return replace(left, level_bound=0.0, status=FEASIBLE if left.status == OPTIMAL else left.status)


@dataclass(frozen=True, eq=False)
class Solution:
    """`choice[n]` of every node of `problem`, with its objective and peak, which are always recomputed.

    `lower_bound` <= the optimum's objective; gap = objective / lower_bound - 1. `seconds`: that the solver took. `cut`:
    it would have gone on.
    """

    problem: InitVar[Problem]  # so that dataclasses.replace can't give a proof to another plan
    choice: tuple[int, ...]
    lower_bound: float
    solver: str
    seconds: float = 0.0
    cut: bool = False
    objective: float = field(init=False)
    peak_bytes: float = field(init=False)

    def __post_init__(self, problem: Problem) -> None:
        total = objective(problem, self.choice)
        bound = proved(total, self.lower_bound)
        known = {"objective": total, "lower_bound": bound, "peak_bytes": peak(problem, self.choice)}
        for name, value in {**known, "cut": self.cut and bound < total}.items():
            object.__setattr__(self, name, value)

    @property
    def status(self) -> str:
        """Optimal: the objective equals the bound; feasible: there is a gap; cut short: a gap, and time was over."""
        return status(self.objective, self.lower_bound, self.cut)


def finish(
    problem: Problem, choice: Sequence[int], lower_bound: float, solver: str, started: float, *, cut: bool = False
) -> Solution:
    """`started` is a time.perf_counter(). Raises FalseProof where the choice is forbidden or the bound above it."""
    picked = tuple(int(s) for s in choice)
    return Solution(problem, picked, lower_bound, solver, time.perf_counter() - started, cut)


def peak(problem: Problem, choice: Sequence[int]) -> float:
    """The most bytes alive at any time; 0 for an empty horizon."""
    return float(memory(problem, choice).max(initial=0.0))
