"""What a search of whole steps finds: its plans, simulated by the costs of their blocks, and the bounds on all."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autoshard.search.objectives import MEMORY, RATIO, SPEED
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.solvers.common.result import fits
from autoshard.solvers.stages.stage_problem import StagePlan
from autoshard.whole_step_search.blocks.block_line import BlockLine
from autoshard.whole_step_search.blocks.block_pins import StepPins
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_overhead import overhead_of


@dataclass(frozen=True, eq=False)
class SolvedStep:
    """A plan of one outer choice and split, simulated by the costs of its blocks. Of one that was made a plan,
    `program_seconds` and `program_bytes` are of its program; 0 of others."""

    problem: StepProblem
    split: BlockSplit | None
    plan: StagePlan
    timeline: StepTimeline
    program_seconds: float = 0.0
    program_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def peak_bytes(self) -> float:
        """Peak of the fullest device, as of one that has the problem's capacity."""
        return self.problem.fullest_bytes(self.timeline.peak_bytes)

    @property
    def fits(self) -> bool:
        return fits(self.peak_bytes, self.problem.capacity_bytes)

    @cached_property
    def rest_seconds(self) -> float:
        """Communicated and done again."""
        return overhead_of(self.problem, self.plan)

    def value(self, level: int) -> float:
        """What a level minimises."""
        return {RATIO: lambda: self.rest_seconds, MEMORY: lambda: self.peak_bytes, SPEED: lambda: self.seconds}[level]()


@dataclass(frozen=True, eq=False)
class JointResult:
    """`best` of a level, and the best of every other outer choice that was simulated, the best first. `bound`: below
    what the level minimises, of every plan; at level 2 in any order. Counts: of outer choices with a split
    `considered` and `solved`; `fronts`, of searches of a split. `undivided`: (reason, how often).
    `limit_bytes`: what programs may hold, where their blocks were given less room (0: as much); the bound is of that
    limit. `pins`: that all plans keep.
    """

    level: int
    best: SolvedStep
    others: tuple[SolvedStep, ...]
    line: BlockLine
    bound: float
    considered: int
    solved: int
    undivided: tuple[tuple[str, int], ...]
    fronts: int = 0
    limit_bytes: float = 0.0
    pins: StepPins = field(default_factory=StepPins)

    @property
    def room_bytes(self) -> float:
        """Bytes of a device for a plan's own program."""
        return self.limit_bytes or self.best.problem.capacity_bytes

    @property
    def gap(self) -> float:
        """How far what the level minimises, by the costs of blocks, is above the bound, relative to it."""
        value = self.best.value(self.level)
        return value / self.bound - 1 if self.bound else 0.0 if value <= 0.0 else float("inf")
