"""The best plan of a problem so far and the best bound: what a search leaves behind whenever it is stopped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Problem, memory, objective
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import fits, proved, tightened
from autoshard.units import ROUNDING


class Incumbent:
    """`bound` only rises, and `value`, that of `choice`, only falls. Raises FalseProof where a plan is below a bound.

    `near`: the best of the plans that overflow, by its seconds.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choice: Choice | None = None
        self.near: Choice | None = None
        self.value = self.near_value = math.inf
        self.bound = 0.0
        self.error: InfeasibleError | None = None

    @property
    def closed(self) -> bool:
        return math.isfinite(self.value) and self.value - self.bound <= ROUNDING * self.value

    @property
    def gap(self) -> float:
        """Relative to the value; inf where there is no plan."""
        return (self.value - self.bound) / self.value if 0 < self.value < math.inf else 0.0 if self.closed else math.inf

    def failed(self, error: InfeasibleError) -> None:
        """Records that a method found no plan; re-raises the error if infeasibility is proved."""
        if error.proven:
            raise error
        self.error = error

    def offer(self, choice: Sequence[int] | None) -> bool:
        """Take a plan if it is allowed, fits and is better; True if it is allowed and fits."""
        if choice is None:
            return False
        value = objective(self.problem, choice)
        if not math.isfinite(value):
            return False
        if not fits(memory(self.problem, choice).max(initial=0.0), self.problem.capacity_bytes):
            if value < self.near_value:
                self.near, self.near_value = tuple(choice), value
            return False
        if value < self.value:
            proved(value, self.bound)
            self.choice, self.value = tuple(int(s) for s in choice), value
        return True

    def raise_bound(self, bound: float) -> None:
        """`bound` holds for all plans that fit, or for all plans."""
        self.bound = tightened(self.bound, bound, self.value)
