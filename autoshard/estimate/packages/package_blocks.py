"""Costs of a transformer's blocks in a package of `autoshard plan`, measured like those of a captured model.

The numbers become a graph of a few layers, which is split over the devices of a replica as Megatron-LM does, with or
without sequence parallelism; whole_step_search/ measures its program, as that of any captured model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.constraints.step_request import RECOMPUTE
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_graph import TransformerGraph, transformer_graph
from autoshard.estimate.transformer_program import split_formulation
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.search.build_plan import Origin, plan_of
from autoshard.whole_step_search.blocks.block_line import KEPT, block_line
from autoshard.whole_step_search.blocks.block_measure import block_costs
from autoshard.whole_step_search.blocks.block_pins import NOTHING_SAID, Left
from autoshard.whole_step_search.blocks.block_splits import BlockSplit
from autoshard.whole_step_search.blocks.context_expert_axes import TENSOR
from autoshard.whole_step_search.config_space import Inner, ParallelConfig
from autoshard.whole_step_search.front_store import MEASURED, FrontStore, SplitCosts, by_kind
from autoshard.whole_step_search.step_costs import StepProblem

MEGATRON, MEGATRON_SP = "megatron", "megatron-sp"  # splits
FIRST, LAYER, LAST = range(3)  # kinds of blocks
BATCH = 2  # of the graph that is written; other sizes follow from it


@dataclass
class MegatronStore(FrontStore):
    """A store of one split for each (tensor-parallel size, micro-batch)."""

    written: TransformerGraph | None = None
    sequence_parallel: bool = False
    plans: dict[tuple[int, bool], Plan] = field(default_factory=dict)

    def _costs(self, inner: Inner, micro_batch: int, left: Left = NOTHING_SAID) -> tuple[SplitCosts, ...]:
        assert left == NOTHING_SAID  # no pins here
        short, mesh = self._of(micro_batch), Mesh(inner)
        plan, name = self._plan(mesh.size, micro_batch), MEGATRON_SP if self.sequence_parallel else MEGATRON
        split = BlockSplit(name, plan, lower(plan, short.graph), short.graph, mesh)
        costs = block_costs(short, split, self.hardware)
        return (SplitCosts(micro_batch, split, costs, by_kind(short, costs)),)

    def _shards_key(self, costed: SplitCosts) -> tuple[object, ...]:
        """Key of the shards: with the given strategies, weights are sharded alike for one sample and for several."""
        return str(costed.split.mesh), costed.split.name

    def _plan(self, tensor: int, micro_batch: int) -> Plan:
        """Plan of one micro-batch, with the given strategies. Rules leave out dims of one sample."""
        key = tensor, micro_batch == 1
        if key not in self.plans:
            assert self.written is not None
            graph = self._of(micro_batch).graph
            written, mesh = replace(self.written, graph=graph), Mesh(((TENSOR, tensor),))
            formulation = split_formulation(written, mesh, self.hardware, self.sequence_parallel)
            solution = solvers.solve(formulation.problem)
            self.plans[key] = plan_of(formulation, solution, Origin(graph.source), float("inf"), "search")
        return self.plans[key]


def block_store(
    model: Transformer, precision: str, optimizer: str, sequence_parallel: bool, replicas: int, hardware: Hardware
) -> MegatronStore:
    """Store of a model's blocks. `replicas`: the number over which shards are measured."""
    short = replace(model, layers=min(model.layers, KEPT))
    return _store(short, precision, optimizer, sequence_parallel, replicas, hardware)


@lru_cache(maxsize=64)
def _store(
    model: Transformer, precision: str, optimizer: str, sequence_parallel: bool, replicas: int, hardware: Hardware
) -> MegatronStore:
    written = transformer_graph(model, BATCH, precision, optimizer)
    line = block_line(written.graph)
    assert [block.kind for block in line.blocks] == [FIRST, *[LAYER] * (len(line.blocks) - 2), LAST], line.blocks
    return MegatronStore(line, hardware, replicas=replicas, written=written, sequence_parallel=sequence_parallel)


def store_of(model: Transformer, run: TrainingRun, hardware: Hardware) -> MegatronStore:
    """Store for the blocks of `run`."""
    cut = run.sequence_parallel and run.tp > 1
    return block_store(model, run.precision, run.optimizer, cut, min(max(run.dp, 2), MEASURED), hardware)


def line_of(model: Transformer) -> tuple[int, ...]:
    """Kinds of the blocks of the whole model: embedding, layers, head."""
    return (FIRST, *[LAYER] * model.layers, LAST)


def keeps_of(offered: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Recompute policies offered by kind of block: only layers are recomputed."""
    return ("all",), tuple(RECOMPUTE[word] for word in offered), ("all",)


def problem_of(
    model: Transformer,
    choice: ParallelConfig,
    store: FrontStore,
    offered: tuple[str, ...],
    hardware: Hardware,
    capacity_bytes: float,
) -> tuple[StepProblem, BlockSplit]:
    """Step problem of an outer choice whose layers are recomputed in one of the ways `offered`."""
    costed = store.costs(choice.inner, choice.micro_batch)[0]
    sharded = store.sharded(costed) if choice.zero else ()
    kinds, keeps = line_of(model), keeps_of(offered)
    return StepProblem(choice, kinds, costed.costs, keeps, hardware, capacity_bytes, None, sharded), costed.split
