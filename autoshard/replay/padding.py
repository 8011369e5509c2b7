"""Dynamic sizes along which a batch may be padded: padding whose labels are ignored changes no number.

So it is if nothing but padding depends on padding: sharded along the size, every operator computes its part alone (no
variant, no partial sum), or from earlier positions alone, as causal attention does, down to losses that are means over
the labels that count. Batch norm, experts' balance, a contrast of samples, and attention that reads later positions do
not qualify.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoshard import rules
from autoshard.graph_capture.dynamic_sizes.graph_numbers import at_sizes, numbers_of_op, sizes_of
from autoshard.ir.dynamic import DynamicSize
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import REPLICATE, Placement, Replicate, Shard
from autoshard.ir.mesh import Mesh
from autoshard.program.module_scopes import RANDOM
from autoshard.program.step_check import LABEL_LOSSES
from autoshard.rules.operators import record

_PARTS = (2, 3, 5, 7)  # by which a size of the form is cut to see whether its rows are apart
_MEAN = (None, 1, "mean")
Places = Sequence[Placement | None]
_LENGTHS = ("shape", "size", "end", "split_size")  # arguments by which a result is longer, and not another one


def padding_of(graph: Graph) -> tuple[str, ...]:
    """Dynamic sizes along which padding, with labels that do not count, is allowed."""
    if graph.buffer_updates or graph.loss is None:
        return ()
    labels = graph.once(ignored_labels)
    return tuple(size.name for size in graph.dynamic if labels and _are_apart(graph, size, labels))


def ignored_labels(graph: Graph) -> dict[str, int]:
    """Input -> its ignored label; {} if the labels of a loss are anything but inputs, moved about."""
    labels = {}
    for op in graph.ops:
        if op.target in LABEL_LOSSES:
            name = op.operands[1]
            while name is not None and name in graph.producers:
                maker = graph.producers[name]
                name = maker.operands[0] if record(maker.target).moves and maker.operands else None
            ignored = dict(op.attributes).get("ignore_index", -100)
            known = name in graph.inputs and isinstance(ignored, int) and _counts_labels(op)
            if not known or name is None or not _is_label_alone(graph, name):
                return {}
            assert isinstance(ignored, int)
            labels[name] = ignored
    return labels


def _is_label_alone(graph: Graph, name: str) -> bool:
    """True if only losses read an input. A decoder's inputs, say, would look the ignored label up."""
    waiting = [name]
    while waiting:
        for op, position in graph.consumers[waiting.pop()]:
            if op.target in LABEL_LOSSES and position == 1:
                continue
            if not record(op.target).moves or position:
                return False
            waiting += op.results
    return True


def _counts_labels(op: Op) -> bool:
    weights = op.operands[2] if len(op.operands) > 2 else None
    return weights is None and dict(op.attributes).get("reduction") in _MEAN


def _are_apart(graph: Graph, dynamic: DynamicSize, labels: Mapping[str, int]) -> bool:
    if len({name for name, _ in dynamic.dims}) < len(dynamic.dims):
        return False  # rows and columns of one table
    place = graph.dynamic.index(dynamic)
    following = {name for f in graph.follows for name in f.places if any(term.powers[place] for term in f.terms)}
    for more in (0, 1):  # labels that are shifted leave one position less
        units = range(2, 2 + max(_PARTS))  # as many as the largest part: each has every remainder among them
        sizes = (dynamic.divisor * n + dynamic.remainder for n in units)
        size, parts = next(((size, parts) for size in sizes for parts in _PARTS if size % parts == more), (0, 1))
        if size:
            plain = replace(at_sizes(graph, sizes_of(graph) | {dynamic.name: size}), dynamic=(), follows=())
            graph_dims = _with_padded_inputs(plain, dict(dynamic.dims), following)
            if _Walk(*graph_dims, Mesh((("all", parts),)), following, labels).reaches_the_loss():
                return True
    return False


def _with_padded_inputs(graph: Graph, dims: Mapping[str, int], following: set[str]) -> tuple[Graph, dict[str, int]]:
    """`graph` with values that a larger size lengthens at their end (positions, their rows of a table) as inputs, and
    the dim along which each input is longer."""
    input_dims = dict(dims)
    for op in graph.ops:
        head = op.target == "aten.slice" and not _longer(graph, op.operands[0], following)
        if (head or record(op.target).repeated) and not _computes_with(op, following):
            longer = _longer(graph, op.results[0], following)
            input_dims |= {op.results[0]: longer[0]} if len(longer) == 1 else {}
    left = tuple(op for op in graph.ops if not input_dims.keys() & {*op.results})
    return replace(graph, ops=left, inputs=tuple(dict.fromkeys((*graph.inputs, *input_dims)))), input_dims


def _longer(graph: Graph, name: str | None, following: set[str]) -> list[int]:
    """Dims that follow the size."""
    return [] if name is None else [dim for dim in range(len(graph.tensor(name).shape)) if f"{name} {dim}" in following]


def _computes_with(op: Op, following: set[str]) -> bool:
    """True if the size changes more of a result than its length."""
    lengths = tuple(f"{op.name} {name}" for name in _LENGTHS)
    return any(place in following and not place.startswith(lengths) for place in numbers_of_op(op))


