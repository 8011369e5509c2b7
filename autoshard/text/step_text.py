"""The best whole step in a reader's words: what was chosen, how far any other could be better, and why not others."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import inf
from typing import Any

from autoshard.constraints.step_request import RECOMPUTE, TENSORS
from autoshard.ir.plan import KEEP_ALL, KEEP_SOME, StepTried, policy_results
from autoshard.search.objectives import MEMORY, RATIO, SPEED
from autoshard.search.search_request import SearchRequest
from autoshard.solvers.common.result import fits
from autoshard.solvers.stages.stage_problem import Part
from autoshard.text.stage_table import STEP_HEADER, step_cells
from autoshard.text.tables import table, wrapped
from autoshard.units import counted, format_bytes, format_seconds
from autoshard.whole_step_search.solved_steps import JointResult, SolvedStep

SAID = {keep: word for word, keep in RECOMPUTE.items()}
_NAMED = {
    "all": "all",
    "expensive+communicated": "expensive operators and results of collectives",
    "expensive": "expensive operators",
    KEEP_SOME: "some expensive operators",
    "communicated": "its input with what collectives gave",
    "input": "its input",
}
MEMORY_PRICE = "what takes longest to make again for each byte is kept first, as the memory of a stage allows"


def summary(result: JointResult, wanted: SearchRequest, width: int) -> list[str]:
    """Lines for a terminal."""
    best, choice = result.best, result.best.problem.choice
    samples = wanted.step.global_batch or 0
    lines = [
        f"{samples} samples a step on {wanted.devices} devices: {choice}",
        f"predicted step {format_seconds(taken(best))}, {samples / taken(best):,.4g} samples/s; fullest stage "
        f"{format_bytes(best.program_bytes or best.peak_bytes)} of {format_bytes(result.room_bytes)}",
        "",
        *(line for message in certainty(result) for line in wrapped(message, width)),
    ]
    if result.others:
        lines += ["", *table([STEP_HEADER, *map(step_cells, steps(result))], width)]
    for message in (*saved_names(result), *scaled(result), *narrower(result), *left_out(result)):
        lines += wrapped(message, width)
    return lines


def steps(result: JointResult) -> tuple[StepTried, ...]:
    """Rows that a plan keeps: the best step, and the result for every other outer choice."""
    return tuple(_tried(step, result) for step in (result.best, *result.others))


def sentences(result: JointResult) -> tuple[str, ...]:
    """Sentences that a plan keeps about the search."""
    return (*certainty(result), *saved_names(result), *scaled(result), *narrower(result), *left_out(result))


def saved_names(result: JointResult) -> list[str]:
    """Names of the results kept by blocks that keep only some."""
    problem, counts = result.best.problem, Counter[str]()
    for kind, point in zip(problem.kinds, result.best.plan.points, strict=True):
        counts[problem.keeps[kind][point]] += 1
    some = {keep: count for keep, count in counts.items() if keep.startswith(KEEP_SOME)}
    said = [
        f"{counted(n, 'block')} of {', '.join(path for _, path in policy_results(keep))}" for keep, n in some.items()
    ]
    return [f"results kept: {'; '.join(said)}; {MEMORY_PRICE}"] if said else []


def narrower(result: JointResult) -> list[str]:
    """Note if the search gave blocks less memory than there is."""
    capacity, limit = result.best.problem.capacity_bytes, result.room_bytes
    message = f"searched within {format_bytes(capacity)} by the costs of blocks: the program of the best within "
    return [f"{message}{format_bytes(limit)} by these holds more than that"] if capacity < limit else []


def scaled(result: JointResult) -> list[str]:
    """Note on the meaning of memory figures if stages are on several kinds of devices."""
    limit = format_bytes(result.room_bytes)
    said = f"memory is the share that a stage uses of what its devices have, as of one with {limit}, the least of any"
    return [said] if result.best.problem.by_stage else []


def left_out(result: JointResult) -> list[str]:
    """Lines on what was left out, as it does not divide or is not possible, with how often."""
    return [f"left out {count} {'time' if count == 1 else 'times'}: {reason}" for reason, count in result.undivided]


def certainty(joint: JointResult) -> list[str]:
    """Sentences with the gap, and what it refers to."""
    if joint.level == RATIO:
        return [
            f"gap {joint.gap:.2%} (cost model of blocks): {format_seconds(joint.best.overhead)} of communication, "
            "recomputation and replicated computation per step, mean over devices; lower bound for all plans searched: "
            f"{format_seconds(joint.bound)}. Pipeline bubbles do not count, and nothing is proved of the "
            "step's time",
            _searched(joint, "have more of it by their bounds"),
        ]
    if joint.level == MEMORY:
        return [
            f"gap {joint.gap:.2%} (cost model of blocks): the fullest device holds "
            f"{format_bytes(joint.best.peak_bytes)}; lower bound for all plans searched: "
            f"{format_bytes(joint.bound)}. Nothing is proved of its time",
            _searched(joint, "hold more by their bounds"),
        ]
    return [
        f"gap {joint.gap:.2%} (cost model of blocks): {format_seconds(joint.best.seconds)}; lower bound for all "
        f"plans searched, whatever their schedule: {format_seconds(joint.bound)}{_below(joint)}",
        _searched(joint, "can't be better by their bounds"),
    ]


def _searched(result: JointResult, others: str) -> str:
    solved = f"{result.solved:,} {'was' if result.solved == 1 else 'were'} solved"
    kinds, searches = counted(len(result.best.problem.costs), "kind"), counted(result.fronts, "search")
    choices = f"{result.considered:,} outer choice{'s' * (result.considered != 1)}"
    return (
        f"the plans: {choices} with a split of the blocks; {solved}; the others "
        f"{others}. Blocks of {kinds}, split over a replica in the ways that {searches} found; of each {_ways(result)}"
    )


def _ways(result: JointResult) -> str:
    """Policies offered for recomputable blocks, in words."""
    offered = [keeps for keeps in result.best.problem.keeps if keeps != (KEEP_ALL,)] or [(KEEP_ALL,)]
    policies = {KEEP_SOME if keep.startswith(KEEP_SOME) else keep for keep in chain(*offered)}
    first, *others = (word for keep, word in _NAMED.items() if keep in policies)
    return ", ".join((f"{first} is kept", *others[:-1], *(f"or {last}" for last in others[-1:])))


def taken(step: SolvedStep) -> float:
    """Predicted seconds, from the step's program if there is one."""
    return step.program_seconds or step.seconds


