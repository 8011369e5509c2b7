"""The fronts of a split: each block's ways of keeping values, with what its replicas exchange under each ZeRO stage.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): 1 keeps the optimizer's state in shards, and gathers new weights once
a step; 2 scatters the gradients of every micro-batch; 3 keeps weights in shards too, gathered for every forward and
again for every backward. A block's gather runs beside the block before it, its reduction beside the one after, and
slows the computation there. With several stages, and in blocks that compute again, each weight goes by itself and
nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.costs.moving import local_pass
from autoshard.ir.mesh import Mesh
from autoshard.joint.block_costs import BlockCosts, HeldParameters, Move, ShardedCosts
from autoshard.solvers.stages.stage_problem import Front

KEEPS = ("all", "expensive", "input")
STAGES, REPLICAS, TENSOR = 0, 1, 2  # axes of `step_mesh`
ALL = "all"


@dataclass(frozen=True, eq=False)
class BlockFront:
    """`front` of one block; `keeps[point]`. `late_seconds`: its collectives once a step, after its last backward;
    `copy_seconds` make their operands."""

    costs: BlockCosts
    front: Front
    keeps: tuple[str, ...]
    late_seconds: float
    copy_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class Moved:
    """Seconds of what a block's replicas exchange in each micro-batch: weights gathered for forward and again for
    backward, and the rest of backward, gradients above all."""

    gathered: float = 0.0
    again: float = 0.0
    scattered: float = 0.0


def step_mesh(stages: int, replicas: int, tensor: int) -> Mesh:
    """All devices of a step, stages outermost."""
    return Mesh((("pp", stages), ("dp", replicas), ("tp", tensor)))


def moved(moves: Sequence[Move], mesh: Mesh, hardware: Hardware) -> Moved:
    """Between the replicas of one stage of `mesh`."""
    found = Moved()
    for move in moves:
        axes = (REPLICAS, TENSOR) if move.wide else (REPLICAS,)
        seconds = joint_seconds(hardware, mesh, axes, move.primitive, move.bytes)
        if not move.backward:
            found = replace(found, gathered=found.gathered + seconds)
        elif move.primitive == "all_gather":
            found = replace(found, again=found.again + seconds)
        else:
            found = replace(found, scattered=found.scattered + seconds)
    return found


def ends_seconds(second: Moved | None, before: Moved | None, first_backward: float) -> tuple[float, float]:
    """(forward, backward) that nothing hides at the ends of a line, beyond its blocks' own seconds: the second block is
    gathered with the first one, the one before the last is the first to be gathered again, and the second one's
    gradients are scattered beside what the first's backward takes. None: a block that is gathered by itself."""
    forward = second.gathered if second else 0.0
    backward = before.again if before else 0.0
    return forward, backward + (max(0.0, second.scattered - first_backward) if second else 0.0)


def block_front(
    costs: BlockCosts, zero: int, mesh: Mesh, hardware: Hardware, keeps: Sequence[str], alone: bool
) -> BlockFront:
    """Of weights that every replica has whole. Points in the order of `keeps`. `alone`: it is the only block of its
    kind and the line's first: what its collectives once a step take beyond its backward counts."""
    replicas = mesh.sizes[REPLICAS]
    again, kept, working = dict(costs.again_seconds), dict(costs.kept_bytes), dict(costs.working_bytes)
    backward = np.array([costs.backward_seconds + again[keep] for keep in keeps])
    late, copied = late_seconds(costs.held, zero, mesh, hardware)
    update = costs.held.update_seconds / (replicas if zero else 1)
    front = Front(
        np.full(len(keeps), costs.forward_seconds),
        backward,
        np.array([kept[keep] for keep in keeps]),
        np.full(len(keeps), static_bytes(costs.held, zero, replicas)),
        update + (np.maximum(late - backward, 0.0) if alone else np.zeros(len(keeps))),
        np.array([working[keep] for keep in keeps]),
    )
    return BlockFront(costs, front, tuple(keeps), late, copied, update)