class _Walk:
    """Placements that follow from sharding inputs at `dims`. Sharded tensors may be padded at the end; all others are
    as without padding. `labels`: inputs and values moved from them, with the ignored label, which pads them."""

    def __init__(
        self, graph: Graph, dims: Mapping[str, int], mesh: Mesh, following: set[str], labels: Mapping[str, int]
    ) -> None:
        self.graph, self.mesh, self.following, self.labels = graph, mesh, following, dict(labels)
        self.known = rules.granularities(graph, mesh)
        self.placed: dict[str, Placement] = {name: Shard(dim) for name, dim in dims.items()}

    def reaches_the_loss(self) -> bool:
        return all(self._goes_on(op) for op in self.graph.ops)

    def _goes_on(self, op: Op) -> bool:
        if _computes_with(op, self.following):
            return False
        if record(op.target).moves and op.operands and op.operands[0] in self.labels:
            self.labels |= dict.fromkeys(op.results, self.labels[op.operands[0]])
        places = [None if name is None else self.placed.get(name, REPLICATE) for name in op.operands]
        if not any(isinstance(place, Shard) for place in places):
            return self._begins(op)
        if op.target in LABEL_LOSSES and _counts_labels(op):
            return places[0] == places[1] and isinstance(places[0], Shard) and places[0].dim == 0
        results = next((offer for offer in self._offered(op, places) if all(isinstance(x, Shard) for x in offer)), None)
        after = _causal_attention if _is_attention(op) else _AFTER.get(op.target, _nothing)
        results = results or after(self, op, places)
        self.placed.update(zip(op.results, results or (), strict=results is not None))
        return results is not None

    def _begins(self, op: Op) -> bool:
        """Places values that are spread over the rows, such as a first token of all samples, like the rows."""
        rows = [_longer(self.graph, name, self.following) for name in op.results]
        if not any(rows):
            return True
        wanted = [Shard(dims[0]) for dims in rows if len(dims) == 1]
        whole: Places = [None if n is None else REPLICATE for n in op.operands]
        begins = len(wanted) == len(rows) and wanted in self._offered(op, whole)
        self.placed.update(zip(op.results, wanted, strict=True) if begins else ())
        return begins

    def _offered(self, op: Op, places: Places) -> list[list[Placement]]:
        """Placements of the results that an operator by itself offers for operands placed so."""
        offers = []
        for strategy in rules.strategies(self.graph, op, self.mesh, self.known):
            operands = [None if layout is None else layout.placements[0] for layout in strategy.operands]
            alone = strategy.variant == "" or (strategy.variant in RANDOM and not _reads_others(self, op, places))
            if alone and all(map(_alike, places, operands)):
                offers.append([layout.placements[0] for layout in strategy.results])
        return offers


# --- operators that make of padding behind no more than padding behind ---


def _nothing(walk: _Walk, op: Op, places: Places) -> list[Placement] | None:
    return None


def _is_attention(op: Op) -> bool:
    return "is_causal" in dict(op.attributes)


def _reads_others(walk: _Walk, op: Op, places: Places) -> bool:
    """True for attention that is sharded along its positions: devices then pass keys on."""
    heads = len(walk.graph.tensor(op.results[0]).shape) - 2
    return _is_attention(op) and any(isinstance(place, Shard) and place.dim >= heads for place in places)


def _causal_attention(walk: _Walk, op: Op, places: Places) -> list[Placement] | None:
    query, key = op.operands[:2]
    assert query is not None and key is not None
    along = len(walk.graph.tensor(query).shape) - 2
    length, other = (walk.graph.tensor(name).shape[along] for name in (query, key))
    alone = all(place == Shard(along) for place in places[:3]) and all(place is None for place in places[3:])
    return [Shard(along)] if alone and op.attribute("is_causal") is True and length == other else None


def _sliced(walk: _Walk, op: Op, places: Places) -> list[Placement] | None:
    """Placement of a slice from a fixed start: with a fixed end too it holds no padding, else it ends with it."""
    start, end, name, place = op.attribute("start"), op.attribute("end"), op.operands[0], places[0]
    assert name is not None and isinstance(place, Shard)
    size = walk.graph.tensor(name).shape[place.dim]
    plain = op.attribute("dim") == place.dim and op.attribute("step") in (None, 1) and place == Shard(place.dim)
    if not plain or not isinstance(start, int | None) or (start or 0) < 0 or f"{op.name} start" in walk.following:
        return None
    if isinstance(end, int) and end < size and f"{op.name} end" not in walk.following:
        return [REPLICATE] if end >= 0 else None
    whole = end is None or (isinstance(end, int) and end >= size)
    return [place] if whole or name not in walk.labels else None  # a label that did not count before would


def _padded(walk: _Walk, op: Op, places: Places) -> list[Placement] | None:
    """Placement after padding in front of a tensor, or behind it with labels that do not count."""
    pads, name, place = op.attribute("pad"), op.operands[0], places[0]
    assert name is not None and isinstance(place, Shard) and isinstance(pads, tuple)
    dims = len(walk.graph.tensor(name).shape)
    if op.attribute("mode") not in (None, "constant") or place != Shard(place.dim):
        return None
    behind = [pads[2 * n + 1] for n in range(len(pads) // 2) if dims - 1 - n == place.dim]
    ignored = name in walk.labels and op.attribute("value") == walk.labels[name]
    return [place] if behind in ([], [0]) or ignored else None


def _summed_up(walk: _Walk, op: Op, places: Places) -> list[Placement] | None:
    place = places[0]
    return [place] if isinstance(place, Shard) and place == Shard(place.dim) else None


_AFTER: dict[str, Callable[[_Walk, Op, Places], list[Placement] | None]] = {
    "aten.slice": _sliced,
    "aten.pad": _padded,
    "aten.cumsum": _summed_up,
}


def _alike(one: Placement | None, other: Placement | None) -> bool:
    """True if whole on each device, whatever the gradient, or sharded alike."""
    return one == other or (isinstance(one, Replicate) and isinstance(other, Replicate))
