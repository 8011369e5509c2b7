"""HiGHS behind a few functions: one instance that holds a `Linear`, is relaxed, extended by rows, and made integer.

highspy is imported where it is used: it takes longer to load than small problems to solve.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common.clock import Pace
from autoshard.solvers.common.effort import CLOSE
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.linear_program.rows import SCALED_TOTAL, Linear, Rows

_PATIENT = 2000  # nodes of the tree after which a small gap is not worth more


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A vertex of the relaxation, a bound that holds whatever its rounding, and what each column costs beyond it."""

    bound: float
    x: Floats
    reduced: Floats


@dataclass(frozen=True, eq=False)
class Searched:
    """`x` is None where no integer solution was found. `done`: the search tree is exhausted to within `enough`."""

    x: Floats | None
    bound: float
    done: bool


class Highs:
    """`typical`: about what the objective will be, in seconds; the scale of everything that HiGHS sees. `pace`: of two
    steps, begun before the model was written. HiGHS does not look at the clock while it takes in a program, nor while
    it begins to solve it, and each lasts longer than all before."""

    def __init__(self, model: Linear, clock: Clock, typical: float, pace: Pace) -> None:
        pace.step(1)
        import highspy

        self.model, self.clock = model, clock
        self.infeasible = False  # the relaxation, as HiGHS proved
        self.scale = SCALED_TOTAL / typical if typical > 0 else 1.0
        make: Any = highspy.Highs
        self.solver = make()
        for name, setting in (
            ("output_flag", False),
            ("threads", 1),
            ("parallel", "off"),
            ("mip_feasibility_tolerance", 1e-9),
        ):
            self.solver.setOptionValue(name, setting)
        count, rows = len(model.cost), model.rows
        whole = np.zeros(count, np.int32)
        self.solver.passModel(
            count, len(rows.lower), len(rows.entries), 2, 1, 0.0, model.cost * self.scale, np.zeros(count),
            np.ones(count), rows.lower, rows.upper, rows.starts[:-1].astype(np.int32), rows.indices.astype(np.int32),
            rows.entries, whole,
        )  # fmt: skip
        self.solver.setCallback(self._called, None)
        kinds = highspy.cb.HighsCallbackType
        for kind in (kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt, kinds.kCallbackIpmInterrupt):
            self.solver.startCallback(kind)
        pace.step(1)

    def _called(self, kind: Any, message: str, out: Any, answer: Any, data: object) -> None:
        small = out.mip_node_count > _PATIENT and out.mip_gap <= CLOSE
        answer.user_interrupt = small or self.clock.over

    def add(self, more: Rows) -> None:
        count = more.columns
        none = np.zeros(0)
        if count:
            empty = np.zeros(0, np.int32)
            starts = np.zeros(count, np.int32)
            self.solver.addCols(count, np.zeros(count), np.zeros(count), np.ones(count), 0, starts, empty, none)
        starts, indices = more.starts[:-1].astype(np.int32), more.indices.astype(np.int32)
        rows = len(more.lower), more.lower, more.upper, len(more.entries), starts, indices, more.entries
        assert self.solver.addRows(*rows).name != "kError", "rows that HiGHS does not take"
        self.model = self.model.extended(more)

    def exclude(self, columns: Integers) -> None:
        """No solution may have all of these columns at 1."""
        starts = np.array([0, len(columns)])
        self.add(Rows(0, starts, columns, np.ones(len(columns)), np.array([-np.inf]), np.array([len(columns) - 1.0])))

    def relax(self) -> Relaxed | None:
        """Solves the relaxation, from the last basis where there is one; None where it is infeasible or time is out."""
        import highspy

        self._limit()
        self.solver.setOptionValue("presolve", "off")  # on these programs it takes longer than what it saves
        self.solver.run()
        status = self.solver.getModelStatus()
        solution = self.solver.getSolution()
        self.infeasible = status == highspy.HighsModelStatus.kInfeasible
        if self.infeasible or (status != highspy.HighsModelStatus.kOptimal and not solution.dual_valid):
            return None
        return self._relaxed(np.array(solution.row_dual), np.array(solution.col_value))

    def _relaxed(self, duals: Floats, x: Floats) -> Relaxed:
        from scipy.sparse import csr_matrix

        model, rows = self.model, self.model.rows
        y = np.where(np.isneginf(rows.lower), np.minimum(duals, 0.0), duals)
        y = np.where(np.isposinf(rows.upper), np.maximum(y, 0.0), y)
        matrix = csr_matrix((rows.entries, rows.indices, rows.starts), shape=(len(rows.lower), len(model.cost)))
        reduced = model.cost * self.scale - matrix.T @ y
        ends = np.where(y > 0, rows.lower, rows.upper)
        bound = float((y * np.where(y == 0, 0.0, ends)).sum() + np.minimum(reduced, 0.0).sum())
        return Relaxed(bound / self.scale, x, reduced / self.scale)

    def integer(self, start: Integers | None, nodes: int, enough: float) -> Searched:
        """Branch and bound, from the columns `start`, until the relative gap is `enough` or `nodes` are done."""
        import highspy

        count = self.model.choices
        kind = np.full(count, int(highspy.HighsVarType.kInteger), np.uint8)
        self.solver.changeColsIntegrality(count, np.arange(count, dtype=np.int32), kind)
        settings = (("presolve", "on"), ("mip_rel_gap", enough), ("mip_abs_gap", 1e-7), ("mip_max_nodes", nodes))
        for name, setting in settings:
            self.solver.setOptionValue(name, setting)
        if start is not None:
            values = np.zeros(count)
            values[start] = 1.0
            self.solver.setSolution(count, np.arange(count, dtype=np.int32), values)
        self._limit()
        self.solver.run()
        status, info = self.solver.getModelStatus(), self.solver.getInfo()
        done = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
        feasible = info.primal_solution_status == 2  # kSolutionStatusFeasible
        x = np.array(self.solver.getSolution().col_value) if feasible else None
        return Searched(x, float(info.mip_dual_bound) / self.scale, done)

    def _limit(self) -> None:
        wall = self.clock.left if self.clock.timer is time.perf_counter else math.inf  # HiGHS knows wall time only
        self.solver.setOptionValue("time_limit", self.solver.getRunTime() + wall)
