"""Results of a search of whole steps: its plans, simulated by the costs of their blocks, and the bounds on all."""

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
    """Plan of one outer choice and split, simulated by the costs of its blocks. If it was made into a plan,
    `program_seconds` and `program_bytes` are of its program; else 0."""

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
        """Peak of the fullest device, scaled to a device with the problem's capacity."""
        return self.problem.fullest_bytes(self.timeline.peak_bytes)

    @property
    def fits(self) -> bool:
        return fits(self.peak_bytes, self.problem.capacity_bytes)

    @cached_property
    def overhead(self) -> float:
        """Seconds of communication, recomputation and replicated computation."""
        return overhead_of(self.problem, self.plan)

    def value(self, level: int) -> float:
        """Value of the step that the level minimises."""
        return {RATIO: lambda: self.overhead, MEMORY: lambda: self.peak_bytes, SPEED: lambda: self.seconds}[level]()


@dataclass(frozen=True, eq=False)
class JointResult:
    """`best` of a level, and the best of every other outer choice that was simulated, the best first. `bound`: lower
    bound on the level's value, of every plan; at level 2 in any order. Counts: outer choices with a split, `considered`
    and `solved`; `fronts`, searches of a split. `undivided`: (reason, how often). `limit_bytes`: limit for programs if
    their blocks had less room (0: the same); the bound is for that limit. `pins`: kept by all plans.
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
        """Gap between the level's value, by the costs of blocks, and the bound, relative to the bound."""
        value = self.best.value(self.level)
        return value / self.bound - 1 if self.bound else 0.0 if value <= 0.0 else float("inf")
