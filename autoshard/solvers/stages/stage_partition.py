"""Stages by dynamic programming: for a fixed maximum the least sum, and the maximum searched until no other is better.

    T = sum over stages of t / v + (m - 1 / v) max t        (t: a micro-batch on a stage; m of them; v chunks)

and the certificate R, below every step of every plan, in whatever order its undivided forwards and backwards run that
fits the memory:

    R = max over stages of (m t + what a micro-batch takes before it, forward and backward) + the first stage's tail,
        with what is left then of collectives that run once a step (late_bound)

with, of stages of one chunk, what their memory makes them wait for (idle_bound).
"""

from __future__ import annotations

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.stages.counted_points import first_chunk_seconds
from autoshard.solvers.stages.idle_bound import GROW, IdleBound, least_late
from autoshard.solvers.stages.range_costs import RangeCosts, parts_of
from autoshard.solvers.stages.stage_problem import Part, StagePlan, StageProblem, closed_form
from autoshard.units import EXACT

_INF = float("inf")


def solve_stages(problem: StageProblem, tolerance: float = 0.0) -> StagePlan | None:
    """The best plan by the closed form; None where none fits. The search over the maximum ends when what is left is at
    most `tolerance` (relative) better."""
    if not is_possible(problem):
        return None
    costs = RangeCosts(problem, 1.0, 1 / problem.micro_batches)
    first = _first_feasible(problem, costs)
    if first is None:
        return None
    plans = _swept(problem, costs, first, tolerance)
    return min(plans, key=lambda plan: (plan.seconds, plan.parts, plan.points))


def is_possible(problem: StageProblem) -> bool:
    """False where there are fewer blocks than parts, where chunks don't divide them, or where the least bytes of the
    line don't fit: from each place that stages may reach the next one takes a block, or as many as it can hold."""
    start, stop = problem.run
    dealt = stop - start if problem.chunks > 1 else len(problem.line)
    if dealt < problem.stages * problem.chunks or (problem.chunks > 1 and dealt % problem.chunks):
        return False
    places = np.arange(len(problem.line) + 1)
    reached = places == 0
    for stage in range(problem.stages):
        least = np.array([float(sizes.min()) for sizes in problem.point_bytes(stage)])
        held = np.cumsum([0.0, *least[list(problem.line)]])
        room = held + float(problem.capacity_bytes[stage]) * (1 + EXACT) + EXACT * held[-1]
        farthest = np.searchsorted(held, room, side="right") - 1
        begins = np.flatnonzero(reached & (farthest > places))
        change = np.zeros(len(places) + 1, dtype=np.int64)
        np.add.at(change, begins + 1, 1)
        np.add.at(change, farthest[begins] + 1, -1)
        reached = np.cumsum(change)[:-1] > 0
    return bool(reached[-1])


def _formula(problem: StageProblem, total: float, most: float) -> float:
    return total / problem.chunks + (problem.micro_batches - 1 / problem.chunks) * most


def _first_feasible(problem: StageProblem, costs: RangeCosts) -> tuple[float, list[int], float] | None:
    """(sum, cuts, maximum) of some plan: the limit on a stage is raised until there is one."""
    whole = float(costs.line_least[-1]) + sum(map(costs.sent, range(problem.stages)))
    limit = GROW * whole / problem.stages
    each = (
        [float(front.seconds.max() + front.tail_seconds.max()) for front in fronts] for fronts in problem.every_front
    )
    most = [max(seconds) for seconds in zip(*each, strict=True)]
    top = whole + sum(most[kind] for kind in problem.line)
    while True:
        solution = least_sum(costs.table(limit), limit)
        if solution is not None or limit >= top:
            return solution
        limit = min(top, limit * GROW) if limit > 0 else top


