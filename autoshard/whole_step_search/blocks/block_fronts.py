"""Fronts of a split: each block's ways of keeping values, with what its replicas exchange under each ZeRO stage.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) keeps weights, their gradients and the optimizer's state in shards: 1
gathers weights once a step, adds up whole gradients and scatters them once; 2 scatters those of every micro-batch; 3
gathers weights for every forward and again for every backward. A block's gather overlaps the block before it, its
reduction the block after it, and slows their computation. Under ZeRO 3 with several stages, and in blocks that
recompute, each weight is exchanged by itself and nothing is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.costs.links import joint_link
from autoshard.costs.memory_traffic import local_pass
from autoshard.ir.mesh import Mesh
from autoshard.program.gradient_buckets import BUCKET_BYTES
from autoshard.solvers.stages.stage_problem import Front
from autoshard.whole_step_search.blocks.block_costs import BlockCosts, HeldParameters, Move, ShardedCosts

STAGES, REPLICAS, INNER = range(3)  # axes of `step_mesh`; those of a replica's devices from INNER on
ALL = "all"


@dataclass(frozen=True, eq=False)
class BlockFront:
    """`front` of one block; `keeps[point]`. `late_seconds`: its collectives once a step, after its last backward;
    `copy_seconds` make their operands. `first_seconds`: additional time of its first forward, including its gathers and
    copies, as in `PartCosts`."""

    costs: BlockCosts
    front: Front
    keeps: tuple[str, ...]
    late_seconds: float
    copy_seconds: float
    update_seconds: float
    first_seconds: float = 0.0
    once_copy_seconds: float = 0.0
    gather_seconds: float = 0.0


@dataclass(frozen=True)
class Moved:
    """Seconds of what a block's replicas exchange in each micro-batch: weights gathered for forward and again for
    backward, and the rest of backward, gradients above all."""

    gathered: float = 0.0
    regathered: float = 0.0
    scattered: float = 0.0


def step_mesh(stages: int, replicas: int, inner: tuple[tuple[str, int], ...]) -> Mesh:
    """All devices of a step, stages outermost, the axes of a replica's devices innermost."""
    return Mesh((("pp", stages), ("dp", replicas), *inner))


