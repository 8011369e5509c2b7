"""Reassigns points to a plan's blocks within its stages, by what each stage holds as it is simulated.

A stage problem spreads what blocks keep evenly over chunks, and adds a block's working memory to all that is kept. The
step holds less: a block that keeps most stands where fewest micro-batches are in flight, and last in its part, where it
works while the others keep little. Of equal blocks every number at each point is tried, with the blocks that keep most
in the last chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.simulation.step_timeline import StepCosts
from autoshard.solvers.stages.counted_points import undominated
from autoshard.solvers.stages.stage_moments import fullest_moments
from autoshard.solvers.stages.stage_problem import Part, StagePlan, closed_form
from autoshard.whole_step_search.step_costs import StepProblem

_MOST = 5_000  # ways to choose of a stage


def reassigned_points(problem: StepProblem, plan: StagePlan) -> StagePlan | None:
    """The plan with the least seconds on each stage that fits; None if none does. `plan` itself if one stage has all
    blocks, or if parts have other blocks than one run of equal ones with something before and after it."""
    run = problem.kinds[problem.stage_problem.run[0]]
    blocks = [[k for k in range(part.first, part.stop) if problem.kinds[k] == run] for part in plan.parts]
    front = problem.fronts[run].front
    choice = undominated(front.seconds, front.saved_bytes)  # the leanest first
    apart = any(indices and indices[-1] - indices[0] >= len(indices) for indices in blocks)
    if problem.choice.stages == 1 or len(choice) < 2 or apart:
        return plan
    points, costs = list(plan.points), problem.step_costs(plan)
    for stage in range(problem.choice.stages):
        numbers = [number for number, part in enumerate(plan.parts) if part.stage == stage]
        chunks = [blocks[number] for number in numbers]
        counts = _counts(sum(map(len, chunks)), len(choice))
        if counts is None:
            continue
        ways = _placed(counts, np.array(list(map(len, chunks))))
        fits = _peak(problem, plan, costs, stage, [plan.parts[number] for number in numbers], chunks, choice, ways)
        seconds = ways.sum(axis=1) @ problem.of_stage(stage).fronts[run].front.seconds[choice]
        seconds = np.where(fits <= problem.capacities[stage], seconds, np.inf)
        if not np.isfinite(seconds).any():
            return None
        for run_blocks, taken in zip(chunks, ways[seconds.argmin()], strict=True):
            for block, point in zip(run_blocks, np.repeat(choice, taken), strict=True):
                points[block] = int(point)
    return StagePlan(plan.parts, tuple(points), closed_form(problem.stage_problem, plan.parts, points))


@lru_cache(maxsize=256)
def _counts(blocks: int, points: int) -> Integers | None:
    """[way, point]: number of blocks at each point; None if there are too many ways."""
    table = np.zeros((1, 0), np.int64)
    for _ in range(points - 1):
        left = blocks - table.sum(axis=1)
        if int((left + 1).sum()) > _MOST:
            return None
        table = np.concatenate([np.column_stack([np.repeat(row[None], n + 1, 0), np.arange(n + 1)])
                                for row, n in zip(table, left, strict=True)])  # fmt: skip
    every: Integers = np.column_stack([table, blocks - table.sum(axis=1)])
    return every


def _placed(counts: Integers, sizes: Integers) -> Integers:
    """[way, chunk, point]: the blocks of `counts` on chunks of these `sizes`, what keeps most on the last chunks."""
    ends = np.column_stack([np.zeros(len(counts), np.int64), counts[:, ::-1].cumsum(axis=1)])
    filled = np.clip(ends[:, :, None] - (sizes.sum() - sizes.cumsum()), 0, sizes)
    placed: Integers = np.moveaxis(np.diff(filled, axis=1)[:, ::-1], 1, 2)
    return placed


def _peak(
    problem: StepProblem,
    plan: StagePlan,
    costs: StepCosts,
    stage: int,
    parts: Sequence[Part],
    blocks: Sequence[Sequence[int]],
    choice: Integers,
    ways: Integers,
) -> Floats:
    """[way]: bytes of the stage at its fullest moment. `costs` of the plan."""
    of = problem.of_stage(stage)
    kept_bytes, working = np.zeros((2, *ways.shape[:2]))
    for chunk, (part, run) in enumerate(zip(parts, blocks, strict=True)):
        held_bytes, most = np.zeros(len(ways)), np.zeros(len(ways))
        for block, point, count in _in_row(plan, part, run, choice, ways[:, chunk]):
            held_bytes = held_bytes + count * float(of.fronts[problem.kinds[block]].front.saved_bytes[point])
            most = np.maximum(most, np.where(count > 0, held_bytes + of.working_bytes(block, point), 0.0))
        fronts = ((of.fronts[problem.kinds[k]].front, plan.points[k]) for k in range(part.first, part.stop))
        handed = costs.part(stage, chunk).saved_bytes - sum(float(front.saved_bytes[point]) for front, point in fronts)
        kept_bytes[:, chunk], working[:, chunk] = held_bytes + handed, np.maximum(most - held_bytes, 0.0)
    moments = fullest_moments(costs.schedule, stage, len(costs.stages), costs.micro_batches, costs.chunks)
    fullest = moments.fullest(kept_bytes, working, *costs.left_behind(stage))
    peak: Floats = costs.stages[stage].static_bytes + costs.buffer_bytes(stage) + fullest
    return peak


def _in_row(
    plan: StagePlan, part: Part, run: Sequence[int], choice: Integers, ways: Integers
) -> Iterator[tuple[int, int, Integers]]:
    """Triples (block, point, number of each way) in the order of the model; the run has blocks at each of `choice`."""
    for block in range(part.first, part.stop):
        if run and block == run[0]:
            yield from ((block, int(point), ways[:, place]) for place, point in enumerate(choice))
        elif block not in run:
            yield block, plan.points[block], np.ones(len(ways), np.int64)
