"""The Program of a standard transformer under data and tensor parallelism, sharded as by Megatron-LM.

Shoeybi et al. 2019 (arXiv:1909.08053): column-parallel, then row-parallel linears, heads and vocabulary split; with
sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) what lies between is sharded by sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.costs.expert_layers import EXPERTS
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_graph import TransformerGraph, is_of_experts, transformer_graph
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, Placement, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Floats, Node, Value
from autoshard.ir.program import Collective, Compute, Program
from autoshard.program.lower import lower
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import constants, record
from autoshard.search.build_plan import Origin, plan_of

DATA, EXPERT, CONTEXT, TENSOR = "dp", "ep", "cp", "tp"  # mesh axes; the two in the middle only where they cut
RING, BALANCED = "ring_attention", "reordered_ring_attention"
LAYERS = 2  # of the program: the last one stands for every layer of the model


@dataclass(frozen=True, eq=False)
class BuiltTransformer:
    """The program of one micro-batch on one stage's devices, with its graph and mesh: dp, ep and cp if they shard, tp;
    dp times ep are `TrainingRun.dp`."""

    program: Program
    graph: Graph
    mesh: Mesh


def build(model: Transformer, run: TrainingRun, hardware: Hardware) -> BuiltTransformer:
    """The embedding, two layers and the loss of `model`, one micro-batch per device."""
    uneven = min(model.imbalance, float(run.ep))  # a device has at most all pairs of those that share the experts
    short = replace(model, layers=LAYERS, imbalance=uneven)
    degrees = (run.dp, run.ep, run.cp, run.tp)
    return _built(
        short, run.micro_batch, degrees, run.sequence_parallel, run.precision, run.optimizer, run.overlap, hardware
    )


@lru_cache(maxsize=1024)
def _built(
    model: Transformer, micro_batch: int, degrees: tuple[int, int, int, int], sequence_parallel: bool, precision: str,
    optimizer: str, overlap: bool, hardware: Hardware,
) -> BuiltTransformer:  # fmt: skip
    dp, ep, cp, tp = degrees
    written = transformer_graph(model, micro_batch * dp, precision, optimizer)
    mesh = Mesh(((DATA, dp // ep), *[(EXPERT, ep)] * (ep > 1), *[(CONTEXT, cp)] * (cp > 1), (TENSOR, tp)))
    formulation = _stored_whole(split_formulation(written, mesh, hardware, sequence_parallel))
    solution = solvers.solve(formulation.problem)
    plan = plan_of(formulation, solution, Origin("autoshard estimate"), float("inf"), "megatron")
    program = _balanced(lower(plan, written.graph))
    return BuiltTransformer(program if overlap else _in_a_row(program), written.graph, mesh)


def split_formulation(
    written: TransformerGraph, mesh: Mesh, hardware: Hardware, sequence_parallel: bool
) -> Formulation:
    """Formulation with Megatron-LM's strategies only; each device stores what it reads."""
    stream = "S1" if sequence_parallel else "R"

    def allowed(op: Op, strategy: Strategy) -> bool:
        return _is_wanted(written, op, strategy, mesh, stream)

    return _stored_as_read(formulate(PlanningContext(written.graph, mesh, hardware), allowed))


def _balanced(program: Program) -> Program:
    """Program whose attention rings use Megatron-Core's order of the sequence, which balances work over devices."""
    instructions = (
        replace(i, variant=BALANCED) if isinstance(i, Compute) and i.variant == RING else i
        for i in program.instructions
    )
    return replace(program, instructions=tuple(instructions))


def _in_a_row(program: Program) -> Program:
    """Program without overlap: reductions of activations' gradients run alone."""
    instructions = (replace(i, early=False) if isinstance(i, Collective) else i for i in program.instructions)
    return replace(program, instructions=tuple(instructions))


def _is_wanted(written: TransformerGraph, op: Op, strategy: Strategy, mesh: Mesh, stream: str) -> bool:
    split = written.splits.get(op.name)
    if split is None:  # a cast: it goes along with what it casts
        return True
    result = strategy.results[0].placements
    fixed = op.name in written.graph.once(_constants) or not _shape(written, op)
    tensor = mesh.index(TENSOR)
    batch = [mesh.index(axis) for axis in (DATA, EXPERT) if axis in mesh.names]
    if not fixed and not all(mesh.sizes[axis] == 1 or _fits(result[axis], "S0") for axis in batch):
        return False
    if op.target == EXPERTS and not _is_megatrons(strategy, mesh):
        return False
    if CONTEXT in mesh.names and not fixed and not _along_sequence(written, op, strategy, mesh):
        return False
    if mesh.sizes[tensor] == 1:
        return True
    if split == "vocabulary":
        return strategy.choices[tensor].factor == "vocabulary"
    return _fits(result[tensor], stream if split == "stream" else split)


