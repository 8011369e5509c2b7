"""What a search of whole steps finds: its plans, simulated by the costs of their blocks, and the bounds on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, log2

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.mesh import Mesh
from autoshard.search.objectives import MEMORY, RATIO, SPEED
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.solvers.common.effort import LOOSE
from autoshard.solvers.common.result import none_within
from autoshard.solvers.stages.one_stage import RunningBlock, fastest_points, least_peak
from autoshard.solvers.stages.room_bound import RoomBound
from autoshard.solvers.stages.stage_partition import StageSolution, solve_stages
from autoshard.solvers.stages.stage_problem import Front, Part, StagePlan, closed_form
from autoshard.units import EXACT, format_bytes
from autoshard.whole_step_search.blocks.block_line import BlockLine
from autoshard.whole_step_search.blocks.block_pins import StepPins
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.config_space import ParallelConfig
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_overhead import overhead_of

SIMULATED = 2  # plans of one stage problem


@dataclass(frozen=True, eq=False)
class SolvedStep:
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
        """Peak of the fullest device, as of one that has the problem's capacity."""
        return self.problem.fullest_bytes(self.timeline.peak_bytes)

    @cached_property
    def rest_seconds(self) -> float:
        """What level 0 minimises."""
        return overhead_of(self.problem, self.plan)


@dataclass(frozen=True, eq=False)
class JointResult:
    """`best`, and the best of every other outer choice that was simulated, fastest first. `left`: (choice, reason).

    `bound_seconds`: below the step of every plan, in any order. `model_seconds` and `model_bound`: the least closed
    form found, and below that of every plan; at levels 0 and 1 these are not known: `bound_bytes` is below what any
    plan's fullest device holds, `bound_rest_seconds` below what any communicates and does again. Counts: of outer
    choices with a split `considered`, `solved`, `fitting`. `limit_bytes`: what programs may hold, where their blocks
    were given less room (0: as much); the bounds are of that limit.
    `pins`: that all plans keep.
    """

    best: SolvedStep
    others: tuple[SolvedStep, ...]
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
    bound_rest_seconds: float = 0.0
    limit_bytes: float = 0.0
    pins: StepPins = field(default_factory=StepPins)

    @property
    def room_bytes(self) -> float:
        """Bytes of a device for a plan's own program."""
        return self.limit_bytes or self.best.problem.capacity_bytes

    def of_wider(self, first: JointResult) -> JointResult:
        """With the bounds of `first`, a search of the same plans within more."""
        bounds = ("bound_seconds", "model_bound", "bound_bytes", "bound_rest_seconds")
        return replace(self, **{name: getattr(first, name) for name in bounds})

    @property
    def gap(self) -> float:
        """Gap of the simulated step to any plan in any order, both by the costs of blocks, relative to the bound; at
        level 1 of the fullest device's memory, at level 0 of what is communicated and done again."""
        if self.level == MEMORY:
            return self.best.peak_bytes / self.bound_bytes - 1
        if self.level == RATIO:
            own, least = self.best.rest_seconds, self.bound_rest_seconds
            return own / least - 1 if least else 0.0 if own <= 0.0 else float("inf")
        return self.best.seconds / self.bound_seconds - 1

    @property
    def model_gap(self) -> float:
        return self.model_seconds / self.model_bound - 1


Rank = Callable[[SolvedStep], tuple[float, float]]


def best_of_each(found: Iterable[SolvedStep], rank: Rank) -> list[SolvedStep]:
    """The best split of every outer choice, the best choice first."""
    each: dict[ParallelConfig, SolvedStep] = {}
    for own in sorted(found, key=rank):
        each.setdefault(own.problem.choice, own)
    return list(each.values())


def fastest_of_each(found: Iterable[SolvedStep]) -> list[SolvedStep]:
    """The best split of every outer choice, the fastest choice first; of equal ones the leaner."""
    return best_of_each(found, lambda own: (own.seconds, own.peak_bytes))