def sharded_front(costs: ShardedCosts, mesh: Mesh, hardware: Hardware, keeps: Sequence[str], first: bool) -> BlockFront:
    """Of weights in shards. `first`: of the line's first block, which has nothing before it to be hidden beside."""
    slow = hardware.constant("overlap.slowdown")
    points = [
        _together(costs.together, mesh, hardware, slow, first)
        if mesh.sizes[STAGES] == 1 and keep == ALL
        else _by_itself(costs.alone, mesh, hardware, keep)
        for keep in keeps
    ]
    used = [costs.together if mesh.sizes[STAGES] == 1 and keep == ALL else costs.alone for keep in keeps]
    held, replicas = costs.alone.held, mesh.sizes[REPLICAS]
    update = held.update_seconds / replicas
    front = Front(
        np.array([forward for forward, _ in points]),
        np.array([backward for _, backward in points]),
        np.array([dict(own.kept_bytes)[keep] for own, keep in zip(used, keeps, strict=True)]),
        np.full(len(keeps), static_bytes(held, 3, replicas)),
        np.full(len(keeps), update),
        np.array([dict(own.working_bytes)[keep] for own, keep in zip(used, keeps, strict=True)]),
    )
    return BlockFront(costs.alone, front, tuple(keeps), 0.0, 0.0, update)


def _by_itself(costs: BlockCosts, mesh: Mesh, hardware: Hardware, keep: str) -> tuple[float, float]:
    """(forward, backward). A block that computes again gathers all its weights for that, and not a third time."""
    own = moved(costs.moves, mesh, hardware)
    again = own.again if keep == ALL else own.gathered
    backward = costs.backward_seconds + dict(costs.again_seconds)[keep]
    return costs.forward_seconds + own.gathered, backward + again + own.scattered


def _together(costs: BlockCosts, mesh: Mesh, hardware: Hardware, slow: float, first: bool) -> tuple[float, float]:
    own = moved(costs.moves, mesh, hardware)
    forward, backward = costs.forward_seconds, costs.backward_seconds
    if first:
        return forward + own.gathered, backward + own.again + own.scattered
    return _beside(forward, own.gathered, slow), _beside(backward, own.again + own.scattered, slow)


def late_seconds(held: HeldParameters, zero: int, mesh: Mesh, hardware: Hardware) -> tuple[float, float]:
    """(collectives, copies before them) of a block once a step."""
    if mesh.sizes[REPLICAS] == 1 or zero == 3:
        return 0.0, 0.0

    def seconds(kind: str, size: float) -> float:
        return joint_seconds(hardware, mesh, (REPLICAS,), kind, size)

    gathers = seconds("all_gather", held.moved_bytes) if zero else 0.0
    reduced = {0: "all_reduce", 1: "reduce_scatter"}.get(zero)
    copied = float(local_pass(hardware).seconds(2 * held.gradient_bytes)) if zero < 2 else 0.0
    return gathers + (seconds(reduced, held.gradient_bytes) if reduced else 0.0), copied


def static_bytes(held: HeldParameters, zero: int, replicas: int) -> float:
    """Of parameters under a stage of ZeRO."""
    weights = held.weights_bytes / (replicas if zero == 3 else 1)
    gradients = held.gradient_bytes / (replicas if zero >= 2 else 1)
    return weights + gradients + held.optimizer_bytes / (replicas if zero else 1) + held.buffer_bytes


def _beside(seconds: float, moving: float, slow: float) -> float:
    return max(seconds, moving) + slow * min(seconds, moving)


def exposed_seconds(backward: Sequence[float], copied: Sequence[float], late: Sequence[float]) -> float:
    """What a stage waits after its last backward: each block's collectives start as its backward ends and their
    operands are made, one after the other. In the order of the model."""
    device = stream = 0.0
    for own, copies, moving in zip(reversed(backward), reversed(copied), reversed(late), strict=True):
        device += own + copies
        stream = max(stream, device) + moving if moving else stream
    return max(0.0, stream - device) + sum(copied)
