"""Best-first search over outer choices, for every level: what a level minimises is its `Objective` (step_levels.py).

Each choice has bounds, the cheapest first. The choice with the least bound is considered next: its next bound is
computed or, if it has them all, its best step is found. Once the least bound passes the best step, no remaining choice
can be better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf, log2

from autoshard.errors import InfeasibleError
from autoshard.ir.graph import Derives
from autoshard.ir.mesh import Mesh
from autoshard.solvers.common.result import none_within
from autoshard.units import ROUNDING, format_bytes
from autoshard.whole_step_search.blocks.block_line import BlockLine
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.config_space import ParallelConfig, RejectedConfigs
from autoshard.whole_step_search.solved_steps import JointResult, SolvedStep
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_local_search import Known, nearby_steps

Problem = tuple[StepProblem, BlockSplit | None]


@dataclass(frozen=True, eq=False)
class OuterChoice(Derives):
    """Outer choice with one split of the blocks, and (`once`) what is known about it."""

    problem: StepProblem
    split: BlockSplit | None


Bound = Callable[[OuterChoice], float]


@dataclass(frozen=True)
class Objective:
    """Objective of a level: a step's `SolvedStep.value(level)`; `known` is the part known before a plan is simulated.

    `bounds`: lower bounds on what is found for an outer choice, each slower to compute than the last; infinite: nothing
    fits. `proofs`, as far as they are below the best value found: lower bounds on every plan that fits as it is
    simulated, whatever its order. `solved`: the best step of an outer choice, or one that does not fit; None if there
    is none, or none that may be better than the best so far. `text`: the value in words.
    """

    level: int
    known: Known
    bounds: Sequence[Bound]
    proofs: Callable[[float], Sequence[Bound]]
    solved: Callable[[OuterChoice, float], SolvedStep | None]
    text: Callable[[float], str]


@dataclass(frozen=True, eq=False)
class Later:
    """Outer choices of one mesh of a replica; their blocks are split once they may be among the best. No step of theirs
    takes less than `least_seconds`."""

    choices: tuple[ParallelConfig, ...]
    least_seconds: float
    problems: Callable[[], list[Problem]]


def best_steps(
    objective: Objective,
    problems: Iterable[Problem],
    line: BlockLine,
    log: RejectedConfigs,
    count: int = 8,
    tell: Callable[[str], None] = lambda text: None,
    later: Iterable[Later] = (),
    bounded: bool = True,
) -> JointResult:
    """The best step and up to `count` others, each of another outer choice. If not `bounded`, the bound on all plans is
    left out. InfeasibleError if no step fits."""
    level, choices, waiting = objective.level, [OuterChoice(*problem) for problem in problems], list(later)
    steps: list[SolvedStep] = []
    best, solved = inf, 0

    def more() -> list[OuterChoice]:
        """Outer choices of the mesh with the least bound, if that is below the best step."""
        first = min(waiting, key=lambda group: group.least_seconds, default=None)
        if first is None or first.least_seconds >= best:
            return []
        waiting.remove(first)
        return [OuterChoice(*problem) for problem in first.problems()]

    def limit() -> float:
        return best

    for _, choice in best_first(choices, objective.bounds, limit, more):
        solved += 1
        step = objective.solved(choice, best)
        if step is not None:
            steps.append(step)
        if step is not None and step.fits:
            best = min(best, step.value(level))
            tell(f"{choice.problem.choice}: {objective.text(step.value(level))}")
    ranked = best_of_each(nearby_steps(steps, level, objective.known), level)
    if not ranked:
        raise none_fits([choice.problem for choice in choices])
    best = ranked[0].value(level)
    proved = (least for least, _ in best_first(choices, objective.proofs(best), limit))
    bound = min(best, next(proved, best)) if bounded else 0.0
    considered = len(choices) + sum(len(group.choices) for group in waiting)
    others, undivided = tuple(ranked[1 : count + 1]), tuple(log.reasons.items())
    return JointResult(level, ranked[0], others, line, bound, considered, solved, undivided)


def best_first(
    choices: list[OuterChoice],
    bounds: Sequence[Bound],
    most: Callable[[], float],
    more: Callable[[], list[OuterChoice]] = list,
) -> Iterator[tuple[float, OuterChoice]]:
    """Pairs (highest bound, choice) of the choices with no bound above `most()`, the least first. When none is left,
    `more` may return further ones, which are added to `choices`."""
    heap: list[tuple[float, int, int]] = []
    begun = 0
    while True:
        for number in range(begun, len(choices)):
            heappush(heap, (choices[number].once(bounds[0]), number, 1))
        begun = len(choices)
        while heap and heap[0][0] <= most() * (1 + ROUNDING) and heap[0][0] < inf:
            least, number, depth = heappop(heap)
            if depth == len(bounds):
                yield least, choices[number]
            else:
                heappush(heap, (max(least, choices[number].once(bounds[depth])), number, depth + 1))
        choices += more()
        if len(choices) == begun:
            return


def best_of_each(steps: Iterable[SolvedStep], level: int) -> list[SolvedStep]:
    """The best split of every outer choice, the best choice first; of equal ones the faster, then the leaner."""
    each: dict[ParallelConfig, SolvedStep] = {}
    for step in sorted(steps, key=lambda step: (step.value(level), step.seconds, step.peak_bytes)):
        each.setdefault(step.problem.choice, step)
    return list(each.values())


def none_fits(problems: list[StepProblem]) -> InfeasibleError:
    """Error with the memory that the leanest stage needs: if it exceeds the room, none fits by the costs of blocks;
    nothing is proven of their programs."""
    least = inf
    for problem in problems:
        bounding = problem.bounding
        sizes = bounding.point_bytes(bounding.stages - 1)
        whole = sum(float(sizes[kind].min()) for kind in bounding.line)
        rooms = problem.capacities
        each = (
            (whole / bounding.stages + float((rooms - bounding.capacity_bytes).min()))
            * problem.capacity_bytes
            / rooms.mean()
        )
        least = min(least, max(each, problem.one_stage_least_bytes))
    room = format_bytes(problems[0].capacity_bytes)
    short = none_within(float(least), problems[0].capacity_bytes)
    none = "fits by the costs of blocks" if short else "was found to fit, which is not proven"
    share = f"even shares of the least memory need {format_bytes(least)} a device, {room} may be used"
    hint = _untried(problems, float(least) / problems[0].capacity_bytes)
    return InfeasibleError(f"none of {len(problems)} ways to train {none}: {share}", hint, proven=False)


def _untried(problems: list[StepProblem], short: float) -> str:
    """Options that reduce a step's memory and that no problem used to the full. `short`: times the memory needed."""
    choices = [problem.choice for problem in problems]
    devices = max(choice.stages * choice.replicas * Mesh(choice.inner).size for choice in choices)
    said = [f"--devices {devices * 2 ** max(1, ceil(log2(max(short, 1.0))))}"]
    if all(choice.zero < 3 for choice in choices):
        said.append("--zero 3")
    if not any("input" in keeps for problem in problems for keeps in problem.keeps):
        said.append("--recompute full")
    least = min(choice.micro_batch for choice in choices)
    said += ["--micro-batch 1"] if least > 1 else []
    return " or ".join(said) + ", or a model with a smaller batch, sequence or width"
