"""Overhead of a whole step, which level 0 minimises: seconds of all but useful work, of a device on average.

Overhead is communication, each collective and each send as long as it takes by itself, and computation that another
device also does or that the same device has done before. Nothing overlaps, and stages' waits for each other do not
count. Useful work is the same for every plan, in operations, so the least overhead is the most useful work for each
second of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.solvers.stages.stage_problem import Front, StagePlan, StageProblem
from autoshard.whole_step_search.blocks.block_fronts import ALL, BlockFront, gathered_seconds, late_seconds, moved
from autoshard.whole_step_search.step_costs import StepProblem


def overhead_fronts(problem: StepProblem) -> tuple[Front, ...]:
    """Fronts by kind: points with their memory, and overhead in place of their seconds."""
    return tuple(_overhead_curve(problem, kind, curve) for kind, curve in enumerate(problem.fronts))


def with_overhead(problem: StepProblem, counted: StageProblem) -> StageProblem:
    """Stage problem `counted` with overhead in place of seconds: its stages add up to the overhead of a step."""
    pairs = zip(counted.fronts, problem.once(overhead_fronts), strict=True)
    fronts = (
        replace(
            front,
            forward_seconds=overhead.forward_seconds,
            backward_seconds=overhead.backward_seconds,
            tail_seconds=overhead.tail_seconds,
            first_seconds=0.0,
        )
        for front, overhead in pairs
    )
    return replace(counted, fronts=tuple(fronts))


def overhead_of(problem: StepProblem, plan: StagePlan) -> float:
    """Overhead seconds of a step, mean over devices."""
    fronts, choice = problem.once(overhead_fronts), problem.choice
    owns = [(fronts[kind], point) for kind, point in zip(problem.kinds, plan.points, strict=True)]
    each = sum(float(front.seconds[point] + front.tail_seconds[point] / choice.micro_batches) for front, point in owns)
    sent = sum(2 * problem.received_seconds(part.first) for part in plan.parts if part.first)
    return mean_seconds(problem, each + sent)


def mean_seconds(problem: StepProblem, each: float) -> float:
    """Mean over devices of seconds in a step; `each`: seconds of one micro-batch, summed over stages."""
    return problem.choice.micro_batches * each / problem.choice.stages


def _overhead_curve(problem: StepProblem, kind: int, curve: BlockFront) -> Front:
    costs, zero, mesh, hardware = problem.costs[kind], problem.choice.zero, problem.mesh, problem.hardware
    recompute = dict(costs.recompute_seconds)
    each = [costs.overhead_seconds + recompute[keep] + _between_replicas(problem, kind, keep) for keep in curve.keeps]
    held = curve.costs.held
    moving = (late_seconds(held, zero, mesh, hardware), gathered_seconds(held, zero, mesh, hardware))
    replicas = problem.choice.replicas
    update = held.update_share(replicas) if zero else held.update_seconds
    repeated = update - held.split_update_seconds / replicas
    once = sum(map(sum, moving)) + max(0.0, repeated)
    return replace(
        curve.front,
        forward_seconds=np.array(each),
        backward_seconds=np.zeros(len(each)),
        tail_seconds=np.full(len(each), once),
        first_seconds=0.0,
    )


def _between_replicas(problem: StepProblem, kind: int, keep: str) -> float:
    """Seconds of a micro-batch to gather weights and scatter gradients, as in the block's front."""
    zero = problem.choice.zero
    if not zero:
        return 0.0
    sharded = problem.sharded[kind]
    together = zero == 3 and problem.choice.stages == 1 and keep == ALL
    costs = sharded.once[zero - 1] if zero < 3 else sharded.together if together else sharded.alone
    exchange = moved(costs.moves, problem.mesh, problem.hardware)
    regathered = exchange.gathered if zero == 3 and keep != ALL else exchange.regathered
    return exchange.gathered + regathered + exchange.scattered
