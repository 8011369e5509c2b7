"""The best whole step in a reader's words: what was chosen, how far any other could be better, and why not others."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import inf
from typing import Any

from autoshard.constraints.step_request import RECOMPUTE, TENSORS
from autoshard.ir.plan import KEEP_ALL, KEEP_SOME, StepTried, kept_results
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


def summary(found: JointResult, wanted: SearchRequest, width: int) -> list[str]:
    """Lines for a terminal."""
    best, choice = found.best, found.best.problem.choice
    samples = wanted.step.global_batch or 0
    lines = [
        f"{samples} samples a step on {wanted.devices} devices: {choice}",
        f"predicted step {format_seconds(taken(best))}, {samples / taken(best):,.4g} samples/s; fullest stage "
        f"{format_bytes(best.program_bytes or best.peak_bytes)} of {format_bytes(found.room_bytes)}",
        "",
        *(line for message in certainty(found) for line in wrapped(message, width)),
    ]
    if found.others:
        lines += ["", *table([STEP_HEADER, *map(step_cells, steps(found))], width)]
    for message in (*kept_some(found), *scaled(found), *narrower(found), *left_out(found)):
        lines += wrapped(message, width)
    return lines


def steps(found: JointResult) -> tuple[StepTried, ...]:
    """As a plan keeps them: the best, and what was found of every other outer choice."""
    return tuple(_tried(own, found) for own in (found.best, *found.others))


def sentences(found: JointResult) -> tuple[str, ...]:
    """As a plan keeps them."""
    return (*certainty(found), *kept_some(found), *scaled(found), *narrower(found), *left_out(found))


def kept_some(found: JointResult) -> list[str]:
    """Which results the blocks keep that keep some of them."""
    problem, counts = found.best.problem, Counter[str]()
    for kind, point in zip(problem.kinds, found.best.plan.points, strict=True):
        counts[problem.keeps[kind][point]] += 1
    some = {keep: count for keep, count in counts.items() if keep.startswith(KEEP_SOME)}
    said = [f"{counted(n, 'block')} of {', '.join(own for _, own in kept_results(keep))}" for keep, n in some.items()]
    return [f"results kept: {'; '.join(said)}; {MEMORY_PRICE}"] if said else []


def narrower(found: JointResult) -> list[str]:
    """That blocks were given less room than there is."""
    own, limit = found.best.problem.capacity_bytes, found.room_bytes
    message = f"searched within {format_bytes(own)} by the costs of blocks: the program of the best within "
    return [f"{message}{format_bytes(limit)} by these holds more than that"] if own < limit else []


def scaled(found: JointResult) -> list[str]:
    """What bytes of stages on several kinds of devices are."""
    limit = format_bytes(found.room_bytes)
    said = f"memory is the share that a stage uses of what its devices have, as of one with {limit}, the least of any"
    return [said] if found.best.problem.by_stage else []


def left_out(found: JointResult) -> list[str]:
    """What does not divide, or can't be."""
    return [f"left out {count} {'time' if count == 1 else 'times'}: {reason}" for reason, count in found.undivided]


def certainty(found: JointResult) -> list[str]:
    """The gaps, in words, and of what they speak."""
    if found.level == RATIO:
        return [
            f"gap {found.gap:.2%} (cost model of blocks): {format_seconds(found.best.rest_seconds)} of communication, "
            "recomputation and replicated computation per step, mean over devices; lower bound for all plans searched: "
            f"{format_seconds(found.bound)}. Pipeline bubbles do not count, and nothing is proved of the "
            "step's time",
            _searched(found, "have more of it by their bounds"),
        ]
    if found.level == MEMORY:
        return [
            f"gap {found.gap:.2%} (cost model of blocks): the fullest device holds "
            f"{format_bytes(found.best.peak_bytes)}; lower bound for all plans searched: "
            f"{format_bytes(found.bound)}. Nothing is proved of its time",
            _searched(found, "hold more by their bounds"),
        ]
    return [
        f"gap {found.gap:.2%} (cost model of blocks): {format_seconds(found.best.seconds)}; lower bound for all "
        f"plans searched, whatever their schedule: {format_seconds(found.bound)}{_below(found)}",
        _searched(found, "can't be better by their bounds"),
    ]


def _searched(found: JointResult, others: str) -> str:
    solved = f"{found.solved:,} {'was' if found.solved == 1 else 'were'} solved"
    kinds, searches = counted(len(found.best.problem.costs), "kind"), counted(found.fronts, "search")
    choices = f"{found.considered:,} outer choice{'s' * (found.considered != 1)}"
    return (
        f"the plans: {choices} with a split of the blocks; {solved}; the others "
        f"{others}. Blocks of {kinds}, split over a replica in the ways that {searches} found; of each {_ways(found)}"
    )


