"""Exchange of each piece's parameters between replicas, and how much of it a step waits for.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): stage 1 shards the optimizer, so that gradients are reduce-scattered
and updated weights gathered once a step; stage 2 the gradients too, which are scattered after every micro-batch; stage
3 the weights too, which are gathered for every forward and again for every backward. FSDP is stage 3 (or 2, if it
reshards only after the backward) with one block gathered ahead. With groups of `shard` replicas (HSDP) all that is
within a group, and the shards of a gradient are summed over the groups afterwards. Experts that replicas share (expert
parallelism) are exchanged only between replicas that hold the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.estimate.transformer import SHARDED, TrainingRun
from autoshard.estimate.transformer_graph import EMBEDDING, is_of_experts, layer
from autoshard.estimate.transformer_program import LAYERS, BuiltTransformer
from autoshard.ir.layout import largest_shape
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Compute, Program


@dataclass(frozen=True)
class Sync:
    """Seconds of a piece's collectives between replicas: its weights gathered, its gradients reduced.

    `reduce_seconds` is of a reduce-scatter with ZeRO, and of an all-reduce over replicated axes. `parameters` are those
    of a device. `cast_seconds`: FSDP's pass over a gradient before it is reduced, on the device itself.
    """

    parameters: int
    gather_seconds: float
    reduce_seconds: float
    cast_seconds: float = 0.0


@dataclass(frozen=True)
class Syncs:
    embedding: Sync
    layer: Sync
    head: Sync


def syncs(built: BuiltTransformer, run: TrainingRun, hardware: Hardware) -> Syncs:
    """Gradient reductions of one stage's program, for each piece."""
    return Syncs(*(_sync(built, run, hardware, path) for path in (EMBEDDING, layer(LAYERS - 1), "head")))


def replica_mesh(run: TrainingRun) -> Mesh:
    """The devices of a stage: groups of replicas, the replicas in one, the devices of a replica."""
    return Mesh((("replica", run.replicas // run.shards), ("shard", run.shards), ("tp", run.tp)))


def expert_mesh(run: TrainingRun) -> Mesh:
    """The mesh of experts: all replicas that hold the same ones are one group, `ep` devices apart."""
    return Mesh((("replica", 1), ("shard", run.dp // run.ep), ("ep", run.ep), ("cp", run.cp), ("tp", run.tp)))


def _sync(built: BuiltTransformer, run: TrainingRun, hardware: Hardware, path: str) -> Sync:
    counts = held(built, path)
    experts = 0 if run.ep == 1 else counts.experts
    dense = counts.all - experts
    parts = (
        _exchange(dense, run, hardware, replica_mesh(run), ("shard",), run.shards),
        _exchange(experts, run, hardware, expert_mesh(run), ("shard", "cp"), run.expert_shards),
    )
    return Sync(counts.all, *(sum(seconds) for seconds in zip(*parts, strict=True)))


def _exchange(
    count: int, run: TrainingRun, hardware: Hardware, mesh: Mesh, group: tuple[str, ...], shards: int
) -> tuple[float, float, float]:
    """Seconds of gathers, reductions and casts of `count` parameters, sharded over a `group` of axes."""
    if not count:
        return 0.0, 0.0, 0.0

    def seconds(axes: tuple[str, ...], kind: str, size: float) -> float:
        return joint_seconds(hardware, mesh, tuple(map(mesh.index, axes)), kind, size)

    gradient = float(count * run.gradient_bytes)
    if not run.zero:
        return 0.0, seconds(("replica", *group), "all_reduce", gradient), 0.0
    scattered = seconds(group, "reduce_scatter", gradient)
    summed = seconds(("replica",), "all_reduce", gradient / shards)
    bandwidth = hardware.memory_bandwidth * hardware.constant("memory.elementwise")
    cast = count * (run.weight_bytes + run.gradient_bytes) / bandwidth if run.precision in SHARDED else 0.0
    return seconds(group, "all_gather", float(count * run.weight_bytes)), scattered + summed, cast


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters on one device; `experts` counts those in experts."""

    all: int
    experts: int

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(self.all + other.all, self.experts + other.experts)

    def times(self, count: int) -> ParameterCounts:
        return ParameterCounts(self.all * count, self.experts * count)

    def sharded(self, run: TrainingRun, cut: bool = True) -> float:
        """Number of parameters on one device; sharded by ZeRO if `cut`."""
        if not cut:
            return float(self.all)
        return (self.all - self.experts) / run.shards + self.experts / run.expert_shards


@lru_cache(maxsize=4096)
def held(built: BuiltTransformer, path: str) -> ParameterCounts:
    """Parameters of a piece on one device."""
    parameters = [p for p in built.program.parameters if p.path.startswith(f"{path}.")]
    sizes = [math.prod(largest_shape(p.shape, p.layout, built.mesh)) for p in parameters]
    experts = sum(size for p, size in zip(parameters, sizes, strict=True) if is_of_experts(p.path))
    return ParameterCounts(sum(sizes), experts)


def parameter_collectives(program: Program) -> frozenset[int]:
    """Instructions that move a parameter, or a cast of one, rather than an activation: not run per micro-batch, as
    gradients accumulate before they are reduced."""
    values = {parameter.value for parameter in program.parameters}
    indices = set()
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Collective) and instruction.operand in values:
            values.add(instruction.result)
            indices.add(index)
        if isinstance(instruction, Compute) and set(_operands(instruction.operands)) <= values and instruction.operands:
            values.update(instruction.results)
    return frozenset(indices)


def _operands(operands: Iterable[str | None]) -> list[str]:
    return [operand for operand in operands if operand is not None]


def waiting(
    compute: Sequence[float],
    gathers: Sequence[float],
    reductions: Sequence[float],
    overlap: bool,
    slowdown: float = 0.0,
) -> float:
    """Seconds that consecutive pieces wait for their collectives, which run one after the other on their own stream.

    Without `overlap` all of them are exposed. With it, a piece's gather starts with the piece before it, and its
    reduction when it ends: the first gather and the last reduction overlap nothing. Hidden communication slows the
    computation it overlaps by the share `slowdown`.
    """
    everything = sum(gathers) + sum(reductions)
    if not overlap:
        return everything
    device = 0.0
    ready = stream = gathers[0] if gathers else 0.0
    for index, seconds in enumerate(compute):
        begun = max(device, ready)
        device = begun + seconds
        if index + 1 < len(compute) and gathers[index + 1]:
            ready = stream = max(stream, begun) + gathers[index + 1]
        if reductions[index]:
            stream = max(stream, device) + reductions[index]
    exposed = max(device, stream) - sum(compute)
    return exposed + slowdown * (everything - exposed)
