"""Applies a split of one replica to the mesh of all replicas: batch split over them, parameters whole or in shards.

Every operator has the choice of the block that stands for its kind on the axes of a replica, and the batch on the
replicas' axis; the solver chooses redistributions and storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.constraints.apply_pins import pinned
from autoshard.constraints.pins import Pin
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import Allowed, Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import CAST, Graph, Op
from autoshard.ir.layout import REPLICATE_PARTIAL, Layout, Placement, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Node
from autoshard.program.lower import chosen_strategies
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.resize.rebatch import batch_dims
from autoshard.solvers.common.result import Solution
from autoshard.solvers.common.solver_options import Options
from autoshard.whole_step_search.blocks.block_line import BlockLine, ShortGraph
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.blocks.stage_axes import DATA, REPLICAS, in_space, same_inside
from autoshard.whole_step_search.blocks.weight_shards import (
    is_summed,
    is_whole,
    may_cast,
    shard_layouts,
    weight_sites,
    weight_uses,
)

Placements = tuple[Placement, ...]


def replicated_split(
    line: BlockLine,
    captured: Graph,
    short: ShortGraph,
    split: BlockSplit,
    replicas: int,
    sharded: bool,
    hardware: Hardware,
    micro_batches: int = 1,
    pins: Sequence[Pin] = (),
) -> tuple[Formulation, Solution]:
    """The split for the graph of `line`, which has the samples of all `replicas`: `captured` resized to them, whose
    batch is known (another dim may have the size of the resized one); `short` is the graph that was split. `sharded`:
    parameters in shards over the replicas, if they can be. `micro_batches`: of a step, over which costs once a step are
    shared out. `pins` hold as in any plan."""
    mesh = Mesh(((REPLICAS, replicas), *split.mesh.axes))
    batch = batch_dims(captured) if replicas > 1 else {}  # of one sample alone it could not be followed
    wanted = _wanted(line, short, split)
    weights = {p.tensor for p in line.graph.parameters} if sharded and replicas > 1 else set()
    allowed = _allowed(
        wanted, split, mesh, batch, weights, {p.tensor for p in line.graph.parameters} | {*line.graph.weights}
    )
    context = PlanningContext(line.graph, mesh, hardware, split.plan.search.all_to_all, micro_batches)
    formulation = formulate(context, allowed)
    formulation = split.left.storage(pinned(formulation, pins).formulation if pins else formulation)
    stored = _in_shards(formulation, wanted) if weights else _whole(formulation)
    return stored, solvers.solve(stored.problem, "auto", Options(rough=True))


def _wanted(line: BlockLine, short: ShortGraph, split: BlockSplit) -> dict[str, Strategy]:
    """Strategy of every operator of the line, on the axes of a replica."""
    chosen = chosen_strategies(split.plan, split.graph)
    wanted: dict[str, Strategy] = {}
    for block in line.blocks:
        stands = short.line.blocks[short.represents[block.kind]]
        pairs = zip(line.ops(block), short.line.ops(stands), strict=True)
        wanted |= {op.name: chosen[other.name] for op, other in pairs}
    return wanted


def _allowed(
    wanted: dict[str, Strategy],
    split: BlockSplit,
    mesh: Mesh,
    batch: dict[str, int],
    weights: set[str],
    without_batch: set[str],
) -> Allowed:
    """Strategies that place on the axes of a replica what is `wanted` there, and split the batch on the other.
    `weights` in shards are cast as the solver likes; what is `without_batch` is split in no more blocks than there."""
    same: dict[
        tuple[object, ...], tuple[bool, Strategy]
    ] = {}  # the strategy beside its id: no other takes it meanwhile

    def allowed(op: Op, strategy: Strategy) -> bool:
        cast = may_cast(op, strategy, weights)
        if cast is not None:
            return cast
        if split.mesh.size > 1:
            exact = tuple(name in without_batch for name in op.operands)
            key = id(strategy), id(wanted[op.name]), exact
            if key not in same:
                same[key] = same_inside(strategy, wanted[op.name], exact), strategy
            if not same[key][0]:
                return False
        return mesh.sizes[DATA] == 1 or in_space(op, strategy, batch)

    return allowed


def _in_shards(formulation: Formulation, wanted: dict[str, Strategy]) -> Formulation:
    """Formulation with parameters in shards over the replicas and over those devices of a replica over which their
    gradients are sums, as far as possible. Over its other devices a weight is cast as it is stored: an exchange after
    the cast would run in every micro-batch."""
    axes = range(len(formulation.mesh.sizes))
    keep: dict[int, list[int]] = {}
    stored: dict[str, tuple[list[int], set[Placements]]] = {}
    inside = weight_uses(formulation.graph, wanted)
    for number, site in weight_sites(formulation, inside):
        uses = [Layout((REPLICATE_PARTIAL, *use.placements)) for use in inside[site.name]]
        free = [is_whole(uses, axis) and is_summed(uses, axis) for axis in axes]
        keep[number] = shard_layouts(site, uses, formulation.mesh.sizes, free)
        held = [axis for axis in axes if not free[axis]]
        stored[site.name] = held, {_on(site.layouts[s], held) for s in keep[number]}
    return narrowed(formulation, keep | _cast_as_stored(formulation, stored))


def _cast_as_stored(
    formulation: Formulation, stored: Mapping[str, tuple[list[int], set[Placements]]]
) -> dict[int, list[int]]:
    """Strategies of casts that take a weight as one of its placements on these axes, if there are any."""
    keep: dict[int, list[int]] = {}
    for number, site in enumerate(formulation.sites):
        op = formulation.graph.by_op.get(site.name) if site.kind == "op" else None
        if op is None or op.target != CAST or op.operands[0] not in stored:
            continue
        axes, placements = stored[op.operands[0] or ""]
        taken = [strategy.operands[0] for strategy in site.strategies]
        matching = [n for n, layout in enumerate(taken) if layout and _on(layout, axes) in placements]
        keep |= {number: matching} if matching else {}
    return keep


def _on(layout: Layout, axes: Sequence[int]) -> Placements:
    return tuple(layout.placements[axis] for axis in axes)


def _whole(formulation: Formulation) -> Formulation:
    """Formulation with parameters whole over the replicas."""
    nodes: list[Node] = []
    for site, node in zip(formulation.sites, formulation.problem.nodes, strict=True):
        if site.kind == "parameter":
            cut = np.array([isinstance(layout.placements[DATA], Shard) for layout in site.layouts])
            node = replace(node, seconds=np.where(cut, np.inf, node.seconds))
        nodes.append(node)
    return replace(formulation, problem=replace(formulation.problem, nodes=tuple(nodes)))