def _below(result: JointResult) -> str:
    """Note if a program is predicted to take less than the bound on the costs of blocks; else ""."""
    if not 0 < result.best.program_seconds < result.bound:
        return ""
    less = 1 - result.best.program_seconds / result.best.seconds
    return f"; its program is predicted to take {less:.1%} less than its blocks, which the bound does not speak of"


def recompute_counts(step: SolvedStep, parts: list[Part]) -> str:
    """Count of these parts' blocks by what they recompute: `full 3, selective 9`, or "nothing"."""
    problem = step.problem
    keeps = [problem.keeps[problem.kinds[k]][step.plan.points[k]] for p in parts for k in range(p.first, p.stop)]
    counts = Counter(SAID.get(keep, TENSORS) for keep in keeps if keep != "all")
    return ", ".join(f"{word} {count}" for word, count in sorted(counts.items())) or "nothing"


def _tried(step: SolvedStep, result: JointResult) -> StepTried:
    size, again_ = step.program_bytes or step.peak_bytes, recompute_counts(step, list(step.plan.parts))
    why = why_not(step, result.best, result.level, result.room_bytes)
    return StepTried(**vars(step.problem.choice), again=again_, outcome=why, blocks_seconds=step.seconds,
                     program_seconds=step.program_seconds, peak_bytes=size)  # fmt: skip


def why_not(step: SolvedStep, best: SolvedStep, level: int = SPEED, room_bytes: float = inf) -> str:
    """Why `step` is not the best: by programs if both have one, else by costs of blocks. `room_bytes`: of a device."""
    if step is best:
        return "chosen"
    if step.program_bytes and not fits(step.program_bytes, room_bytes):
        return "too large"
    if level == RATIO:
        more = step.overhead / best.overhead - 1 if best.overhead else 0.0
        return f"{more:.1%} more communication and replicated work" if more > 0 else "not better"
    if level == MEMORY:
        both = step.program_bytes and best.program_bytes
        more = step.program_bytes / best.program_bytes if both else step.peak_bytes / best.peak_bytes
        return f"{more - 1:.1%} more memory{'' if both else ' (estimated)'}" if more > 1 else "slower, or not simulated"
    if step.program_seconds:
        return f"{step.program_seconds / best.program_seconds - 1:.1%} slower"
    slower = step.seconds / best.seconds - 1
    return f"{slower:.1%} slower (estimated)" if slower > 0 else "not simulated"


def as_dict(result: JointResult, wanted: SearchRequest) -> dict[str, Any]:
    """JSON-ready data, in SI units."""
    return {
        "best": _joint_figures(result, result.best),
        "others": [_joint_figures(result, step) for step in result.others],
        **_bounds(result),
        "considered": result.considered,
        "solved": result.solved,
        "global_batch": wanted.step.global_batch,
        "devices": wanted.devices,
    }


def _bounds(result: JointResult) -> dict[str, Any]:
    if result.level == RATIO:
        overhead, bound = result.best.overhead, result.bound
        return {"rest_seconds": overhead, "bound_rest_seconds": bound, "gap": result.gap}
    if result.level == MEMORY:
        return {"peak_bytes": result.best.peak_bytes, "bound_bytes": result.bound, "gap": result.gap}
    return {"bound_seconds": result.bound, "gap": result.gap}


def _joint_figures(result: JointResult, step: SolvedStep) -> dict[str, Any]:
    problem, blocks = step.problem, result.line.blocks
    return {
        **vars(problem.choice),
        "split": step.split.name if step.split else "",
        "step_seconds": step.seconds,
        "program_seconds": step.program_seconds or None,
        "peak_bytes": list(step.timeline.peak_bytes),
        "parts": [
            {"stage": part.stage, "chunk": part.chunk, "first_op": result.line.graph.ops[blocks[part.first].first].name}
            for part in step.plan.parts
        ],
        "recompute": {
            blocks[k].module: problem.keeps[problem.kinds[k]][point]
            for k, point in enumerate(step.plan.points)
            if problem.keeps[problem.kinds[k]][point] != "all"
        },
    }
