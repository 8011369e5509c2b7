"""A step that was chosen, as a plan: the split of every block on the mesh of one stage, its parts, what blocks keep.

Every operator takes the choice of the block that stands for its kind on the tensor-parallel axis, and the batch on the
replicas' axis; redistributions and storage follow by the solver. The graph is that of one micro-batch of all replicas.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.formulation.formulate import Allowed, Formulation, formulate
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, Certificate, Plan, StagePart, StepPlan
from autoshard.ir.problem import Node
from autoshard.joint.block_line import shortened
from autoshard.joint.joint_search import JointResult, StepFound
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.rebatch import batch_dims, rebatched
from autoshard.search.build_plan import Origin, plan_of, priced
from autoshard.search.whole_step import predicted
from autoshard.solvers.common.result import FEASIBLE
from autoshard.solvers.common.solver_options import Options
from autoshard.units import format_seconds

DATA, TENSOR = 0, 1  # axes of a stage's mesh
MOST_PLANS = 3  # made of what was found


def joint_plan(found: JointResult, hardware: Hardware, origin: Origin) -> tuple[Graph, Plan]:
    """The graph of a micro-batch and the plan of `found.best`, predicted from its own program."""
    best, line = found.best, found.line
    choice = best.problem.choice
    graph = rebatched(line.graph, choice.replicas * choice.micro_batch)
    mesh = Mesh((("dp", choice.replicas), ("tp", choice.tensor)))
    formulation = formulate(graph, mesh, hardware, float("inf"), _allowed(found, graph, mesh))
    stored = _stored(formulation, choice.zero == 3)
    solution = solvers.solve(stored.problem, "auto", Options(rough=True))
    plan = plan_of(stored, solution, origin, best.problem.capacity_bytes, "search")
    step = StepPlan(
        choice.micro_batches, choice.schedule, choice.virtual_stages, _parts(best, found), _kept(best, found)
    )
    made = priced(replace(plan, step=step), graph, hardware)
    told = "stages, micro-batches, what is computed again, ZeRO and the mesh were searched for together: "
    told += f"{format_seconds(best.seconds)} by the costs of blocks, {found.gap:.2%} above the bound for any order of "
    told += "undivided forwards and backwards"
    search = replace(made.search, notes=(*made.search.notes, told))
    return graph, predicted(replace(made, certificate=_certificate(made), search=search), graph)


def _certificate(plan: Plan) -> Certificate:
    """Nothing is proved of a micro-batch alone: its split was chosen for the whole step."""
    own = plan.certificate
    return replace(
        own, status=FEASIBLE, lower_bound_seconds=0.0, level_objective=plan.predicted_seconds, level_bound=0.0
    )


def confirmed(found: JointResult, hardware: Hardware, origin: Origin) -> tuple[JointResult, Graph, Plan]:
    """The best by its own program, of those that may be: after the first, others are made into plans while the blocks'
    costs say that they take less than the best program so far."""
    made: list[tuple[float, JointResult, Graph, Plan]] = []
    for other in (found.best, *found.others)[:MOST_PLANS]:
        if made and other.seconds >= min(seconds for seconds, *_ in made):
            break
        rest = tuple(own for own in (found.best, *found.others) if own is not other)
        graph, plan = joint_plan(replace(found, best=other, others=rest), hardware, origin)
        made.append((step_seconds(plan), replace(found, best=other, others=rest), graph, plan))
    _, result, graph, plan = min(made, key=lambda own: own[0])
    return result, graph, plan


def step_seconds(plan: Plan) -> float:
    """Predicted of the whole step, from the plan's own program."""
    return plan.step.predicted_seconds or plan.predicted_seconds


def _parts(best: StepFound, found: JointResult) -> tuple[StagePart, ...]:
    if best.problem.choice.stages == 1:
        return ()
    blocks, ops = found.line.blocks, found.line.graph.ops
    return tuple(StagePart(part.stage, part.chunk, ops[blocks[part.first].first].name) for part in best.plan.parts)


def _kept(best: StepFound, found: JointResult) -> tuple[BlockPolicy, ...]:
    problem, policies = best.problem, []
    for k, point in enumerate(best.plan.points):
        keep = problem.keeps[problem.kinds[k]][point]
        if keep != "all":
            policies.append(BlockPolicy(found.line.blocks[k].module, keep))
    return tuple(policies)


def _allowed(found: JointResult, graph: Graph, mesh: Mesh) -> Allowed:
    """Strategies with the split's choice on the tensor-parallel axis, which cut the batch on the other."""
    short, split = shortened(found.line), found.best.split
    assert split is not None
    chosen = {own.op: own.strategy for own in split.plan.ops}
    wanted: dict[str, str] = {}
    for block in found.line.blocks:
        stands = short.line.blocks[short.represents[block.kind]]
        pairs = zip(found.line.ops(block), short.line.ops(stands), strict=True)
        wanted |= {op.name: chosen[other.name] for op, other in pairs}
    batch = batch_dims(graph)

    def allowed(op: Op, strategy: Strategy) -> bool:
        if mesh.sizes[TENSOR] > 1 and str(strategy.choices[TENSOR]) != wanted[op.name]:
            return False
        return mesh.sizes[DATA] == 1 or _cuts_batch(op, strategy, batch)

    return allowed


def _cuts_batch(op: Op, strategy: Strategy, batch: dict[str, int]) -> bool:
    """Is every operand and result that has the batch cut there over the replicas, and nothing else? What has none, such
    as a cast of a weight, may be done on shards."""
    if batch.keys().isdisjoint((*op.operands, *op.results)):
        return True
    pairs = [*zip(op.operands, strategy.operands, strict=True), *zip(op.results, strategy.results, strict=True)]
    for name, layout in pairs:
        if name is None or layout is None:
            continue
        own = layout.placements[DATA]
        if name in batch and not (isinstance(own, Shard) and own.dim == batch[name]):
            return False
        if name not in batch and isinstance(own, Shard):
            return False
    return True


def _stored(formulation: Formulation, sharded: bool) -> Formulation:
    """Parameters in shards over the replicas, where they can be, or whole there."""
    nodes: list[Node] = []
    for site, node in zip(formulation.sites, formulation.problem.nodes, strict=True):
        if site.kind == "parameter":
            cut = np.array([isinstance(layout.placements[DATA], Shard) for layout in site.layouts])
            wanted = cut if sharded and cut.any() else ~cut
            node = replace(node, seconds=np.where(wanted, node.seconds, np.inf))
        nodes.append(node)
    return replace(formulation, problem=replace(formulation.problem, nodes=tuple(nodes)))