def with_replicas(inner: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of `step_mesh`: the replicas' axis, and a replica's axes at these positions."""
    return (REPLICAS, *(INNER + axis for axis in inner))


def moved(moves: Sequence[Move], mesh: Mesh, hardware: Hardware) -> Moved:
    """Seconds of the collectives between the replicas of one stage of `mesh`."""
    exchange = Moved()
    for move in moves:
        seconds = joint_seconds(hardware, mesh, with_replicas(move.inner), move.primitive, move.bytes)
        if not move.backward:
            exchange = replace(exchange, gathered=exchange.gathered + seconds)
        elif move.primitive == "all_gather":
            exchange = replace(exchange, regathered=exchange.regathered + seconds)
        else:
            exchange = replace(exchange, scattered=exchange.scattered + seconds)
    return exchange


def ends_seconds(second: Moved | None, before: Moved | None, first_backward: float) -> tuple[float, float]:
    """Seconds (forward, backward) exposed at the ends of a line, beyond its blocks' own: the second block is gathered
    with the first one, the one before the last is the first to be gathered again, and the second one's gradients are
    scattered during the first's backward. None: a block that is gathered by itself."""
    forward = second.gathered if second else 0.0
    backward = before.regathered if before else 0.0
    return forward, backward + (max(0.0, second.scattered - first_backward) if second else 0.0)


@lru_cache(maxsize=4096)
def block_front(
    costs: BlockCosts, zero: int, mesh: Mesh, hardware: Hardware, keeps: tuple[str, ...], alone: bool
) -> BlockFront:
    """Cost curve of a block whose weights every replica holds whole during a step. Points in the order of `keeps`.
    `alone`: it is the only block of its kind and the line's first, so its collectives once a step count only beyond its
    backward, and nothing hides its others."""
    replicas, slow = mesh.sizes[REPLICAS], hardware.constant("overlap.slowdown")
    recompute, kept_bytes, working = dict(costs.recompute_seconds), dict(costs.saved_bytes), dict(costs.working_bytes)
    exchange = moved(costs.moves, mesh, hardware)  # gathers are of what goes with no others
    in_row = alone or takes_turns(mesh, hardware)
    backward = np.array(
        [
            _beside(
                costs.backward_seconds + recompute[keep],
                exchange.scattered,
                slow,
                in_row,
                0.0 if alone else _free(costs, keep, mesh),
            )
            + exchange.regathered
            for keep in keeps
        ]
    )
    late, copied = late_seconds(costs.held, zero, mesh, hardware)
    update = costs.held.update_share(replicas) if zero else costs.held.update_seconds
    gathered, copies = gathered_seconds(costs.held, zero, mesh, hardware)
    first = _beside(costs.forward_seconds, gathered, slow, in_row) - costs.forward_seconds + copies
    front = Front(
        np.full(len(keeps), costs.forward_seconds + exchange.gathered),
        backward,
        np.array([kept_bytes[keep] for keep in keeps]),
        np.full(len(keeps), static_bytes(costs.held, zero, replicas)),
        update + (np.maximum(late - backward, 0.0) if alone else np.zeros(len(keeps))),
        np.array([working[keep] for keep in keeps]),
        max(0.0, first if mesh.sizes[STAGES] == 1 else copies),  # gathers of later stages are hidden
    )
    return BlockFront(costs, front, keeps, late, copied, update, first, min(first, copies), gathered)


@lru_cache(maxsize=4096)
def sharded_front(
    costs: ShardedCosts, mesh: Mesh, hardware: Hardware, keeps: tuple[str, ...], first: bool
) -> BlockFront:
    """Cost curve of a block with sharded weights. `first`: True for the line's first block, which has no block before
    it to hide its gather."""
    slow = hardware.constant("overlap.slowdown")
    points = [
        _together(costs.together, mesh, hardware, slow, first)
        if mesh.sizes[STAGES] == 1 and keep == ALL
        else _by_itself(costs.alone, mesh, hardware, keep)
        for keep in keeps
    ]
    used = [costs.together if mesh.sizes[STAGES] == 1 and keep == ALL else costs.alone for keep in keeps]
    held, replicas = costs.alone.held, mesh.sizes[REPLICAS]
    update = held.update_share(replicas)
    late, copied = late_seconds(held, 3, mesh, hardware)
    front = Front(
        np.array([forward for forward, _ in points]),
        np.array([backward for _, backward in points]),
        np.array([dict(block.saved_bytes)[keep] for block, keep in zip(used, keeps, strict=True)]),
        np.full(len(keeps), static_bytes(held, 3, replicas)),
        np.full(len(keeps), update),
        np.array([dict(block.working_bytes)[keep] for block, keep in zip(used, keeps, strict=True)]),
    )
    return BlockFront(costs.alone, front, keeps, late, copied, update)


def _by_itself(costs: BlockCosts, mesh: Mesh, hardware: Hardware, keep: str) -> tuple[float, float]:
    """Seconds (forward, backward). A block that recomputes gathers all its weights for that, and not a third time."""
    exchange = moved(costs.moves, mesh, hardware)
    regathered = exchange.regathered if keep == ALL else exchange.gathered
    backward = costs.backward_seconds + dict(costs.recompute_seconds)[keep]
    return costs.forward_seconds + exchange.gathered, backward + regathered + exchange.scattered


def _together(costs: BlockCosts, mesh: Mesh, hardware: Hardware, slow: float, first: bool) -> tuple[float, float]:
    exchange = moved(costs.moves, mesh, hardware)
    forward, backward = costs.forward_seconds, costs.backward_seconds
    forward = _beside(forward, exchange.gathered, slow, first)
    if takes_turns(mesh, hardware):
        together = _beside(backward, exchange.regathered, slow, first)
        return forward, _beside(together, exchange.scattered, slow, True, 0.0 if first else _free(costs, ALL, mesh))
    return forward, _beside(backward, exchange.regathered + exchange.scattered, slow, first)


def late_seconds(held: HeldParameters, zero: int, mesh: Mesh, hardware: Hardware) -> tuple[float, float]:
    """Seconds (collectives, copies before them) of a block once a step: gradients that are sums over replicas, and
    those that are sums over other devices of a replica, in flat buckets, if no micro-batch has summed them."""
    several = mesh.sizes[REPLICAS] > 1
    summed = [part for part in held.inner if part.summed]
    if zero == 0:
        alone = held.gradient_bytes - sum(part.gradient_bytes for part in summed)
        seconds = joint_seconds(hardware, mesh, (REPLICAS,), "all_reduce", alone) if several else 0.0
        seconds += sum(
            _bucket_share(part.gradient_bytes, with_replicas(part.summed), mesh, hardware) for part in summed
        )
        copied = held.gradient_bytes if several else held.gradient_bytes - alone
        return seconds, float(local_pass(hardware).seconds(2 * copied)) if copied else 0.0
    seconds, copied = 0.0, 0.0
    if zero == 1 and several:
        alone = held.gradient_bytes - sum(part.gradient_bytes for part in held.inner)
        seconds += joint_seconds(hardware, mesh, (REPLICAS,), "reduce_scatter", alone)
        for part in held.inner:
            over = tuple(axis for axis in part.cut if axis in part.summed)
            size = part.gradient_bytes / part.times * _times(over, mesh)
            seconds += joint_seconds(hardware, mesh, with_replicas(over), "reduce_scatter", size)
    for part in summed:
        left = tuple(INNER + axis for axis in part.summed if axis not in part.cut)
        size = part.gradient_bytes / part.times / mesh.sizes[REPLICAS]
        seconds += _bucket_share(size, left, mesh, hardware) if left else 0.0
        copied += 2 * size if left else 0.0
    return seconds, float(local_pass(hardware).seconds(copied)) if copied else 0.0


def _bucket_share(size: float, axes: tuple[int, ...], mesh: Mesh, hardware: Hardware) -> float:
    """Seconds to all-reduce gradients that share a bucket with others."""
    whole = max(size, float(BUCKET_BYTES))
    return joint_seconds(hardware, mesh, axes, "all_reduce", whole) * size / whole


def _times(inner: tuple[int, ...], mesh: Mesh) -> int:
    return math.prod(mesh.sizes[INNER + axis] for axis in inner)


def gathered_seconds(held: HeldParameters, zero: int, mesh: Mesh, hardware: Hardware) -> tuple[float, float]:
    """Seconds (collective, copies into and out of flat tensors) of a block's weights that are gathered once a step."""
    if mesh.sizes[REPLICAS] == 1 or zero not in (1, 2):
        return 0.0, 0.0
    passes = 2 * held.moved_bytes * (1 + 1 / mesh.sizes[REPLICAS])
    copies = float(local_pass(hardware).seconds(passes))
    alone = held.moved_bytes - sum(part.moved_bytes for part in held.inner)
    seconds = joint_seconds(hardware, mesh, (REPLICAS,), "all_gather", alone)
    for part in held.inner:
        seconds += joint_seconds(hardware, mesh, with_replicas(part.cut), "all_gather", part.moved_bytes)
    return seconds, copies


def static_bytes(held: HeldParameters, zero: int, replicas: int) -> float:
    """Bytes of parameters at a level of ZeRO: shards, and whole tensors held in addition through the step."""
    stored = held.stored_share(replicas) if zero else held.weights_bytes + held.gradient_bytes + held.optimizer_bytes
    whole = held.moved_bytes if zero in (1, 2) else 0.0
    return stored + whole + (held.gradient_bytes if zero == 1 else 0.0) + held.buffer_bytes


def takes_turns(mesh: Mesh, hardware: Hardware) -> bool:
    """Do collectives between replicas and those inside one, for which computation waits, share a link?"""
    if mesh.sizes[REPLICAS] == 1:
        return False
    link = joint_link(hardware, mesh, (REPLICAS,)).name
    inner = (axis for axis in range(INNER, len(mesh.sizes)) if mesh.sizes[axis] > 1)
    return any(joint_link(hardware, mesh, (axis,)).name == link for axis in inner)


def _free(costs: BlockCosts, keep: str, mesh: Mesh) -> float:
    """Seconds of a backward that shares its link before computation waits for the link. Recomputation comes first. 0 if
    a replica has a second axis, over which weights are exchanged too: programs hide less there."""
    if len(mesh.sizes) > INNER + 1:
        return 0.0
    forward, backward = costs.free_seconds
    return backward if keep == ALL else min(forward, dict(costs.recompute_seconds)[keep])


def _beside(seconds: float, moving: float, slow: float, in_row: bool, free: float = 0.0) -> float:
    """Seconds of computation overlapped with `moving`. `in_row`: it waits for a collective, after `free` seconds."""
    hidden = min(moving, free) if in_row else min(seconds, moving)
    return seconds + moving - hidden + slow * hidden


def late_exposed(backward: Sequence[float], late: Sequence[float], mesh: Mesh, hardware: Hardware) -> float:
    """Additional seconds of a stage's last backward and its end, for gradients that are scattered once (ZeRO 1): hidden
    collectives slow the computation that hides them."""
    if takes_turns(mesh, hardware):
        return sum(late)
    exposed = exposed_seconds(backward, [0.0] * len(late), late)
    return exposed + hardware.constant("overlap.slowdown") * (sum(late) - exposed)


def exposed_seconds(backward: Sequence[float], copied: Sequence[float], late: Sequence[float]) -> float:
    """Exposed seconds of a stage after its last backward: each block's collectives start once its backward ends and
    their operands are made, one after the other. Arguments are in the order of the model."""
    device = stream = 0.0
    for computing, copies, moving in zip(reversed(backward), reversed(copied), reversed(late), strict=True):
        device += computing + copies
        stream = max(stream, device) + moving if moving else stream
    return max(0.0, stream - device) + sum(copied)
