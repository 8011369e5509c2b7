"""Styles of tensor parallelism: the last mesh axis splits heads, hidden dims and vocabulary, the others the batch.

Where the tensor axis splits nothing of a transformer's block, between the sums of its attention and its feed-forward
part, stand the norms and residual sums. Megatron repeats them; sequence parallelism splits them along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from autoshard.formulation.fewer_choices import Keep
from autoshard.formulation.formulate import Formulation, Site
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, Placement, Shard
from autoshard.rules.algebra.float8_products import IN_FLOAT8
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import record
from autoshard.styles.batch_styles import cut_axes, data_parallel, fully_sharded, note, used_axes, with_batch

_LINEAR = frozenset({*IN_FLOAT8, *IN_FLOAT8.values()})
Fits = Callable[[Strategy, int], bool]  # of a strategy and the rank of its first result


def megatron(formulation: Formulation) -> Keep | str:
    """Choices with norms and residual sums repeated over the tensor axis; weights stored as they are used."""
    return _tensor_split(formulation, _repeated, sharded=False)


def megatron_sp(formulation: Formulation) -> Keep | str:
    """Choices with norms and residual sums split along the sequence over the tensor axis; weights stored as used."""
    return _tensor_split(formulation, _along_sequence, sharded=False)


def fsdp_tp(formulation: Formulation) -> Keep | str:
    """Faster one of both; what the tensor axis leaves of a weight is sharded over the other axes."""
    if len(used_axes(formulation)) < 2 and formulation.mesh.sizes[-1] > 1:
        return f"it needs a mesh axis before the tensor axis to cut weights over: {formulation.mesh} has none"
    return _tensor_split(formulation, None, sharded=True)


def splits_tensors(op: Op, strategy: Strategy) -> bool:
    """True if an op with a weight, or attention, is split as tensor parallelism splits it, and for any other op."""
    style = record(op.target).tensor_parallel
    if style is None:
        return True
    *data, tensor = strategy.choices
    if any(choice.factor in (*style.split, *style.whole) for choice in data):
        return False
    return tensor.factor in style.split or (style.optional and tensor.kind == "repeat")


def _repeated(strategy: Strategy, rank: int) -> bool:
    return strategy.choices[-1].kind == "repeat"


def _along_sequence(strategy: Strategy, rank: int) -> bool:
    """True if the tensor axis shards the first result between its batch and its features."""
    placement = strategy.results[0].placements[-1]
    return isinstance(placement, Shard) and 0 < placement.dim < rank - 1


def _tensor_split(formulation: Formulation, between: Fits | None, *, sharded: bool) -> Keep | str:
    """Choices in which `between` fits the norms and residual sums. `sharded`: weights also over the data axes."""
    graph, mesh = formulation.graph, formulation.mesh
    if mesh.sizes[-1] == 1:  # it splits nothing
        return fully_sharded(formulation) if sharded else data_parallel(formulation)
    data = used_axes(formulation)[:-1]
    keep = with_batch(formulation, data, sharded=sharded)
    if isinstance(keep, str):
        return keep
    shapes = _block_inputs(graph)
    if between is _along_sequence and not any(_stands_between(op, graph, shapes) for op in graph.ops):
        return "no norm and no residual sum has the shape of what a linear layer reads: there is nothing to split"
    for n, site in enumerate(formulation.sites):
        if site.kind != "op":
            continue
        op = graph.by_op[site.name]
        choices = keep.get(n, range(len(site.strategies)))
        if between is not None and _stands_between(op, graph, shapes):
            rank = len(graph.tensor(op.results[0]).shape)
            fitting = [s for s in choices if between(site.strategies[s], rank)]
        else:
            fitting = [s for s in choices if splits_tensors(op, site.strategies[s])]
            fitting = fitting or [s for s in choices if site.strategies[s].choices[-1].kind == "repeat"]  # it can't be
        if not fitting:
            return f"{op.name} ({op.target}) has no such strategy on {mesh}"
        note(keep, n, fitting, site)
    _store_as_used(formulation, keep, data, sharded)
    return keep


def _block_inputs(graph: Graph) -> set[tuple[int, ...]]:
    """The shapes, (batch, sequence, features), that linear layers read."""
    read = (graph.tensor(op.operands[0] or "").shape for op in graph.ops if op.target in _LINEAR)
    return {shape for shape in read if len(shape) > 1}


def _stands_between(op: Op, graph: Graph, shapes: set[tuple[int, ...]]) -> bool:
    """A norm, the mean of a norm that is written out, or a sum of two activations, of a shape that linears read."""
    operands = [graph.tensor(name) for name in op.operands if name]
    if not operands or operands[0].shape not in shapes:
        return False
    if op.target == "aten.mean":
        return graph.tensor(op.results[0]).shape == (*operands[0].shape[:-1], 1)
    is_sum = op.target == "aten.add" and [x.shape for x in operands] == [operands[0].shape] * 2
    return record(op.target).sequence_parallel or is_sum


def _store_as_used(formulation: Formulation, keep: dict[int, list[int]], data: list[int], sharded: bool) -> None:
    """Store parameters on the tensor axis as a kept use has them there, on the data axes whole or sharded."""
    used: dict[str, set[Placement]] = {}
    for n, site in enumerate(formulation.sites):
        if site.kind == "op":
            for choice in keep.get(n, range(len(site.strategies))):
                for name, layout in _operands(formulation.graph, site, choice):
                    used.setdefault(name, set()).add(layout.placements[-1])
    for n, site in enumerate(formulation.sites):
        if site.kind == "parameter":
            fitting = [s for s, layout in enumerate(site.layouts) if _as_used(layout, used.get(site.name, set()))]
            cuts = {s: len(set(cut_axes(site.layouts[s])) & set(data)) for s in fitting}
            wanted = max(cuts.values(), default=0) if sharded else 0
            note(keep, n, [s for s in fitting if cuts[s] == wanted], site)


def _as_used(layout: Layout, used: set[Placement]) -> bool:
    placement = layout.placements[-1]
    return placement in used if isinstance(placement, Shard) else any(not isinstance(other, Shard) for other in used)


def _operands(graph: Graph, site: Site, choice: int) -> list[tuple[str, Layout]]:
    operands = zip(graph.by_op[site.name].operands, site.strategies[choice].operands, strict=True)
    return [(name, layout) for name, layout in operands if name is not None and layout is not None]
