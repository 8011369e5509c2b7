"""Buckets of stored weights that are gathered together: those of a block, whose modules stand in one item of a list.

In mixed precision some weights move in low precision and norms in high: they go together all the same, as bytes, for
their gradients are summed in one dtype.

What comes before the first block goes with it, for nothing could hide its gather; a small rest goes with the block
before it. A weight that is also used elsewhere, such as a tied embedding, goes by itself; one that is also read other
than through its gather is in no bucket, so that all of its gradient comes at once. The bucket used last in forward is
used first in backward, and stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Fusion
from autoshard.ir.program import Collective, Compute, Instruction, LocalValue, Program, ProgramParameter, WeightBucket
from autoshard.program.gradient_buckets import FIRST_BUCKET_BYTES, local_bytes
from autoshard.program.module_scopes import operands_of
from autoshard.program.weights import source_of, weight_steps, weight_ways
from autoshard.redistribute import LOCAL

_Uses = dict[str, tuple[list[int], list[int]]]


@dataclass(frozen=True)
class _Gather:
    """A collective that can go with others. `block` is "" outside all blocks; `alone` if it is used elsewhere."""

    position: int
    axes: tuple[str, ...]
    dtype: str  # of its gradient
    block: str
    alone: bool
    last: int  # the last instruction that uses it
    regathered: bool
    once: bool


def weight_buckets(
    parameters: Sequence[ProgramParameter],
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    mesh: Mesh,
    fusion: Sequence[Fusion] = (),
    once: bool = False,
) -> tuple[WeightBucket, ...]:
    """Buckets in the order of first use; one for each set of axes and dtype of gradients in a block, or by the plan's
    `fusion`. `once`: the step gathers weights once (ZeRO 1 and 2); those gathered again go by themselves."""
    all_gather = next((one for one in fusion if one.collective == "all_gather"), None)
    limit = None if all_gather is None else all_gather.bucket_bytes

    def size(group: list[_Gather]) -> int:
        steps = [instructions[gather.position] for gather in group]
        return sum(local_bytes(values[step.result], mesh) for step in steps if isinstance(step, Collective))

    runs: list[list[_Gather]] = []
    for gather in _apart(_gathers(parameters, instructions, values, once)):
        if runs and not (gather.alone or runs[-1][-1].alone) and runs[-1][-1].block == gather.block:
            runs[-1].append(gather)
        else:
            runs.append([gather])
    runs = _merged(runs, size, limit)
    ends = [max(gather.last for gather in run) for run in runs]
    return tuple(
        bucket
        for i, run in enumerate(runs)
        for bucket in _buckets(_split(run, size, limit), i, retained=ends[i] == max(ends))
    )


def _split(run: list[_Gather], size: Callable[[list[_Gather]], int], limit: float | None) -> list[list[_Gather]]:
    """Groups of gathers that go together, in order of their first: one per set of axes and gradient dtype, or several
    of at most `limit` bytes."""
    kinds: dict[tuple[tuple[str, ...], str], list[list[_Gather]]] = {}
    for gather in run:
        groups = kinds.setdefault((gather.axes, gather.dtype), [])
        if groups and (limit is None or size([*groups[-1], gather]) <= limit):
            groups[-1].append(gather)
        else:
            groups.append([gather])
    return sorted((group for groups in kinds.values() for group in groups), key=lambda group: group[0].position)


def _buckets(groups: list[list[_Gather]], block: int, retained: bool) -> list[WeightBucket]:
    return [
        WeightBucket(
            group[0].axes,
            group[0].dtype,
            tuple(g.position for g in group),
            block,
            retained and any(g.regathered for g in group),
            group[0].once,
        )
        for group in groups
    ]


def _apart(gathers: list[_Gather]) -> list[_Gather]:
    """Gathers, marked `alone` if they stay in use over a block, as a tied embedding does."""
    blocks = [gather.position for gather in gathers if gather.block]
    return [
        replace(
            gather, alone=gather.alone or (not gather.block and any(gather.position < b < gather.last for b in blocks))
        )
        for gather in gathers
    ]


def _merged(
    groups: list[list[_Gather]], size: Callable[[list[_Gather]], int], limit: float | None
) -> list[list[_Gather]]:
    """Groups, with those before the first block and small rests joined to it; given a `limit`, blocks within it too."""
    result: list[list[_Gather]] = []
    for group in groups:
        before = result[-1] if result else None
        if before is None or before[-1].alone or group[0].alone:
            result.append(list(group))
        elif _is_remainder(before, group, size(group)) if limit is None else size([*before, *group]) <= limit:
            before.extend(group)
        else:
            result.append(list(group))
    return result


def _is_remainder(before: list[_Gather], group: list[_Gather], size: int) -> bool:
    """True if `before` is outside all blocks and `group` in one, or if `group` is a small rest."""
    first = all(gather.block == "" for gather in before) and group[0].block != ""
    return first or (group[0].block == "" and size < FIRST_BUCKET_BYTES)


def gathered_once(
    parameters: Sequence[ProgramParameter], instructions: Sequence[Instruction], values: Mapping[str, LocalValue]
) -> frozenset[int]:
    """Positions of the collectives that can go with others in a step that gathers weights once."""
    flat = [(i, step) for i, step in enumerate(instructions) if isinstance(step, Collective) and _is_flat(step)]
    return frozenset(gather.position for gather in _gathers_of(flat, parameters, instructions, values, once=True))


def _gathers(
    parameters: Sequence[ProgramParameter],
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    once: bool,
) -> list[_Gather]:
    """Collectives that gather a trainable weight, alone on its way: `once` a step, or again at most once."""
    steps = [(i, step) for i, step in enumerate(instructions) if isinstance(step, Collective) and _is_flat(step)]
    gathering = [(i, step) for i, step in steps if (step.once if once else step.regathered)]
    return _gathers_of(gathering, parameters, instructions, values, once)


def _gathers_of(
    flat: Sequence[tuple[int, Collective]],
    parameters: Sequence[ProgramParameter],
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    once: bool,
) -> list[_Gather]:
    """Gathers among the collectives `flat`. Weights that are gathered `once` a step may be cast afterwards."""
    steps = weight_steps(instructions, [p.value for p in parameters], values)
    trainable = {p.value for p in parameters if p.trainable}
    uses = _uses(instructions)
    moved_on = _moved_on(steps, instructions, uses, once)
    gathers = []
    for index, step in flat:
        chain = steps.get(step.result, ())
        if index in moved_on or not chain:
            continue
        parameter = source_of(instructions[chain[0]]) or ""
        readers, rebuilders = uses.get(step.result, ([], []))
        moved = any(isinstance(instructions[i], Collective) for i in chain[:-1])
        only = all(uses[source_of(instructions[i]) or ""][0] == [i] for i in chain)  # nothing else reads its way
        if parameter not in trainable or not only or moved or len(rebuilders) > 1 or not readers:
            continue
        blocks = {block_of(instructions[user].module) for user in (*readers, *rebuilders)}
        block = blocks.pop() if len(blocks) == 1 else None
        dtype = step.gradient_dtype or values[step.result].dtype
        gather = _Gather(index, step.axes, dtype, block or "", block is None, max(readers), bool(rebuilders), step.once)
        gathers.append(gather)
    return gathers


def _moved_on(
    steps: Mapping[str, tuple[int, ...]], instructions: Sequence[Instruction], uses: _Uses, once: bool
) -> frozenset[int]:
    """Collectives after which a weight moves on over the network, or to values whose whole way backward redoes: a bias,
    of which it redoes none, may be cast, masked or sliced after. With `once`, those before a collective."""
    moved = set()
    for name, chain in steps.items():
        for place, index in enumerate(chain):
            after = [instructions[i] for i in chain[place + 1 :]]
            if once:
                goes_on = any(isinstance(step, Collective) for step in after[:1])
            else:
                goes_on = bool(after and uses.get(name, ([], []))[1]) or any(map(_sends, after))
            moved |= {index} if goes_on else set()
    return frozenset(moved)


def _sends(step: Instruction) -> bool:
    return isinstance(step, Collective) and step.forward not in ("", *LOCAL)


def _is_flat(step: Collective) -> bool:
    return (step.forward, step.backward) == ("all_gather", "reduce_scatter")


def _uses(instructions: Sequence[Instruction]) -> _Uses:
    """Value -> instructions that read it, and those whose backward remakes it."""
    uses: _Uses = {}
    for index, instruction in enumerate(instructions):
        for name in filter(None, operands_of(instruction)):
            uses.setdefault(name, ([], []))[0].append(index)
        if isinstance(instruction, Compute):
            for name in instruction.regathered:
                uses.setdefault(name, ([], []))[1].append(index)
    return uses


def block_of(module: str) -> str:
    """Module path up to its first number: `model.layers.3` of model.layers.3.mlp.up_proj; "" without one."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return ""


