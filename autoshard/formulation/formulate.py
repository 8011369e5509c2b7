"""Graph + strategies + costs -> Problem: what each node and value of the problem represents in the graph.

Nodes, in this order: inputs, parameters, buffers, ops, sinks. A sink is a demand at the end of the step: the loss must
be whole or partial (its seed gradient is 1 either way), an output must not be partial, a buffer's new value must have
the layout in which the buffer is stored.

Times: op i runs forward at i and backward at 2 * ops - 1 - i.

For a step of several micro-batches the problem is the mean one: what runs once a step (sums of gradients that wait for
its end, and the optimizer) is divided equally among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard import costs, redistribute, rules
from autoshard.cluster.hardware import Hardware
from autoshard.formulation.host_choices import HostChoices
from autoshard.formulation.planning_context import PlanningContext
from autoshard.formulation.storage_layouts import as_stored, buffer_layouts, input_layouts, plain, storage_layouts
from autoshard.ir.graph import DTYPE_BYTES, Graph, Op, Parameter, Tensor
from autoshard.ir.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL,
    Layout,
    largest_shape,
    normalise,
)
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Floats, Integers, Node, Problem, Value
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import EXCHANGING

TIE_SECONDS = 1e-9  # a partial value, or a gradient of one, is passed on only where that pays
STORED = ("input", "parameter", "buffer")
Allowed = Callable[[Op, Strategy], bool]


@dataclass(frozen=True, eq=False)
class Site:
    """Meaning of a node of the problem: `kind` is input, parameter, buffer, op or sink; `name` the tensor or op.

    It has `strategies` for an op, or storage `layouts` for a tensor; a sink has layouts too.
    """

    kind: str
    name: str
    layouts: tuple[Layout, ...] = ()
    strategies: tuple[Strategy, ...] = ()


@dataclass(frozen=True, eq=False)
class ValueSite:
    """The tensor of a value of the problem, with the layouts that its source and target indices refer to."""

    tensor: str
    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]
    tied: bool = False


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem and its meaning: `sites[n]` is node n, `values[v]` is value v. `ways`: priced redistributions, by the
    facts of a tensor, sources and targets; whoever continues from them takes them out."""

    context: PlanningContext
    problem: Problem
    sites: tuple[Site, ...]
    values: tuple[ValueSite, ...]
    ways: dict[Hashable, redistribute.PathCosts] = field(default_factory=dict, repr=False)

    @property
    def graph(self) -> Graph:
        return self.context.graph

    @property
    def mesh(self) -> Mesh:
        return self.context.mesh

    @property
    def hardware(self) -> Hardware:
        return self.context.hardware

    def within(self, capacity_bytes: float = math.inf) -> Formulation:
        """Copy of the problem with this memory capacity on each device."""
        return replace(self, problem=replace(self.problem, capacity_bytes=capacity_bytes))


def formulate(
    context: PlanningContext, allowed: Allowed | None = None, *, capacity_bytes: float = math.inf
) -> Formulation:
    """The strategy-selection problem. `allowed` filters strategies (pins, styles).

    Repeated parts are made once: equal operators share an `OperatorKind`, equal layouts at an end of a value an `End`,
    and equal nodes and values their arrays, by which a solver detects repetition.
    """
    graph, kinds = context.graph, _kinds(context, allowed)
    sites, ends = _Sites(graph, context.mesh, kinds).built()
    index = {(site.kind, site.name): n for n, site in enumerate(sites)}
    pricer = Pricer(context)
    nodes = tuple(pricer.node(site, kinds) for site in sites)
    pairs = [pricer.value(demand, sites) for demand in _demands(graph, kinds, ends, index)]
    values, value_sites = zip(*pairs, strict=True) if pairs else ((), ())
    problem = Problem(nodes, values, capacity_bytes, pricer.horizon)
    return Formulation(context, problem, tuple(sites), value_sites, pricer.ways)


def sites_of(context: PlanningContext, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], Site]:
    """Sites of `wanted` (kind, name), with the choices that `formulate` would offer without prices."""
    names = {name for kind, name in wanted if kind == "op"}
    reading = {name for kind, name in wanted if kind in STORED}
    ops = [op for op in context.graph.ops if op.name in names or not reading.isdisjoint(op.operands)]
    kinds = _kinds(context, None, ops)
    sites = _Sites(context.graph, context.mesh, kinds)
    sites.store_all(reading)
    every = [*sites.sites, *(Site("op", op.name, strategies=kinds[op.name].strategies) for op in ops)]
    return {(site.kind, site.name): site for site in every if (site.kind, site.name) in wanted}