def _is_megatrons(strategy: Strategy, mesh: Mesh) -> bool:
    """Do tokens go to experts over the expert axis only, and does the tensor axis shard each expert's inner dim?"""
    wanted = {DATA: "t", EXPERT: "t+e", CONTEXT: "t", TENSOR: "f"}
    cut = [
        (axis, choice) for axis, choice, size in zip(mesh.names, strategy.choices, mesh.sizes, strict=True) if size > 1
    ]
    return all(choice.factor == wanted[axis] for axis, choice in cut)


def _along_sequence(written: TransformerGraph, op: Op, strategy: Strategy, mesh: Mesh) -> bool:
    """Does the context axis shard the sequence, dim 1 of (batch, sequence, width)? Attention over it is a ring. If
    heads or rows have their own dims, the shard follows."""
    axis = mesh.index(CONTEXT)
    if record(op.target).work is Work.ATTENTION:
        return strategy.choices[axis].factor == "ring"
    placement = strategy.results[0].placements[axis]
    return _fits(placement, "S1") if len(_shape(written, op)) == 3 else isinstance(placement, Shard)


def _constants(graph: Graph) -> frozenset[str]:
    """Operators whose result is constant."""
    fixed = constants(graph)
    return frozenset(op.name for op in graph.ops if op.results[0] in fixed)


def _shape(written: TransformerGraph, op: Op) -> tuple[int, ...]:
    return written.graph.tensor(op.results[0]).shape


def _fits(placement: Placement, wanted: str) -> bool:
    """Does a placement match? Blocks, units and the gradient's form are left to the solver."""
    text = f"S{placement.dim}" if isinstance(placement, Shard) else str(placement).removesuffix("+")
    return text == wanted


def _stored_whole(formulation: Formulation) -> Formulation:
    """Shards parameters over the tensor axis only, and those of experts also over theirs: optimizer sharding is priced
    once a step, separately."""
    mesh, experts = formulation.mesh, _expert_parameters(formulation.graph)
    nodes: list[Node] = []
    for site, node in zip(formulation.sites, formulation.problem.nodes, strict=True):
        if site.kind == "parameter":
            cut = {EXPERT} & {*mesh.names} if site.name in experts else set()
            wrong = [not _is_cut(layout, mesh, cut) for layout in site.layouts]
            node = replace(node, seconds=np.where(wrong, np.inf, node.seconds))
        nodes.append(node)
    return replace(formulation, problem=replace(formulation.problem, nodes=tuple(nodes)))


def _stored_as_read(formulation: Formulation) -> Formulation:
    """Makes a device store the part of a parameter that it computes with, whatever other redistributions would cost:
    the tensor axis shards it, and its casts, as it shards what their readers need."""
    problem, graph = formulation.problem, formulation.graph
    weights = {parameter.tensor for parameter in graph.parameters}
    weights |= {result for op in graph.ops if {*op.operands} <= weights for result in op.results if op.operands}
    tensor = formulation.mesh.index(TENSOR)
    known: dict[tuple[int, tuple[Layout, ...], tuple[Layout, ...]], Floats] = {}
    values: list[Value] = []
    for value, site in zip(problem.values, formulation.values, strict=True):
        key = id(value.seconds), site.sources, site.targets
        if site.tensor in weights and key not in known:
            moved = [[_cut_dim(s, tensor) != _cut_dim(t, tensor) for t in site.targets] for s in site.sources]
            known[key] = np.where(moved, np.inf, value.seconds)
        values.append(replace(value, seconds=known[key]) if site.tensor in weights else value)
    return replace(formulation, problem=replace(problem, values=tuple(values)))


def _cut_dim(layout: Layout, axis: int) -> int | None:
    placement = layout.placements[axis]
    return placement.dim if isinstance(placement, Shard) else None


def _is_cut(layout: Layout, mesh: Mesh, axes: set[str]) -> bool:
    """Do these axes shard it, and no others but the tensor axis?"""
    cut_axes = {axis for axis, p in zip(mesh.names, layout.placements, strict=True) if isinstance(p, Shard)}
    return cut_axes - {TENSOR} == axes


def _expert_parameters(graph: Graph) -> frozenset[str]:
    return frozenset(p.tensor for p in graph.parameters if is_of_experts(p.path))