def _swept(
    problem: StageProblem, costs: RangeCosts, first: tuple[float, list[int], float], tolerance: float
) -> list[StagePlan]:
    """Plans at the maxima that may be best."""
    best = _formula(problem, first[0], first[2])
    factor = problem.micro_batches - 1 / problem.chunks
    free = float(costs.line_least[-1]) + sum(map(costs.sent, range(problem.stages)))
    highest = max(first[2], (best - free / problem.chunks) / factor) if factor > 0 else _INF
    table = costs.table(highest)
    values = np.unique(np.concatenate([stage_table[np.isfinite(stage_table)] for stage_table in table]))
    values = values[values <= highest * (1 + EXACT)]
    low, high = 0, len(values) - 1  # bisected to the first feasible maximum
    while low < high:
        middle = (low + high) // 2
        if least_sum(table, float(values[middle])) is None:
            low = middle + 1
        else:
            high = middle
    loosest = least_sum(table, float(values[-1]))
    assert loosest is not None, "the plan that set the limit is in the table"
    met: dict[tuple[int, ...], tuple[float, list[int], float]] = {tuple(loosest[1]): loosest}
    best = min(best, _formula(problem, loosest[0], loosest[2]))
    for value in values[low:]:
        if _formula(problem, loosest[0], float(value)) >= best * (1 - tolerance):
            break
        solution = least_sum(table, float(value))
        if solution is not None:
            met.setdefault(tuple(solution[1]), solution)
            best = min(best, _formula(problem, solution[0], solution[2]))
    return [plan_of_cuts(problem, costs, cuts) for _, cuts, _ in met.values()]


def least_sum(table: list[Floats], limit: float) -> tuple[float, list[int], float] | None:
    """(sum, cuts as places, maximum) of the least sum of stages that take at most `limit`; None where there is none."""
    ends, lengths = table[0].shape
    begin = np.arange(ends)[:, None] - np.arange(lengths)[None, :]
    inside, begin = begin >= 0, np.maximum(begin, 0)
    sums = np.full(ends, _INF)
    sums[0] = 0.0
    taken = []
    for stage_table in table:
        total = np.where(inside & (stage_table <= limit * (1 + EXACT)), sums[begin] + stage_table, _INF)
        length = total.argmin(axis=1)
        sums = total[np.arange(ends), length]
        taken.append(length)
    if not np.isfinite(sums[-1]):
        return None
    cuts, most, end = [ends - 1], 0.0, ends - 1
    for stage_table, length in zip(reversed(table), reversed(taken), strict=True):
        most = max(most, float(stage_table[end, length[end]]))
        end -= int(length[end])
        cuts.append(end)
    return float(sums[-1]), cuts[::-1], most


def plan_of_cuts(problem: StageProblem, costs: RangeCosts, cuts: list[int]) -> StagePlan:
    positions = [costs.places[cut] for cut in cuts]
    parts = parts_of(problem, positions)
    points = [-1] * len(problem.line)
    for stage in range(problem.stages):
        _deal(problem, stage, parts, costs.points(stage, cuts[stage], cuts[stage + 1]), points)
    return StagePlan(tuple(parts), tuple(points), closed_form(problem, parts, points))


def _deal(problem: StageProblem, stage: int, parts: list[Part], by_kind: list[list[int]], points: list[int]) -> None:
    """The points of a stage onto its blocks, in turn onto the chunks, so that they take alike; what keeps most onto the
    last ones, of which fewest micro-batches are in flight where a stage is fullest."""
    stage_parts = [part for part in parts if part.stage == stage]
    for kind, chosen in enumerate(by_kind):
        kept_bytes = problem.of_stage(stage)[kind].saved_bytes
        blocks = [[k for k in range(p.first, p.stop) if problem.line[k] == kind] for p in stage_parts]
        turns = sorted((place, -chunk) for chunk, mine in enumerate(blocks) for place in range(len(mine)))
        fullest = sorted(chosen, key=lambda point: (-kept_bytes[point], point))
        for (place, chunk), point in zip(turns, fullest, strict=True):
            points[blocks[-chunk][place]] = point


def certificate(problem: StageProblem, seconds: float) -> float:
    """R, where it is below `seconds`; else `seconds`: what is slower is left out."""
    limit = seconds / problem.micro_batches
    costs = RangeCosts(problem, 1.0, 0.0)
    table = costs.table(limit)
    busy = _busy(problem, costs, table)
    passes = [_passing(problem, costs, s, table[s]) for s in range(problem.stages)]
    once, early = _first(problem, costs)
    once, early = (values[np.arange(len(values))[:, None], _begins(table[0])] for values in (once, early))
    after = np.full(len(costs.places), _INF)  # of the stages after, from each place
    after[-1] = 0.0
    for stage in range(problem.stages - 1, 0, -1):
        after = _behind(busy[stage] + once, passes[stage] + early, after)
    bound = float(_behind(busy[0] + once, passes[0] + early, after)[0])
    if any(front.tail_seconds.any() or front.late_seconds for front in problem.fronts):
        late = least_late(problem, costs.places)
        tail = _least_tail(problem, costs) + late[:, None]
        ended = _behind(busy[0] + once + tail, passes[0] + early + tail, after)
        bound = max(bound, float(ended[0]), _with_tail(problem, costs, after, late))
    return min(bound, seconds)


