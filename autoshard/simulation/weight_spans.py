"""Memory of weights in buckets, in addition to the weights themselves: flat tensors in flight, at which steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.ir.graph import DTYPE_BYTES
from autoshard.ir.program import Collective, Program, WeightBucket
from autoshard.program.weight_buckets import scattered_until
from autoshard.simulation.timeline import Held
from autoshard.simulation.working_memory import local_bytes, local_tensor

Flat = tuple[Held, int, int]  # in memory at steps first <= step <= last


def whole_weights(program: Program) -> frozenset[str]:
    """Gathered weights that stay whole from their first use to the last backward that reads them."""
    buckets = [bucket for bucket in program.weight_buckets if bucket.retained or bucket.once]
    return frozenset(step.result for bucket in buckets for step in _steps(program, bucket.gathers))


def flat_weights(program: Program, repeats: dict[int, tuple[int, ...]]) -> Iterator[Flat]:
    """`repeats[i]`: what the backward of instruction i gathers again. A gather's flat tensor lives from where the block
    before it (in backward: after it) comes into use to the last of its weights, what is sent to the first of them."""
    uses = {step: index for index, steps in repeats.items() for step in steps}
    backward = [b for b in program.weight_buckets if not b.retained and any(p in uses for p in b.gathers)]
    for bucket in program.weight_buckets:
        near = [other.gathers[0] for other in program.weight_buckets if 0 <= bucket.block - other.block <= 1]
        yield _whole(program, bucket, bucket.gathers), min(near), max(bucket.gathers)
        yield _sent(program, bucket, bucket.gathers), min(near), min(bucket.gathers)
    for bucket in backward:
        positions = [position for position in bucket.gathers if position in uses]
        blocks = sorted({other.block for other in backward if other.block >= bucket.block})[:2]
        first = max(uses[p] for other in backward if other.block in blocks for p in other.gathers if p in uses)
        start, used = _mirror(program, first), [_mirror(program, uses[p]) for p in positions]
        yield _whole(program, bucket, positions), start, max(used)
        yield _sent(program, bucket, positions), start, min(used)


def flat_gradients(program: Program, accumulates: bool) -> Iterator[Flat]:
    """Flat gradients of buckets, from the first whole gradient to where the next block's reduce-scatter starts, or to
    the end; all the time where ZeRO 1 adds them up."""
    adds = accumulates and program.step.zero == 1
    for bucket, until in scattered_until(program.weight_buckets):
        size = 0.0
        for step in _steps(program, bucket.gathers):
            value = program.value(step.result)
            size += local_tensor(value, program.mesh).numel * DTYPE_BYTES[step.gradient_dtype or value.dtype]
        end = _mirror(program, until) if until else 2 * len(program.instructions)
        if adds and bucket.once:
            yield Held(f"gradients of block {bucket.block}", "gradient", size), 0, 2 * len(program.instructions) + 1
            continue
        yield Held(f"gradients of block {bucket.block}", "gradient", size), _mirror(program, max(bucket.gathers)), end


def _whole(program: Program, bucket: WeightBucket, positions: Sequence[int]) -> Held:
    steps = _steps(program, positions)
    size = sum(local_bytes(program.value(step.result), program.mesh) for step in steps)
    return Held(f"weights of block {bucket.block}", "working", size)


def _sent(program: Program, bucket: WeightBucket, positions: Sequence[int]) -> Held:
    """Shards of the bucket's weights on this device."""
    steps = _steps(program, positions)
    size = sum(local_bytes(program.value(step.operand), program.mesh) for step in steps)
    return Held(f"shards of block {bucket.block}", "working", size)


def _steps(program: Program, positions: Sequence[int]) -> list[Collective]:
    steps = [program.instructions[position] for position in positions]
    return [step for step in steps if isinstance(step, Collective)]


def _mirror(program: Program, index: int) -> int:
    return 2 * len(program.instructions) - 1 - index