# --- kinds and ends: what repeats -----------------------------------------------------------------------------------


class End:
    """The layout that each choice of a node gives or needs; its distinct layouts, by first mention; `index` into them.

    Compared by identity: equal operators share their ends.
    """

    def __init__(self, layouts: Iterable[Layout]) -> None:
        every = tuple(layouts)
        self.distinct = tuple(dict.fromkeys(every))
        position = {layout: index for index, layout in enumerate(self.distinct)}
        self.index: Integers = np.array([position[layout] for layout in every], dtype=np.int64)


class OperatorKind:
    """Data shared by all equal operators: strategies, and an end for every operand (None if absent) and result."""

    def __init__(self, strategies: tuple[Strategy, ...], op: Op) -> None:
        self.strategies = strategies
        columns = zip(*(strategy.operands for strategy in strategies), strict=True)
        self.operands = tuple(
            None if name is None else End(map(_present, column))
            for name, column in zip(op.operands, columns, strict=True)
        )
        self.results = tuple(End(column) for column in zip(*(s.results for s in strategies), strict=True))


def _present(layout: Layout | None) -> Layout:
    assert layout is not None
    return layout


def _kinds(
    context: PlanningContext, allowed: Allowed | None, ops: Iterable[Op] | None = None
) -> dict[str, OperatorKind]:
    """Op name -> its kind, for all operators or for `ops`. `allowed` may distinguish equal operators."""
    graph, mesh, hosts = context.graph, context.mesh, HostChoices(context)
    granularities = rules.granularities(graph, mesh)
    offered: dict[object, tuple[Strategy, ...]] = {}
    known: dict[object, OperatorKind] = {}
    kinds: dict[str, OperatorKind] = {}
    for op in graph.ops if ops is None else ops:
        same = tuple(op.operands.index(name) for name in op.operands)  # which operands are one tensor
        there = hosts.has(op)
        key = (id(granularities.signatures[op.name]), granularities.refinements(op), op.saved, same, there)
        if key not in offered:
            every = rules.strategies(graph, op, mesh, granularities)
            every += hosts.strategies(op, every) if there else ()
            usable = every if context.all_to_all else [s for s in every if s.variant not in EXCHANGING]
            once = len({*same}) == len(same)
            offered[key] = tuple(usable if once else (strategy for strategy in usable if _consistent(op, strategy)))
        strategies, chosen = offered[key], None
        if allowed:
            chosen = tuple(index for index, strategy in enumerate(strategies) if allowed(op, strategy)) or None
        if (key, chosen) not in known:
            selected = strategies if chosen is None else tuple(strategies[index] for index in chosen)
            known[key, chosen] = OperatorKind(selected, op)
        kinds[op.name] = known[key, chosen]
    return kinds


def _consistent(op: Op, strategy: Strategy) -> bool:
    """True if an op that reads one tensor twice needs it in one layout."""
    first: dict[str, Layout | None] = {}
    return all(
        operand is None or first.setdefault(operand, layout) == layout
        for operand, layout in zip(op.operands, strategy.operands, strict=True)
    )


# --- sites: what chooses among what ---------------------------------------------------------------------------------


