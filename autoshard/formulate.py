"""Graph + strategies + costs -> Problem: which node and which value of the problem stands for what of the graph.

Nodes, in this order: inputs, parameters, buffers, ops, sinks. A sink is a demand at the end of the step: the loss must
be whole or partial (its seed gradient is 1 either way), an output must not be partial, a buffer's new value must lie as
the buffer is stored.

Times: op i runs forward at i and backward at 2 * ops - 1 - i.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from autoshard import costs, redistribute, rules
from autoshard.graph.model import Graph, Op, Parameter, Tensor
from autoshard.hardware import Hardware
from autoshard.layout import PARTIAL, REPLICATE, Layout, Placement, Shard, local_sizes, normalise
from autoshard.mesh import Mesh
from autoshard.problem import Floats, Integers, Node, Problem, Value
from autoshard.rules.strategy import Strategy

TIE_SECONDS = 1e-9  # a partial value, or a gradient of one, is passed on only where that pays
STORED = ("input", "parameter", "buffer")
Allowed = Callable[[Op, Strategy], bool]


@dataclass(frozen=True, eq=False)
class Site:
    """What a node of the problem stands for: `kind` is input, parameter, buffer, op or sink; `name` the tensor or op.

    `strategies` of an op, or the storage `layouts` of a tensor; a sink has layouts too.
    """

    kind: str
    name: str
    layouts: tuple[Layout, ...] = ()
    strategies: tuple[Strategy, ...] = ()


@dataclass(frozen=True, eq=False)
class ValueSite:
    """The tensor behind a value of the problem, with the layouts that its source and target indices mean."""

    tensor: str
    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]
    tied: bool = False


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem and its meaning: `sites[n]` is node n, `values[v]` is value v."""

    graph: Graph
    mesh: Mesh
    hardware: Hardware
    problem: Problem
    sites: tuple[Site, ...]
    values: tuple[ValueSite, ...]


def formulate(
    graph: Graph, mesh: Mesh, hardware: Hardware, capacity_bytes: float, allowed: Allowed | None = None
) -> Formulation:
    """The strategy-selection problem of `graph` on `mesh`. `allowed` keeps the strategies it accepts (pins, styles)."""
    pricer = Pricer(graph, mesh, hardware)
    sites = _sites(graph, mesh, allowed)
    nodes = tuple(pricer.node(site) for site in sites)
    index = {(site.kind, site.name): n for n, site in enumerate(sites)}
    values, value_sites = [], []
    for demand in _demands(graph, sites, index):
        value, site = pricer.value(demand, sites)
        values.append(value)
        value_sites.append(site)
    problem = Problem(nodes, tuple(values), capacity_bytes, pricer.horizon)
    return Formulation(graph, mesh, hardware, problem, tuple(sites), tuple(value_sites))


# --- sites: what chooses among what ---------------------------------------------------------------------------------


def _sites(graph: Graph, mesh: Mesh, allowed: Allowed | None) -> list[Site]:
    candidates = rules.candidates(graph, mesh)
    strategies: dict[str, tuple[Strategy, ...]] = {}
    for op in graph.ops:
        offered = rules.strategies(graph, op, mesh, candidates)
        offered = tuple(s for s in offered if _consistent(op, s))
        kept = tuple(s for s in offered if allowed(op, s)) if allowed else offered
        strategies[op.name] = kept or offered
    wanted = _wanted(graph, strategies)
    sites = [Site("input", name, _input_layouts(graph.tensor(name), wanted[name], mesh)) for name in graph.inputs]
    stored: dict[object, tuple[Layout, ...]] = {}
    for parameter in graph.parameters:
        tensor = graph.tensor(parameter.tensor)
        key = (tensor.shape, tuple(wanted[tensor.name]))
        if key not in stored:
            stored[key] = storage_layouts(tensor, wanted[tensor.name], mesh)
        sites.append(Site("parameter", tensor.name, stored[key]))
    for stored_buffer in graph.buffers:
        tensor = graph.tensor(stored_buffer.tensor)
        layouts = _input_layouts(tensor, wanted[tensor.name], mesh)
        sites.append(Site("buffer", tensor.name, tuple(x for x in layouts if _storable(tensor, x, mesh))))
    sites += [Site("op", op.name, strategies=strategies[op.name]) for op in graph.ops]
    by_name = {(site.kind, site.name): site for site in sites}
    for position, name in enumerate(graph.outputs):
        sites.append(Site("sink", f"output{position}:{name}", _sink_layouts(graph, name, by_name, mesh)))
    for buffer, name in graph.buffer_updates:
        sites.append(Site("sink", f"update{buffer}:{name}", by_name["buffer", buffer].layouts))
    return sites