def _ways(found: JointResult) -> str:
    """What may be kept of a block that can be computed again."""
    offered = [keeps for keeps in found.best.problem.keeps if keeps != (KEEP_ALL,)] or [(KEEP_ALL,)]
    kept = {KEEP_SOME if own.startswith(KEEP_SOME) else own for own in chain(*offered)}
    first, *others = (word for keep, word in _NAMED.items() if keep in kept)
    return ", ".join((f"{first} is kept", *others[:-1], *(f"or {last}" for last in others[-1:])))


def taken(own: SolvedStep) -> float:
    """Predicted seconds: of its program, where there is one."""
    return own.program_seconds or own.seconds


def _below(found: JointResult) -> str:
    """Said where a program is predicted to take less than the bound on the costs of blocks."""
    if not 0 < found.best.program_seconds < found.bound:
        return ""
    less = 1 - found.best.program_seconds / found.best.seconds
    return f"; its program is predicted to take {less:.1%} less than its blocks, which the bound does not speak of"


def again(found: SolvedStep, parts: list[Part]) -> str:
    """`full 3, selective 9` of these parts' blocks; "nothing"."""
    problem = found.problem
    keeps = [problem.keeps[problem.kinds[k]][found.plan.points[k]] for p in parts for k in range(p.first, p.stop)]
    counts = Counter(SAID.get(keep, TENSORS) for keep in keeps if keep != "all")
    return ", ".join(f"{word} {count}" for word, count in sorted(counts.items())) or "nothing"


def _tried(own: SolvedStep, found: JointResult) -> StepTried:
    size, again_ = own.program_bytes or own.peak_bytes, again(own, list(own.plan.parts))
    why = why_not(own, found.best, found.level, found.room_bytes)
    return StepTried(**vars(own.problem.choice), again=again_, outcome=why, blocks_seconds=own.seconds,
                     program_seconds=own.program_seconds, peak_bytes=size)  # fmt: skip


def why_not(own: SolvedStep, best: SolvedStep, level: int = SPEED, room_bytes: float = inf) -> str:
    """Like is compared with like: programs, else the costs of blocks. `room_bytes`: of a device."""
    if own is best:
        return "chosen"
    if own.program_bytes and not fits(own.program_bytes, room_bytes):
        return "too large"
    if level == RATIO:
        more = own.rest_seconds / best.rest_seconds - 1 if best.rest_seconds else 0.0
        return f"{more:.1%} more communication and replicated work" if more > 0 else "not better"
    if level == MEMORY:
        both = own.program_bytes and best.program_bytes
        more = own.program_bytes / best.program_bytes if both else own.peak_bytes / best.peak_bytes
        return f"{more - 1:.1%} more memory{'' if both else ' (estimated)'}" if more > 1 else "slower, or not simulated"
    if own.program_seconds:
        return f"{own.program_seconds / best.program_seconds - 1:.1%} slower"
    slower = own.seconds / best.seconds - 1
    return f"{slower:.1%} slower (estimated)" if slower > 0 else "not simulated"


def as_dict(found: JointResult, wanted: SearchRequest) -> dict[str, Any]:
    """In SI units."""
    return {
        "best": _found(found, found.best),
        "others": [_found(found, own) for own in found.others],
        **_bounds(found),
        "considered": found.considered,
        "solved": found.solved,
        "global_batch": wanted.step.global_batch,
        "devices": wanted.devices,
    }


def _bounds(found: JointResult) -> dict[str, Any]:
    if found.level == RATIO:
        rest, bound = found.best.rest_seconds, found.bound
        return {"rest_seconds": rest, "bound_rest_seconds": bound, "gap": found.gap}
    if found.level == MEMORY:
        return {"peak_bytes": found.best.peak_bytes, "bound_bytes": found.bound, "gap": found.gap}
    return {"bound_seconds": found.bound, "gap": found.gap}


def _found(result: JointResult, own: SolvedStep) -> dict[str, Any]:
    problem, blocks = own.problem, result.line.blocks
    return {
        **vars(problem.choice),
        "split": own.split.name if own.split else "",
        "step_seconds": own.seconds,
        "program_seconds": own.program_seconds or None,
        "peak_bytes": list(own.timeline.peak_bytes),
        "parts": [
            {"stage": part.stage, "chunk": part.chunk, "first_op": result.line.graph.ops[blocks[part.first].first].name}
            for part in own.plan.parts
        ],
        "recompute": {
            blocks[k].module: problem.keeps[problem.kinds[k]][point]
            for k, point in enumerate(own.plan.points)
            if problem.keeps[problem.kinds[k]][point] != "all"
        },
    }