class _Sites:
    """All nodes in order, and the end of each stored tensor and sink; equal ones share their layouts."""

    def __init__(self, graph: Graph, mesh: Mesh, kinds: dict[str, OperatorKind]) -> None:
        self.graph, self.mesh, self.kinds = graph, mesh, kinds
        self.stored: dict[object, End] = {}
        self.sites: list[Site] = []
        self.ends: dict[tuple[str, str], End] = {}

    def built(self) -> tuple[list[Site], dict[tuple[str, str], End]]:
        graph = self.graph
        self.store_all()
        self.sites += [Site("op", op.name, strategies=self.kinds[op.name].strategies) for op in graph.ops]
        for position, name in enumerate(graph.outputs):
            self.add("sink", f"output{position}:{name}", End(self.sink_layouts(name)))
        for stored, name in graph.buffer_updates:
            self.add("sink", f"update{stored}:{name}", self.ends["buffer", stored])
        return self.sites, self.ends

    def store_all(self, names: Collection[str] | None = None) -> None:
        """Adds inputs, parameters and buffers: all, or those of these names."""
        graph = self.graph
        stored = [("input", name, input_layouts) for name in graph.inputs]
        stored += [("parameter", parameter.tensor, storage_layouts) for parameter in graph.parameters]
        stored += [("buffer", buffer.tensor, buffer_layouts) for buffer in graph.buffers]
        for kind, name, layouts in stored:
            if names is None or name in names:
                self.store(kind, name, layouts)

    def add(self, kind: str, name: str, end: End) -> None:
        self.sites.append(Site(kind, name, end.distinct))
        self.ends[kind, name] = end

    def store(
        self, kind: str, name: str, layouts: Callable[[Tensor, Iterable[Layout], Mesh], tuple[Layout, ...]]
    ) -> None:
        """Adds the end of a stored tensor, with the layouts that its consumers need."""
        tensor = self.graph.tensor(name)
        uses = {id(end): end for op, position in self.graph.consumers[name] if (end := self.end_of(op, position))}
        key = (kind, tensor.shape, tuple(uses))
        if key not in self.stored:
            wanted = dict.fromkeys(layout for end in uses.values() for layout in end.distinct)
            self.stored[key] = End(layouts(tensor, wanted, self.mesh))
        self.add(kind, name, self.stored[key])

    def end_of(self, op: Op, position: int) -> End | None:
        return self.kinds[op.name].operands[position]

    def sink_layouts(self, name: str) -> tuple[Layout, ...]:
        """Layouts of an output: those that its producer offers, without those not allowed at the end of a step."""
        tensor = self.graph.tensor(name)
        producer = self.graph.producers.get(name)
        if producer is None:
            return next(self.ends[kind, name].distinct for kind in STORED if (kind, name) in self.ends)
        layouts = {Layout.replicated(self.mesh): None}
        for layout in self.kinds[producer.name].results[producer.results.index(name)].distinct:
            placements = layout.placements
            if name == self.graph.loss:
                placements = tuple(p if p == PARTIAL else REPLICATE for p in placements)
            else:
                placements = tuple(map(plain, placements))
            layouts.setdefault(normalise(Layout(placements), tensor.shape, self.mesh))
        return tuple(layouts)


# --- demands: who needs which tensor --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Demand:
    """A tensor with its producer's node and end, and its consumers' nodes and ends."""

    tensor: str
    producer: int
    source: End
    consumers: tuple[int, ...]
    needs: tuple[End, ...]
    tied: bool = False  # producer and consumer must choose the same layout; nothing moves


def _demands(
    graph: Graph, kinds: dict[str, OperatorKind], ends: dict[tuple[str, str], End], index: dict[tuple[str, str], int]
) -> list[_Demand]:
    uses: dict[str, dict[int, End]] = {}
    for op in graph.ops:
        node = index["op", op.name]
        for operand, end in zip(op.operands, kinds[op.name].operands, strict=True):
            if operand is not None and end is not None:
                uses.setdefault(operand, {}).setdefault(node, end)
    sinks = [(f"output{position}:{name}", name) for position, name in enumerate(graph.outputs)]
    sinks += [(f"update{buffer}:{name}", name) for buffer, name in graph.buffer_updates]
    for sink, name in sinks:
        uses.setdefault(name, {}).setdefault(index["sink", sink], ends["sink", sink])
    demands: list[_Demand] = []
    for buffer, name in graph.buffer_updates:
        sink = f"update{buffer}:{name}"
        stored = ends["buffer", buffer]
        demands.append(
            _Demand(buffer, index["buffer", buffer], stored, (index["sink", sink],), (ends["sink", sink],), tied=True)
        )
    for tensor in graph.tensors:
        if tensor.name in uses:
            consumers = uses[tensor.name]
            op_ = graph.producers.get(tensor.name)
            key = ("op", op_.name) if op_ else next((k, tensor.name) for k in STORED if (k, tensor.name) in ends)
            source = kinds[op_.name].results[op_.results.index(tensor.name)] if op_ else ends[key]
            demands.append(_Demand(tensor.name, index[key], source, tuple(consumers), tuple(consumers.values())))
    return demands


# --- prices ---------------------------------------------------------------------------------------------------------


