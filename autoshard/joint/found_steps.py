"""What a search of whole steps finds: its plans, simulated by the costs of their blocks, and the bounds on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from autoshard.joint.block_line import BlockLine
from autoshard.joint.block_splits import BlockSplit
from autoshard.joint.outer_space import OuterChoice
from autoshard.joint.step_costs import StepProblem
from autoshard.search.objectives import MEMORY, SPEED
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.solvers.stages.stage_partition import StageSolution
from autoshard.solvers.stages.stage_problem import StagePlan
from autoshard.units import format_bytes

TOLERANCE = 1e-3  # of the closed form: what the search over the slowest stage may leave
SIMULATED = 2  # plans of one stage problem
REPAIRS = 6  # of a plan whose simulated step needs more memory than its stages were given


@dataclass(frozen=True, eq=False)
class StepFound:
    """A plan of one outer choice and split, simulated by the costs of its blocks. `solution` has its bounds. Of one
    that was made a plan, `program_seconds` and `program_bytes` are of its program; 0 of others."""

    problem: StepProblem
    split: BlockSplit | None
    plan: StagePlan
    solution: StageSolution
    timeline: StepTimeline
    program_seconds: float = 0.0
    program_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def peak_bytes(self) -> float:
        return max(self.timeline.peak_bytes)


@dataclass(frozen=True, eq=False)
class JointResult:
    """`best`, and the best of every other outer choice that was simulated, fastest first. `left`: (choice, reason).

    `bound_seconds`: below the step of every plan, in any order. `model_seconds` and `model_bound`: the least closed
    form found, and below that of every plan; at level 1 these are not known, and `bound_bytes` is below what any
    plan's fullest device holds. Counts: of outer choices with a split `considered`, `solved`, `fitting`.
    """

    best: StepFound
    others: tuple[StepFound, ...]
    line: BlockLine
    bound_seconds: float
    model_seconds: float
    model_bound: float
    considered: int
    solved: int
    fitting: int
    fronts: int
    undivided: tuple[tuple[str, int], ...]
    level: int = SPEED
    bound_bytes: float = 0.0

    @property
    def gap(self) -> float:
        """Of the simulated step to any plan in any order, both by the costs of blocks, relative to the bound; at level
        1 of the fullest device's memory."""
        if self.level == MEMORY:
            return self.best.peak_bytes / self.bound_bytes - 1
        return self.best.seconds / self.bound_seconds - 1

    @property
    def model_gap(self) -> float:
        return self.model_seconds / self.model_bound - 1


Rank = Callable[[StepFound], tuple[float, float]]


def best_of_each(found: Iterable[StepFound], rank: Rank) -> list[StepFound]:
    """The best split of every outer choice, the best choice first."""
    each: dict[OuterChoice, StepFound] = {}
    for own in sorted(found, key=rank):
        each.setdefault(own.problem.choice, own)
    return list(each.values())


def fastest_of_each(found: Iterable[StepFound]) -> list[StepFound]:
    """The best split of every outer choice, the fastest choice first; of equal ones the leaner."""
    return best_of_each(found, lambda own: (own.seconds, own.peak_bytes))


def none_fits(problems: list[StepProblem]) -> tuple[str, str]:
    """How much the leanest stage needs."""
    least = np.inf
    for problem in problems:
        own = problem.stage_problem
        whole = sum(
            float((front.static_bytes + own.live[-1] * front.kept_bytes).min())
            for front in (own.fronts[kind] for kind in own.line)
        )
        least = min(least, whole / own.stages + problem.capacity_bytes - float(own.capacity_bytes.max()))
    room = format_bytes(problems[0].capacity_bytes)
    told = f"none of {len(problems)} ways to train fits: even shares of the leanest need {format_bytes(least)} a device"
    return f"{told}, {room} may be used", "more devices, ZeRO 3, full recomputation, or a smaller batch"