def _busy(problem: StageProblem, costs: RangeCosts, table: list[Floats]) -> list[Floats]:
    """[stage][end, length]: from the first forward of a range to its last backward."""
    if problem.chunks > 1 or problem.stages == 1:
        return [problem.micro_batches * stage_table for stage_table in table]
    idle = IdleBound(costs, table)
    return [idle.busy(stage, stage_table) for stage, stage_table in enumerate(table)]


def _least_tail(problem: StageProblem, costs: RangeCosts) -> Floats:
    """[end, 1], by places: of the blocks from the start."""
    least = np.array([float(front.tail_seconds.min()) for front in problem.fronts])
    tail: Floats = (costs.counts[costs.places] @ least)[:, None]
    return tail


def _begins(table: Floats) -> Integers:
    """[end, length]: the place where a range begins."""
    begins: Integers = np.maximum(np.arange(len(table))[:, None] - np.arange(table.shape[1]), 0)
    return begins


def _first(problem: StageProblem, costs: RangeCosts) -> tuple[Floats, Floats]:
    """[end, begin], by places: what the first forwards of a range take more, and that of its first chunk alone."""
    places = np.array(costs.places)
    whole = problem.first_seconds[places]
    if problem.chunks == 1:
        both = whole[:, None] - whole[None, :]
        return both, both
    start, stop = problem.run
    inside = np.clip(places, start, stop)
    blocks = np.maximum(inside[:, None] - inside[None, :], 0) // problem.chunks
    return whole[:, None] - whole[None, :], problem.fronts[problem.line[start]].first_seconds * blocks


def _behind(busy: Floats, passing: Floats, after: Floats) -> Floats:
    """Least from each place, over ranges that begin there, of the longer: the stage busy, or the others after a
    micro-batch has passed it. Shapes: [end, length], and [place]."""
    every = np.maximum(busy, passing + after[:, None])
    least = np.full(len(busy), _INF)
    end, length = np.nonzero(np.isfinite(every))
    np.minimum.at(least, end - length, every[end, length])
    return least


def _passing(problem: StageProblem, costs: RangeCosts, stage: int, table: Floats) -> Floats:
    """Seconds of one micro-batch through the first chunk of each range: its own with one chunk, else the least that its
    blocks can take."""
    if problem.chunks == 1:
        return table
    start, stop = problem.run
    hands = problem.send_seconds * (1 + (stage > 0))
    last = np.array(costs.places)[:, None]
    first = last[_begins(table), 0]
    each = np.maximum(np.minimum(last, stop) - np.maximum(first, start), 0) // problem.chunks
    least = first_chunk_seconds(problem, stage, int(each.max()))
    return np.where(np.isfinite(table), least[each] + hands, _INF)


def _with_tail(problem: StageProblem, costs: RangeCosts, after: Floats, late: Floats) -> float:
    """The first stage is busy with its tail and its `late` collectives too, which come after everything else in any
    case."""
    once, early = (values[:, 0] for values in _first(problem, costs))
    busy = RangeCosts(problem, float(problem.micro_batches), 1.0).from_start() + once
    if problem.stages == 1:
        return float(busy[-1] + late[-1])
    passing = RangeCosts(problem, 1.0 if problem.chunks == 1 else 0.0, 1.0)
    pass_seconds, (start, stop) = passing.from_start(), problem.run
    if problem.chunks > 1:
        each = np.maximum(np.minimum(passing.places, stop) - start, 0) // problem.chunks
        pass_seconds = pass_seconds + first_chunk_seconds(problem, 0, int(each.max()))[each] + problem.send_seconds
    return float((np.maximum(busy, pass_seconds + early + after) + late)[1:].min())