class Pricer:
    """Seconds and bytes of nodes and values, cached by content so that repeated layers are priced once."""

    def __init__(self, context: PlanningContext) -> None:
        self.graph, self.mesh, self.hardware = graph, *_ = context.graph, context.mesh, context.hardware
        self.all_to_all, self.micro_batches = context.all_to_all, context.micro_batches
        self.time = {op.name: position for position, op in enumerate(graph.ops)}
        self.horizon = max(1, 2 * len(graph.ops) if graph.loss else len(graph.ops))
        self.parameters = {p.tensor: p for p in graph.parameters}
        self._ops: dict[OperatorKind, tuple[Floats, Floats]] = {}
        self._moves: dict[object, _Moves] = {}
        self._pairs: dict[object, Floats] = {}
        self.ways: dict[Hashable, redistribute.PathCosts] = {}
        self._bytes: dict[object, Floats] = {}
        self._stores: dict[object, tuple[Floats, Floats]] = {}
        self._shapes: dict[tuple[tuple[int, ...], Layout], tuple[int, ...]] = {}

    def backward_time(self, time: int) -> int:
        return self.horizon - 1 - time if self.graph.loss else time

    def node(self, site: Site, kinds: dict[str, OperatorKind]) -> Node:
        if site.kind == "op":
            return self._op_node(self.graph.by_op[site.name], kinds[site.name])
        if site.kind == "parameter":
            return self._parameter_node(self.parameters[site.name], site.layouts)
        count = len(site.layouts)
        return Node(site.name, np.zeros(count), np.zeros(count))

    def _op_node(self, op: Op, kind: OperatorKind) -> Node:
        if kind not in self._ops:
            self._ops[kind] = self._op_costs(op, kind)
        seconds, sizes = self._ops[kind]
        time = self.time[op.name]
        return Node(op.name, seconds, sizes, (time, self.backward_time(time) + 1))

    def _op_costs(self, op: Op, kind: OperatorKind) -> tuple[Floats, Floats]:
        """Seconds and kept bytes of every strategy; those of equal local shapes are priced once."""
        has_loss = self.graph.loss is not None
        locals_ = [
            self._local_shapes(name, end)
            for name, end in (
                *zip(op.operands, kind.operands, strict=True),
                *zip(op.results, kind.results, strict=True),
            )
            if name is not None and end is not None
        ]
        known: dict[object, tuple[float, float]] = {}
        table = np.zeros((2, len(kind.strategies)))
        for s, strategy in enumerate(kind.strategies):
            key = s if strategy.variant or strategy.host else tuple(shapes[s] for shapes in locals_)
            if key not in known:
                size = costs.saved_bytes(self.graph, op, strategy, self.mesh) if has_loss else 0.0
                known[key] = sum(costs.op_seconds(self.hardware, self.mesh, self.graph, op, strategy)), size
            seconds, size = known[key]
            table[:, s] = seconds + _ties(strategy), size
        return table[0], table[1]

    def _local_shapes(self, name: str, end: End) -> list[tuple[int, ...]]:
        """The local shape of a tensor under each choice at an end."""
        shapes = [self._local_shape(self.graph.tensor(name).shape, layout) for layout in end.distinct]
        return [shapes[index] for index in end.index]

    def _local_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if (shape, layout) not in self._shapes:
            self._shapes[shape, layout] = largest_shape(shape, layout, self.mesh)
        return self._shapes[shape, layout]

    def _parameter_node(self, parameter: Parameter, layouts: tuple[Layout, ...]) -> Node:
        tensor = self.graph.tensor(parameter.tensor)
        key = (tensor.shape, tensor.dtype, parameter.trainable, id(layouts))
        if key not in self._stores:
            seconds = [costs.optimizer_seconds(self.hardware, self.graph, parameter, x, self.mesh) for x in layouts]
            sizes = [costs.parameter_bytes(self.graph, parameter, x, self.mesh) for x in layouts]
            self._stores[key] = (np.array(seconds) / self.micro_batches, np.array(sizes, dtype=float))
        seconds_array, bytes_array = self._stores[key]
        return Node(parameter.tensor, seconds_array, bytes_array, (0, self.horizon))

    def value(self, demand: _Demand, sites: list[Site]) -> tuple[Value, ValueSite]:
        tensor = self.graph.tensor(demand.tensor)
        facts = costs.moving_facts(self.graph, tensor)
        key = (facts, demand.tensor in self.parameters, demand.tied, id(demand.source), *map(id, demand.needs))
        if key not in self._moves:
            self._moves[key] = self._moves_of(tensor, demand)
        moves = self._moves[key]
        value = Value(
            name=tensor.name,
            producer=demand.producer,
            consumers=demand.consumers,
            source=demand.source.index,
            targets=moves.needed,
            seconds=moves.seconds,
            bytes=moves.sizes,
            intervals=tuple(self._interval(demand, sites[consumer]) for consumer in demand.consumers),
        )
        return value, ValueSite(tensor.name, demand.source.distinct, moves.targets, demand.tied)

    def _moves_of(self, tensor: Tensor, demand: _Demand) -> _Moves:
        targets = tuple(dict.fromkeys(layout for end in demand.needs for layout in end.distinct))
        position = {layout: index for index, layout in enumerate(targets)}
        needed = tuple(np.array([position[x] for x in end.distinct], dtype=np.int64)[end.index] for end in demand.needs)
        sources = demand.source.distinct
        seconds = _tie(sources, targets) if demand.tied else self._pair_seconds(tensor, sources, targets)
        sizes = self._sizes(tensor, targets)
        if tensor.name in self.parameters:
            sizes = _beside_storage(sizes, sources, targets)
        return _Moves(targets, needed, seconds, sizes)

    def _sizes(self, tensor: Tensor, layouts: tuple[Layout, ...]) -> Floats:
        key = (tensor.shape, tensor.dtype, layouts)
        if key not in self._bytes:
            numels = [0 if x.host else math.prod(self._local_shape(tensor.shape, x)) for x in layouts]
            self._bytes[key] = np.array(numels, dtype=float) * DTYPE_BYTES[tensor.dtype]
        return self._bytes[key]

    def _all_pairs(self, tensor: Tensor, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Floats:
        """Seconds of all redistributions. Between device and host memory only rows move: a table stays where it is."""
        terms = costs.moving_terms(self.hardware, self.mesh, self.graph, tensor, self.all_to_all)
        if len(sources) * len(targets) <= redistribute.FEW:
            seconds = redistribute.all_pairs(sources, targets, terms)
        else:
            ways = redistribute.PathCosts(sources, targets, terms)
            self.ways[costs.moving_facts(self.graph, tensor), sources, targets] = ways
            seconds = ways.seconds
        hosts = np.array([x.host for x in sources])[:, None] | np.array([x.host for x in targets])[None, :]
        return np.where(hosts, _tie(sources, targets), seconds) if hosts.any() else seconds

    def _pair_seconds(self, tensor: Tensor, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Floats:
        key = (costs.moving_facts(self.graph, tensor), tensor.name in self.parameters, sources, targets)
        if key not in self._pairs:
            terms = costs.moving_terms(self.hardware, self.mesh, self.graph, tensor, self.all_to_all)
            self._pairs[key] = self._all_pairs(tensor, sources, targets)
            if tensor.name in self.parameters and self.micro_batches > 1:
                once = redistribute.deferred_seconds(sources, targets, terms)
                self._pairs[key] = self._pairs[key] - once * (1 - 1 / self.micro_batches)
            if tensor.name in self.graph.weights and tensor.name not in self.parameters:
                self._pairs[key] = self._pairs[key] + _late(sources, targets)
        return self._pairs[key]

    def _interval(self, demand: _Demand, consumer: Site) -> tuple[int, int]:
        """From the producer's forward to the consumer's backward if autograd keeps the operand, else its forward."""
        if consumer.kind != "op":
            return (0, 0)
        op = self.graph.by_op[consumer.name]
        producer = self.graph.producers.get(demand.tensor)
        start = self.time[producer.name] if producer else self.time[op.name]
        end = self.time[op.name]
        saved = any(op.operands[position] == demand.tensor for position in op.saved.operands)
        if saved and demand.tensor in self.graph.weights:
            saved = False  # a stored parameter is charged once, by its own node; what is gathered of it is not kept
        return (start, self.backward_time(end) + 1 if saved and self.graph.loss else end + 1)


@dataclass(frozen=True, eq=False)
class _Moves:
    """Data shared by equal values: distinct targets, the target of each choice of each consumer, seconds and bytes."""

    targets: tuple[Layout, ...]
    needed: tuple[Integers, ...]
    seconds: Floats
    sizes: Floats


def _beside_storage(sizes: Floats, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Floats:
    """Least bytes of a weight's use in addition to its storage: none if it may be stored as it is used."""
    stored = {as_stored(source) for source in sources}
    return np.where([as_stored(target) in stored for target in targets], 0.0, sizes)


def _late(sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Floats:
    """Penalty that favours leaving a cast weight's gradient partial until it is reduced with others, after backward."""
    pairs = [[zip(source.placements, target.placements, strict=True) for target in targets] for source in sources]
    partial = [[sum(pair == (REPLICATE, REPLICATE_PARTIAL) for pair in cell) for cell in row] for row in pairs]
    return 2 * TIE_SECONDS * np.array(partial, dtype=float)


def _ties(strategy: Strategy) -> float:
    return TIE_SECONDS * sum(choice.kind in ("linear", "repeat_partial") for choice in strategy.choices)


def _tie(sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Floats:
    """Zero where the layouts are the same, infinite (forbidden) elsewhere."""
    return np.array([[0.0 if source == target else np.inf for target in targets] for source in sources])