def none_fits(problems: list[StepProblem]) -> InfeasibleError:
    """How much the leanest stage needs: that none fits is said where that is more than there is, of costs of blocks; of
    their programs nothing is proven."""
    least = np.inf
    for problem in problems:
        own = problem.bounding
        sizes = own.point_bytes(own.stages - 1)
        whole = sum(float(sizes[kind].min()) for kind in own.line)
        rooms = problem.capacities
        each = (whole / own.stages + float((rooms - own.capacity_bytes).min())) * problem.capacity_bytes / rooms.mean()
        least = min(least, max(each, problem.one_stage_least_bytes))
    room = format_bytes(problems[0].capacity_bytes)
    short = none_within(float(least), problems[0].capacity_bytes)
    none = "fits by the costs of blocks" if short else "was found to fit, which is not proven"
    share = f"even shares of the least memory need {format_bytes(least)} a device, {room} may be used"
    hint = _untried(problems, float(least) / problems[0].capacity_bytes)
    return InfeasibleError(f"none of {len(problems)} ways to train {none}: {share}", hint, proven=False)


def _untried(problems: list[StepProblem], short: float) -> str:
    """Options that make a step leaner, of which none of the problems had the most. `short`: times the memory needed."""
    choices = [problem.choice for problem in problems]
    devices = max(own.stages * own.replicas * Mesh(own.inner).size for own in choices)
    said = [f"--devices {devices * 2 ** max(1, ceil(log2(max(short, 1.0))))}"]
    if all(own.zero < 3 for own in choices):
        said.append("--zero 3")
    if not any("input" in keeps for problem in problems for keeps in problem.keeps):
        said.append("--recompute full")
    least = min(own.micro_batch for own in choices)
    said += ["--micro-batch 1"] if least > 1 else []
    return " or ".join(said) + ", or a model with a smaller batch, sequence or width"


def best_stages(problem: StepProblem) -> StageSolution | None:
    """Stages of a problem, see `solve_stages`. Its form counts what a block works with beside all that is kept: of one
    stage the exact plan takes its place where it may be faster. Of several, where none fits so, those that fit by what
    is surely held: which of them do fit is for the simulated step to say."""
    found = solve_stages(problem.stage_problem, SIMULATED, LOOSE)
    if not _is_one(problem):
        return found or solve_stages(problem.bounding, SIMULATED, LOOSE)
    several = problem.choice.micro_batches > 1  # then the form counts no less than is held
    if several and found and found.plans[0].seconds * (1 - LOOSE) <= RoomBound(problem.bounding).form_seconds:
        return found
    points = least_points(problem, [own.front for own in problem.fronts])
    if points is None:
        return found
    own, parts = problem.stage_problem, (Part(0, 0, 0, len(problem.kinds)),)
    plan = StagePlan(parts, points, closed_form(own, parts, points))
    others = tuple(other for other in found.plans if other.seconds > plan.seconds) if found else ()
    return StageSolution(own, (plan, *others)[:SIMULATED], plan.seconds * (1 - EXACT))


def least_points(problem: StepProblem, fronts: Sequence[Front]) -> tuple[int, ...] | None:
    """Points of the one-stage plan with the least seconds of these `fronts`, by kind, within what that holds as it is
    simulated; None where none fits, or too many are to be followed, or there are more stages."""
    if not _is_one(problem):
        return None
    blocks, always = _running(problem, fronts)
    return fastest_points(blocks, problem.capacity_bytes - always)


def one_stage_bytes(problem: StepProblem) -> float:
    """What the plan of one stage that holds least holds, and what is withheld of it; infinite with more stages, and
    where too many plans are to be followed."""
    if not _is_one(problem):
        return np.inf
    blocks, always = _running(problem, [own.front for own in problem.fronts])
    return always + least_peak(blocks)


def _is_one(problem: StepProblem) -> bool:
    everywhere = problem.allowed is None or bool(problem.allowed.all())
    return problem.choice.stages == 1 and float(problem.live[0]) == 1 and everywhere


def _running(problem: StepProblem, fronts: Sequence[Front]) -> tuple[list[RunningBlock], float]:
    """Blocks along the line, their seconds in `fronts` of a micro-batch with a share of the tail's, and the bytes that
    are held in any case. Of a single micro-batch the gradients of a block, and of those after it, are there as it
    runs."""
    fresh = [problem.fresh_bytes(block) for block in range(len(problem.kinds))]
    made, found = sum(fresh), []
    for block, kind in enumerate(problem.kinds):
        front = fronts[kind]
        working = np.array([problem.working_bytes(block, point) for point in range(front.points)])
        seconds = front.seconds + front.tail_seconds / problem.choice.micro_batches
        found.append(RunningBlock(seconds, front.kept_bytes, working + made))
        made -= fresh[block]
    always = sum(problem.always_bytes(block) for block in range(len(problem.kinds)))
    return found, always + float(np.max(problem.withheld_bytes))
