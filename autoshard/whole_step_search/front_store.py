"""Stores splits of blocks and their costs, by the mesh of a replica, its micro-batch and what pins leave there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from autoshard.cluster.hardware import Hardware
from autoshard.costs.model_flops import ideal_seconds
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.rules.resize.rebatch import batch_dims, rebatched
from autoshard.whole_step_search.blocks.block_costs import BlockCosts, ShardedCosts, carried_over
from autoshard.whole_step_search.blocks.block_line import BlockLine, ShortGraph, block_line, shortened
from autoshard.whole_step_search.blocks.block_measure import block_costs, sharded_costs
from autoshard.whole_step_search.blocks.block_pins import NOTHING_SAID, Left, PinRefused, StepPins
from autoshard.whole_step_search.blocks.block_splits import BlockSplit, SplitRequest, block_splits
from autoshard.whole_step_search.blocks.stage_axes import REPLICAS
from autoshard.whole_step_search.config_space import Inner, ParallelConfig

MEASURED = 8  # replicas that weights in shards are measured with
Own = TypeVar("Own")
Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class SplitCosts:
    """Split of the short graph and the costs of its blocks: `by_block` of it and by kind of the whole line."""

    micro_batch: int
    split: BlockSplit
    by_block: tuple[BlockCosts, ...]
    costs: tuple[BlockCosts, ...]


@dataclass
class FrontStore:
    """Splits and block costs by (axes of a replica, micro-batch, what pins leave there), each computed once.
    `replicas`: the number with which shards over replicas are measured."""

    line: BlockLine
    hardware: Hardware
    pins: StepPins = field(default_factory=StepPins)
    request: SplitRequest = field(default_factory=SplitRequest)
    computed: dict[tuple[Inner, int, Left], tuple[SplitCosts, ...]] = field(default_factory=dict)
    by_split: dict[SplitCosts, tuple[ShardedCosts, ...]] = field(default_factory=dict)
    measured: dict[tuple[object, ...], tuple[SplitCosts, tuple[ShardedCosts, ...]]] = field(default_factory=dict)
    carried: dict[int, ShortGraph] = field(default_factory=dict)
    ideal: dict[int, float] = field(default_factory=dict)
    replicas: int = 2
    tell: Callable[[str], None] = lambda text: None
    left: dict[object, Left] = field(default_factory=dict)
    refused: dict[object, PinRefused] = field(default_factory=dict)
    examples: dict[str, PinRefused] = field(default_factory=dict)
    nearest: tuple[int, PinRefused] | None = None  # of those that are refused, on the most axes
    by_kind: dict[Hardware, FrontStore] = field(default_factory=dict)
    same: dict[SplitCosts, SplitCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.short = shortened(self.line)

    def splits(self, choice: ParallelConfig) -> tuple[SplitCosts, ...]:
        """Splits of an outer choice that satisfy the pins. PinRefused if there are none."""
        return self.costs(choice.inner, choice.micro_batch, self._left(choice))

    def costs(self, inner: Inner, micro_batch: int, left: Left = NOTHING_SAID) -> tuple[SplitCosts, ...]:
        key = inner, micro_batch, left
        if key not in self.computed:
            self.tell(f"splitting blocks over {Mesh(inner)}, micro-batches of {micro_batch}")
            self.computed[key] = self._unless_refused(key, Mesh(((REPLICAS, 2), *inner)), lambda: self._costs(*key))
        return self.computed[key]

    def example(self, error: PinRefused) -> PinRefused:
        """First refusal of the same pin."""
        return self.examples.setdefault(error.pin, error)

    def _costs(self, inner: Inner, micro_batch: int, left: Left) -> tuple[SplitCosts, ...]:
        short = self._of(micro_batch)
        distinct: list[SplitCosts] = []
        every = (self.hardware, *dict.fromkeys(kind.hardware for kind in self.hardware.kinds))
        splits = (split for kind in every for split in block_splits(short.graph, Mesh(inner), kind, left, self.request))
        for split in splits:
            costs = block_costs(short, split, self.hardware)
            if all(costs != other.by_block for other in distinct):
                distinct.append(SplitCosts(micro_batch, split, costs, by_kind(short, costs)))
        return tuple(distinct)

    def of_kind(self, hardware: Hardware) -> FrontStore:
        """Store for one kind of the cluster's devices, for splits that are known here."""
        if hardware not in self.by_kind:
            store = FrontStore(self.line, hardware, self.pins, self.request, replicas=self.replicas, tell=self.tell)
            self.by_kind[hardware] = store
        return self.by_kind[hardware]

    def same_split(self, costed: SplitCosts) -> SplitCosts:
        """Costs here of a split that another store found."""
        if costed not in self.same:
            short = self._of(costed.micro_batch)
            costs = block_costs(short, costed.split, self.hardware)
            self.same[costed] = SplitCosts(costed.micro_batch, costed.split, costs, by_kind(short, costs))
        return self.same[costed]

    def _left(self, choice: ParallelConfig) -> Left:
        """Choices that pins leave for the splits of an outer choice."""
        if not self.pins.texts:
            return NOTHING_SAID
        replicas, inner, samples = choice.replicas, choice.inner, choice.micro_batch
        key = replicas, inner, samples, choice.zero > 0
        if key not in self.left:
            graph = self._of(samples).graph
            batch = self._batch if replicas > 1 else {}
            mesh, sharded = Mesh(((REPLICAS, replicas), *inner)), choice.zero > 0
            small = PlanningContext(graph, Mesh(inner), self.hardware, self.request.all_to_all)
            wide = replace(small, graph=self._of(replicas * samples).graph, mesh=mesh)
            self.left[key] = self._unless_refused(key, mesh, lambda: self.pins.left(small, wide, batch, sharded))
        return self.left[key]

    def _unless_refused(self, key: object, mesh: Mesh, make: Callable[[], Made]) -> Made:
        """Result of `make()`; if pins refuse it, the error is stored and raised again from then on."""
        if key in self.refused:
            raise self.refused[key]
        try:
            return make()
        except PinRefused as error:
            self.refused[key] = error
            axes = sum(size > 1 for size in mesh.sizes)  # of several replicas, where their number plays no part
            if self.nearest is None or axes >= self.nearest[0]:
                self.nearest = axes, error
            raise

    @cached_property
    def _batch(self) -> dict[str, int]:
        return batch_dims(self.short.graph)

    def _of(self, samples: int) -> ShortGraph:
        if samples not in self.carried:
            line = BlockLine(rebatched(self.short.graph, samples), self.short.line.blocks)
            self.carried[samples] = replace(self.short, line=line)
        return self.carried[samples]

    def least_seconds(self, choice: ParallelConfig) -> float:
        """Lower bound on any step of this choice: all products and attention at peak, shared evenly by the devices."""
        samples = choice.micro_batch
        if samples not in self.ideal:
            graph = rebatched(self.line.graph, samples)
            kinds = [kind.hardware for kind in self.hardware.kinds] or [self.hardware]
            self.ideal[samples] = min(ideal_seconds(graph, kind, 1) for kind in kinds)
        each = self.ideal[samples] / Mesh(choice.inner).size
        if choice.virtual_stages > 1:
            return choice.micro_batches * each / choice.stages
        return each / (1 - (1 - 1 / choice.micro_batches) ** choice.stages)

    def not_carried(self, samples: int) -> str:
        """Reason why the model can't be planned at this many samples, such as no rule for one alone; "" if it can."""
        try:
            self._of(samples)
        except UsageError as error:
            return error.message
        return ""

    def sharded(self, costed: SplitCosts) -> tuple[ShardedCosts, ...]:
        """Costs of the split with weights sharded over replicas, by kind. The effect of shards is measured with the
        first micro-batch that is asked for: weights have no batch."""
        if costed in self.by_split:
            return self.by_split[costed]
        key = self._shards_key(costed)
        if key not in self.measured:
            wide = self._of(self.replicas * costed.micro_batch)
            sharded = sharded_costs(wide, self.short.graph, costed.split, self.replicas, costed.by_block, self.hardware)
            self.measured[key] = costed, by_kind(wide, sharded)
        first, kind_costs = self.measured[key]
        if first is not costed:
            changes = zip(first.costs, kind_costs, costed.costs, strict=True)
            kind_costs = tuple(carried_over(before, after, whole) for before, after, whole in changes)
        self.by_split[costed] = kind_costs
        return kind_costs

    def _shards_key(self, costed: SplitCosts) -> tuple[object, ...]:
        """Key that is equal for splits in which shards have the same effect."""
        return str(costed.split.mesh), costed.split.left.stored, *(op.strategy for op in costed.split.plan.ops)


@dataclass
class FrontStores:
    """Cost curves of one graph and hardware, by replicas, pins and request: a later search reuses the splits and
    measurements of earlier ones."""

    graph: Graph
    hardware: Hardware
    stores: dict[tuple[int, tuple[str, ...], SplitRequest], FrontStore] = field(default_factory=dict)

    def of(self, replicas: int, pins: StepPins, request: SplitRequest, tell: Callable[[str], None]) -> FrontStore:
        key = replicas, pins.texts, request
        if key not in self.stores:
            line = block_line(self.graph, pins.marks(self.graph))
            self.stores[key] = FrontStore(line, self.hardware, pins, request, replicas=replicas, tell=tell)
        return self.stores[key]


def by_kind(short: ShortGraph, costs: tuple[Own, ...]) -> tuple[Own, ...]:
    return tuple(costs[short.represents[kind]] for kind in range(len(short.represents)))


def measured_replicas(choices: Iterable[ParallelConfig]) -> int:
    """Largest number of replicas that is asked for, up to 8: more change nothing but collectives, which are priced
    separately."""
    counts = {choice.replicas for choice in choices if choice.replicas > 1}
    return max((n for n in counts if n <= MEASURED), default=min(counts, default=2))
