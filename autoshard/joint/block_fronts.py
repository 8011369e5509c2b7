"""The fronts of a split: each block's ways of keeping values, with what its replicas exchange under each ZeRO stage.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): 1 keeps the optimizer's state in shards, and gathers new weights once
a step; 2 scatters the gradients of every micro-batch; 3 keeps weights in shards too, gathered for every forward and
again for every backward. A block's gather runs beside the block before it, its reduction beside the one after, and
slows the computation there; nothing is hidden with several stages, and in blocks that compute again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Floats
from autoshard.joint.block_costs import BlockCosts
from autoshard.solvers.stages.stage_problem import Front

KEEPS = ("all", "expensive", "input")
STAGES, REPLICAS = 0, 1  # axes of `step_mesh`


@dataclass(frozen=True)
class Exchange:
    """Seconds of a block's collectives over its replicas: weights gathered, gradients scattered, or reduced whole."""

    gather_seconds: float
    scatter_seconds: float
    reduce_seconds: float


@dataclass(frozen=True, eq=False)
class BlockFront:
    """`front` of one block; `keeps[point]`. `late_seconds`: its collectives once a step, after its last backward."""

    costs: BlockCosts
    front: Front
    keeps: tuple[str, ...]
    late_seconds: float
    update_seconds: float


def step_mesh(stages: int, replicas: int, tensor: int) -> Mesh:
    """All devices of a step, stages outermost."""
    return Mesh((("pp", stages), ("dp", replicas), ("tp", tensor)))


def exchange(costs: BlockCosts, mesh: Mesh, hardware: Hardware) -> Exchange:
    """Between the replicas of one stage of `mesh`."""

    def seconds(kind: str, size: float) -> float:
        return joint_seconds(hardware, mesh, (REPLICAS,), kind, size)

    held = costs.held
    return Exchange(
        seconds("all_gather", held.moved_bytes),
        seconds("reduce_scatter", held.gradient_bytes),
        seconds("all_reduce", held.gradient_bytes),
    )


def block_front(
    costs: BlockCosts, mesh: Mesh, zero: int, hardware: Hardware, keeps: Sequence[str], first: bool
) -> BlockFront:
    """Points in the order of `keeps`. `first`: nothing runs before the block's forward and after its backward, so that
    its gather and what its gradients need are not hidden; of the late collectives of others the front counts nothing
    (see step_costs.py for what a stage waits)."""
    replicas, held = mesh.sizes[REPLICAS], costs.held
    slow = hardware.constant("overlap.slowdown")
    own = exchange(costs, mesh, hardware) if replicas > 1 else Exchange(0.0, 0.0, 0.0)
    again, kept, working = dict(costs.again_seconds), dict(costs.kept_bytes), dict(costs.working_bytes)
    backward = np.array([costs.backward_seconds + again[keep] for keep in keeps])
    forward = np.full(len(keeps), costs.forward_seconds)
    gathered, scattered = own.gather_seconds * (zero == 3), own.scatter_seconds * (zero >= 2)
    late = _LATE[zero](own)
    update = held.update_seconds / (replicas if zero else 1)
    hidden_forward = forward + gathered if first else _beside(forward, gathered, slow)
    hidden = _beside(backward, gathered, slow) + scattered if first else _beside(backward, gathered + scattered, slow)
    alone = np.array([mesh.sizes[STAGES] > 1 or keep != "all" for keep in keeps])  # these are in no bucket
    front = Front(
        np.where(alone, forward + gathered, hidden_forward),
        np.where(alone, backward + gathered + scattered, hidden),
        np.array([kept[keep] for keep in keeps]),
        np.full(len(keeps), _static(costs, zero, replicas)),
        update + (np.maximum(late - backward, 0.0) if first else np.zeros(len(keeps))),
        np.array([working[keep] for keep in keeps]) + _gathered(costs, zero, replicas),
    )
    return BlockFront(costs, front, tuple(keeps), late, update)


_LATE: dict[int, Callable[[Exchange], float]] = {
    0: lambda own: own.reduce_seconds,
    1: lambda own: own.scatter_seconds + own.gather_seconds,
    2: lambda own: own.gather_seconds,
    3: lambda own: 0.0,
}


def _beside(seconds: Floats, moved: float, slow: float) -> Floats:
    longest: Floats = np.maximum(seconds, moved) + slow * np.minimum(seconds, moved)
    return longest


def _static(costs: BlockCosts, zero: int, replicas: int) -> float:
    held = costs.held
    weights = held.weights_bytes / (replicas if zero == 3 else 1)
    gradients = held.gradient_bytes / (replicas if zero >= 2 else 1)
    return weights + gradients + held.optimizer_bytes / (replicas if zero else 1) + held.buffer_bytes


def _gathered(costs: BlockCosts, zero: int, replicas: int) -> float:
    """While a block runs under ZeRO 3: its weights and those of the next one; under 2 and 3 its whole gradient."""
    if replicas == 1:
        return 0.0
    return 2 * costs.held.moved_bytes * (zero == 3) + costs.held.gradient_bytes * (zero >= 2)


def exposed_seconds(backward: Sequence[float], late: Sequence[float]) -> float:
    """What a stage waits after its last backward: each block's collectives start as its backward ends, one after the
    other. In the order of the model."""
    device = stream = 0.0
    for own, moved in zip(reversed(backward), reversed(late), strict=True):
        device += own
        stream = max(stream, device) + moved if moved else stream
    return max(0.0, stream - device)