def _consistent(op: Op, strategy: Strategy) -> bool:
    """An op that reads one tensor twice must need it in one layout."""
    first: dict[str, Layout | None] = {}
    return all(
        operand is None or first.setdefault(operand, layout) == layout
        for operand, layout in zip(op.operands, strategy.operands, strict=True)
    )


def _wanted(graph: Graph, strategies: dict[str, tuple[Strategy, ...]]) -> dict[str, dict[Layout, None]]:
    """Tensor -> the layouts that its consumers' strategies ask for, in order of first mention."""
    wanted: dict[str, dict[Layout, None]] = {tensor.name: {} for tensor in graph.tensors}
    for op in graph.ops:
        for strategy in strategies[op.name]:
            for operand, layout in zip(op.operands, strategy.operands, strict=True):
                if operand is not None and layout is not None:
                    wanted[operand].setdefault(layout)
    return wanted


def _plain(placement: Placement) -> Placement:
    return placement if isinstance(placement, Shard) else REPLICATE


def _input_layouts(tensor: Tensor, wanted: Iterable[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    """An input or buffer arrives as a consumer wants it: sharded or replicated, never partial."""
    found = {Layout.replicated(mesh): None}
    for layout in wanted:
        found.setdefault(Layout(tuple(map(_plain, layout.placements))))
    return tuple(found)


def storage_layouts(tensor: Tensor, wanted: Iterable[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    """Where a parameter may be kept between steps (its optimizer layout).

    The product over axes of `R`, a plain shard of any dim (ZeRO) and every shard that a use asks for; one
    (blocks, unit) a dim, so that it can be held unflattened, and no device with nothing.
    """
    alphabet: dict[Placement, None] = {REPLICATE: None}
    for layout in wanted:
        for placement in layout.placements:
            alphabet.setdefault(_plain(placement))
    for dim in range(len(tensor.shape)):
        alphabet.setdefault(Shard(dim))
    per_axis = [list(alphabet) if size > 1 else [REPLICATE] for size in mesh.sizes]
    found: dict[Layout, None] = {}
    for placements in itertools.product(*per_axis):
        layout = Layout(placements)
        if _storable(tensor, layout, mesh):
            found.setdefault(normalise(layout, tensor.shape, mesh))
    return tuple(layout for layout in found if _storable(tensor, layout, mesh))


def _storable(tensor: Tensor, layout: Layout, mesh: Mesh) -> bool:
    last = tuple(size - 1 for size in mesh.sizes)
    for dim, size in enumerate(local_sizes(tensor.shape, layout, mesh)):
        kinds = {(shard.blocks, shard.unit) for shard in size.shards}
        if len(kinds) > 1 or any(tensor.shape[dim] % (blocks * unit) for blocks, unit in kinds):
            return False
        if size.shards and size.evaluate(mesh, last) == 0:
            return False
    return True


def _sink_layouts(graph: Graph, name: str, by_name: dict[tuple[str, str], Site], mesh: Mesh) -> tuple[Layout, ...]:
    """The layouts an output may be left in: what its producer offers, without what the end of a step can't take."""
    tensor = graph.tensor(name)
    producer = graph.producers.get(name)
    if producer is None:
        return next(by_name[kind, name].layouts for kind in STORED if (kind, name) in by_name)
    position = producer.results.index(name)
    found = {Layout.replicated(mesh): None}
    for strategy in by_name["op", producer.name].strategies:
        placements = strategy.results[position].placements
        if name == graph.loss:
            placements = tuple(p if p == PARTIAL else REPLICATE for p in placements)
        else:
            placements = tuple(map(_plain, placements))
        found.setdefault(normalise(Layout(placements), tensor.shape, mesh))
    return tuple(found)


# --- demands: who needs which tensor --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Demand:
    """A tensor with its producer node and, per consumer node, the layout that each of its choices needs."""

    tensor: str
    producer: int
    sources: tuple[Layout, ...]  # per choice of the producer
    consumers: tuple[int, ...]
    needs: tuple[tuple[Layout, ...], ...]  # per consumer, per choice
    tied: bool = False  # producer and consumer must choose the same layout; nothing moves


def _demands(graph: Graph, sites: list[Site], index: dict[tuple[str, str], int]) -> list[_Demand]:
    uses: dict[str, dict[int, tuple[Layout, ...]]] = {tensor.name: {} for tensor in graph.tensors}
    for op in graph.ops:
        node = index["op", op.name]
        for position, operand in enumerate(op.operands):
            if operand is not None:
                layouts = tuple(_present(s.operands[position]) for s in sites[node].strategies)
                uses[operand].setdefault(node, layouts)
    for position, name in enumerate(graph.outputs):
        node = index["sink", f"output{position}:{name}"]
        uses[name].setdefault(node, sites[node].layouts)
    demands: list[_Demand] = []
    for buffer, name in graph.buffer_updates:
        node = index["sink", f"update{buffer}:{name}"]
        uses[name].setdefault(node, sites[node].layouts)
        stored = index["buffer", buffer]
        demands.append(_Demand(buffer, stored, sites[stored].layouts, (node,), (sites[node].layouts,), tied=True))
    for tensor in graph.tensors:
        if uses[tensor.name]:
            node, sources = _origin(graph, tensor.name, sites, index)
            consumers = tuple(uses[tensor.name])
            demands.append(_Demand(tensor.name, node, sources, consumers, tuple(uses[tensor.name].values())))
    return demands


def _present(layout: Layout | None) -> Layout:
    assert layout is not None
    return layout


def _origin(
    graph: Graph, name: str, sites: list[Site], index: dict[tuple[str, str], int]
) -> tuple[int, tuple[Layout, ...]]:
    op = graph.producers.get(name)
    if op is None:
        node = next(index[kind, name] for kind in STORED if (kind, name) in index)
        return node, sites[node].layouts
    node = index["op", op.name]
    position = op.results.index(name)
    return node, tuple(strategy.results[position] for strategy in sites[node].strategies)


# --- prices ---------------------------------------------------------------------------------------------------------


class Pricer:
    """Seconds and bytes of nodes and values, remembered by content so that repeated layers are priced once."""

    def __init__(self, graph: Graph, mesh: Mesh, hardware: Hardware) -> None:
        self.graph, self.mesh, self.hardware = graph, mesh, hardware
        self.time = {op.name: position for position, op in enumerate(graph.ops)}
        self.horizon = max(1, 2 * len(graph.ops) if graph.loss else len(graph.ops))
        self.parameters = {p.tensor: p for p in graph.parameters}
        self._ops: dict[object, tuple[Floats, Floats]] = {}
        self._pairs: dict[object, Floats] = {}
        self._bytes: dict[object, Floats] = {}
        self._stores: dict[object, tuple[Floats, Floats]] = {}

    def collective_seconds(self, axis: int, kind: str, full_bytes: float) -> float:
        return costs.collective_seconds(self.hardware, self.mesh, axis, kind, full_bytes)

    def backward_time(self, time: int) -> int:
        return self.horizon - 1 - time if self.graph.loss else time

    def node(self, site: Site) -> Node:
        if site.kind == "op":
            return self._op_node(site)
        if site.kind == "parameter":
            return self._parameter_node(self.parameters[site.name], site.layouts)
        count = len(site.layouts)
        return Node(site.name, np.zeros(count), np.zeros(count))

    def _op_node(self, site: Site) -> Node:
        op = self.graph.by_op[site.name]
        key = (op.target, op.attributes, _signature(self.graph, op), op.saved, tuple(map(id, site.strategies)))
        if key not in self._ops:
            seconds = [
                sum(costs.op_seconds(self.hardware, self.mesh, self.graph, op, s)) + _ties(s) for s in site.strategies
            ]
            kept = self.graph.loss is not None
            sizes = [costs.kept_bytes(self.graph, op, s, self.mesh) if kept else 0.0 for s in site.strategies]
            self._ops[key] = (np.array(seconds), np.array(sizes))
        seconds_array, bytes_array = self._ops[key]
        time = self.time[op.name]
        return Node(op.name, seconds_array, bytes_array, (time, self.backward_time(time) + 1))

    def _parameter_node(self, parameter: Parameter, layouts: tuple[Layout, ...]) -> Node:
        tensor = self.graph.tensor(parameter.tensor)
        key = (tensor.shape, tensor.dtype, parameter.trainable, layouts)
        if key not in self._stores:
            seconds = [costs.optimizer_seconds(self.hardware, self.graph, parameter, x, self.mesh) for x in layouts]
            sizes = [costs.parameter_bytes(self.graph, parameter, x, self.mesh) for x in layouts]
            self._stores[key] = (np.array(seconds), np.array(sizes, dtype=float))
        seconds_array, bytes_array = self._stores[key]
        return Node(parameter.tensor, seconds_array, bytes_array, (0, self.horizon))

    def value(self, demand: _Demand, sites: list[Site]) -> tuple[Value, ValueSite]:
        tensor = self.graph.tensor(demand.tensor)
        sources = tuple(dict.fromkeys(demand.sources))
        targets = tuple(dict.fromkeys(layout for needs in demand.needs for layout in needs))
        value = Value(
            tensor.name,
            demand.producer,
            demand.consumers,
            _indices(demand.sources, sources),
            tuple(_indices(needs, targets) for needs in demand.needs),
            _tie(sources, targets) if demand.tied else self._pair_seconds(tensor, sources, targets),
            self._sizes(tensor, targets),
            tuple(self._interval(demand, sites[consumer]) for consumer in demand.consumers),
        )
        return value, ValueSite(tensor.name, sources, targets, demand.tied)

    def _sizes(self, tensor: Tensor, layouts: tuple[Layout, ...]) -> Floats:
        key = (tensor.shape, tensor.dtype, layouts)
        if key not in self._bytes:
            sizes = [costs.activation_bytes(tensor, layout, self.mesh) for layout in layouts]
            self._bytes[key] = np.array(sizes, dtype=float)
        return self._bytes[key]

    def _pair_seconds(self, tensor: Tensor, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Floats:
        differentiable = tensor.requires_grad and self.graph.loss is not None
        stored = tensor.name in self.parameters
        key = (tensor.shape, tensor.dtype, differentiable, stored, sources, targets)
        if key not in self._pairs:
            forward, backward = redistribute.all_pairs(
                sources, targets, tensor.shape, tensor.dtype, self.mesh, differentiable, self.collective_seconds
            )
            # A parameter that is gathered for use is gathered again in backward: autograd keeps its shard.
            self._pairs[key] = forward * (2.0 if stored and differentiable else 1.0) + backward
        return self._pairs[key]

    def _interval(self, demand: _Demand, consumer: Site) -> tuple[int, int]:
        """From the producer's forward to the consumer's backward if autograd keeps the operand, else to its forward."""
        if consumer.kind != "op":
            return (0, 0)
        op = self.graph.by_op[consumer.name]
        made = self.graph.producers.get(demand.tensor)
        start = self.time[made.name] if made else self.time[op.name]
        end = self.time[op.name]
        saved = any(op.operands[position] == demand.tensor for position in op.saved.operands)
        if saved and made is None and demand.tensor in self.parameters:
            saved = False  # a stored parameter is charged once, by its own node
        return (start, self.backward_time(end) + 1 if saved and self.graph.loss else end + 1)


def _ties(strategy: Strategy) -> float:
    return TIE_SECONDS * sum(choice.kind in ("linear", "repeat_partial") for choice in strategy.choices)


def _tie(sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Floats:
    """Free where the layouts are the same, forbidden elsewhere."""
    return np.array([[0.0 if source == target else np.inf for target in targets] for source in sources])


def _indices(layouts: tuple[Layout, ...], distinct: tuple[Layout, ...]) -> Integers:
    position = {layout: index for index, layout in enumerate(distinct)}
    return np.array([position[layout] for layout in layouts], dtype=np.int64)


def _signature(graph: Graph, op: Op) -> tuple[object, ...]:
    """Shapes, dtypes and requires_grad of what the op reads and makes."""
    names = [*op.operands, *op.results]
    tensors = [graph.tensor(name) if name is not None else None for name in names]
    return tuple((t.shape, t.dtype, t.requires_grad) if t else None for t in tensors)