def gradient_ready_at(buckets: Sequence[WeightBucket]) -> dict[int, int]:
    """Gather -> instruction after whose backward its parameter has its gradient: when the first bucket of the next
    block is complete."""
    return {position: end for bucket, end in scattered_until(buckets) for position in bucket.gathers}


def scattered_until(buckets: Sequence[WeightBucket]) -> list[tuple[WeightBucket, int]]:
    """Buckets in the order of backward, each with the instruction whose backward completes the first bucket of the next
    block, at which its reduce-scatter is waited for; 0 without one."""
    order = sorted(buckets, key=lambda bucket: -min(bucket.gathers))
    return [
        (bucket, next((min(later.gathers) for later in order[i + 1 :] if later.block != bucket.block), 0))
        for i, bucket in enumerate(order)
    ]


def parameter_paths(program: Program, bucket: WeightBucket) -> tuple[str, ...]:
    """Paths of the bucket's weights, in order."""
    paths = {p.value: p.path for p in program.parameters}
    steps = program.once(weight_ways)
    ordered = []
    for position in bucket.gathers:
        step = program.instructions[position]
        assert isinstance(step, Collective)
        ordered.append(paths[source_of(program.instructions[steps[step.result][0]]) or ""])
    return tuple(ordered)


def paths_by_dtype(program: Program, bucket: WeightBucket) -> dict[str, list[str]]:
    """Paths of the bucket's weights by the dtype in which each is gathered."""
    by_dtype: dict[str, list[str]] = {}
    for position, path in zip(bucket.gathers, parameter_paths(program, bucket), strict=True):
        step = program.instructions[position]
        assert isinstance(step, Collective)
        by_dtype.setdefault(program.value(step.result).dtype, []).append(path)
    return by_dtype


def bucket_bytes(program: Program, bucket: WeightBucket) -> float:
    """Bytes of the bucket's whole weights, on the device that holds most."""
    steps = [program.instructions[position] for position in bucket.gathers]
    return float(sum(local_bytes(program.value(s.result), program.mesh) for s in steps if isinstance(s, Collective)))
