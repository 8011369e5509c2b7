"""Which gradients are reduced together, flat, and when: each bucket as soon as backward has made the last of them.

Parameters stand in the order in which backward ends them, and buckets close by the bytes that one device holds: with
fewer where backward has just waited for a collective of its own, for the next of these waits for a bucket that began
shortly before it. The order of buckets is that of their starts, the same on all devices.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from autoshard.ir.graph import DTYPE_BYTES
from autoshard.ir.layout import REPLICATE_PARTIAL
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Fusion
from autoshard.ir.program import Collective, GradientBucket, Instruction, LocalValue, ProgramParameter
from autoshard.program.early_reductions import early_linears
from autoshard.program.module_scopes import operands_of, results_of
from autoshard.program.weights import source_of, weight_steps
from autoshard.redistribute import LOCAL

_Key = tuple[tuple[str, ...], str, int | None]  # axes, dtype, and what a module says
FIRST_BUCKET_BYTES = 2**20  # the first can start early: as DistributedDataParallel's
BUCKET_BYTES = 25 * 2**20  # with so much it closes a bucket, too
BEHIND = 0.5  # of these where backward has just waited for a collective


def gradient_buckets(
    parameters: Sequence[ProgramParameter],
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    mesh: Mesh,
    sum_at: Mapping[int, int],
    fusion: Sequence[Fusion] = (),
) -> tuple[GradientBucket, ...]:
    """Buckets of all parameters that enter with partial gradients; one or more for each set of axes and dtype.
    `sum_at`: see `backward_ends`. `fusion`: the plan's; without it, modules may say what goes together."""
    planned = next((one for one in fusion if one.collective == "all_reduce"), None)
    firsts = frozenset(planned.first if planned else ())
    ended = backward_ends(instructions, values, (p.value for p in parameters), sum_at)
    partial = [p for p in reversed(parameters) if p.trainable and _axes(values[p.value], mesh)]
    open_: dict[_Key, list[ProgramParameter]] = {}
    filled: dict[_Key, int] = {}
    closed: list[GradientBucket] = []
    order = sorted(partial, key=lambda p: -ended.get(p.value, 0))
    behind = _behind(instructions, values, {p.value for p in parameters}, [ended.get(p.value, 0) for p in order])

    def close(key: _Key) -> None:
        members = open_.pop(key)
        after = min(ended.get(p.value, 0) for p in members)
        closed.append(GradientBucket(*key[:2], tuple(p.path for p in members), after))

    for number, parameter in enumerate(order):
        value = values[parameter.value]
        key = _axes(value, mesh), parameter.dtype, parameter.together
        for other in list(open_) if number in firsts else ():
            close(other)
        usual = BUCKET_BYTES * (BEHIND if ended.get(parameter.value, 0) in behind else 1.0)
        limit = _limit(planned, usual if key in filled else FIRST_BUCKET_BYTES, parameter.together)
        open_.setdefault(key, []).append(parameter)
        size = sum(local_bytes(values[p.value], mesh) for p in open_[key])
        if size >= limit:
            filled[key] = size
            close(key)
    for key in list(open_):
        close(key)
    return tuple(sorted(closed, key=lambda bucket: -bucket.after))


def _limit(fusion: Fusion | None, built_in: float, together: int | None) -> float:
    """Bytes at which a bucket closes."""
    if together is not None:
        return math.inf if together else 0.0
    if fusion is None:
        return built_in
    return math.inf if fusion.mode == "index" else fusion.bucket_bytes


def _behind(
    instructions: Sequence[Instruction], values: Mapping[str, LocalValue], stored: set[str], ends: Sequence[int]
) -> set[int]:
    """Ends, in the order of backward, before which it has waited for a collective of activations' gradients since the
    end before."""
    ways = weight_steps(instructions, stored, values)
    moving = [
        i
        for i, step in enumerate(instructions)
        if isinstance(step, Collective) and step.result not in ways and _waits(step, values)
    ]
    linears = {collective: linear for linear, collective in early_linears(instructions).items()}
    waited = sorted(linears.get(i, i) for i in moving)
    before, delayed = len(instructions), set()
    for end in dict.fromkeys(ends):
        if bisect_left(waited, end) < bisect_left(waited, before):
            delayed.add(end)
        before = end
    return delayed


def _waits(step: Collective, values: Mapping[str, LocalValue]) -> bool:
    return bool(step.backward) and step.backward not in LOCAL and values[step.operand].requires_grad


def backward_ends(
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    names: Iterable[str],
    sum_at: Mapping[int, int],
) -> dict[str, int]:
    """Value -> the instruction whose backward completes its gradient: the first that reads it and gives it one.

    `sum_at`: collectives that are scattered with others, and when their parameters have the sum (`weight_buckets`).
    """
    wanted = set(names)
    ways = weight_steps(instructions, wanted, values)
    late = {source_of(instructions[path[0]]): sum_at[path[-1]] for path in ways.values() if path and path[-1] in sum_at}
    ends: dict[str, int] = {}
    for index, instruction in enumerate(instructions):
        if any(values[result].requires_grad for result in results_of(instruction)):
            for name in wanted.intersection(filter(None, operands_of(instruction))):
                ends.setdefault(name, late.get(name, index))
    return ends


def local_bytes(value: LocalValue, mesh: Mesh) -> int:
    """Bytes of a value on the device that holds most."""
    return math.prod(size.largest(mesh) for size in value.local_shape) * DTYPE_BYTES[value.dtype]


def _axes(value: LocalValue, mesh: Mesh) -> tuple[str, ...]:
    """Axes over which its gradient is partial."""
    pairs = zip(mesh.names, value.layout.placements, strict=True)
    return tuple(name for name, placement in pairs if placement == REPLICATE_PARTIAL)
