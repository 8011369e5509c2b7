"""Dynamic sizes along which a batch may be padded: rows of padding whose labels are ignored change no number.

So it is where rows are apart: cut along the size, every operator computes its part alone (no variant, no partial sum),
down to losses that are means over the labels that count. Batch norm, experts' balance, a contrast of samples, and the
length of sequences, of which attention reads all, are none.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard import rules
from autoshard.graph_capture.dynamic.graph_numbers import at_sizes, sizes_of
from autoshard.ir.dynamic import DynamicSize
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import REPLICATE, Placement, Replicate, Shard
from autoshard.ir.mesh import Mesh
from autoshard.program.module_scopes import RANDOM
from autoshard.program.step_check import LABEL_LOSSES
from autoshard.rules.operators import record

_PARTS = (2, 3, 5, 7)  # by which a size of the form is cut to see whether its rows are apart
_UNITS = 60  # of a size, among which is one that one of these divides, whatever its remainder
_MEAN = (None, 1, "mean")


def padding_of(graph: Graph) -> dict[str, dict[str, int]]:
    """Size -> label input -> the label that does not count, of each size along which padding is allowed."""
    if graph.buffer_updates or graph.loss is None:
        return {}
    labels = _labels(graph)
    return {own.name: labels for own in graph.dynamic if labels and _are_apart(graph, own)}


def _labels(graph: Graph) -> dict[str, int]:
    """Input -> its ignored label; {} where a loss takes others than inputs, moved about."""
    found = {}
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
            found[name] = ignored
    return found


def _is_label_alone(graph: Graph, name: str) -> bool:
    """Is an input read by losses only? A decoder's inputs, say, would look the ignored label up."""
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


def _are_apart(graph: Graph, own: DynamicSize) -> bool:
    if len({name for name, _ in own.dims}) < len(own.dims):
        return False  # rows and columns of one table
    sizes = (own.divisor * n + own.remainder for n in range(2, _UNITS))
    size, parts = next(((size, parts) for size in sizes for parts in _PARTS if size % parts == 0), (0, 1))
    if not size:
        return False
    plain = replace(at_sizes(graph, sizes_of(graph) | {own.name: size}), dynamic=(), follows=())
    place = graph.dynamic.index(own)
    following = {name for f in graph.follows for name in f.places if any(term.powers[place] for term in f.terms)}
    return _Walk(plain, Mesh((("all", parts),)), dict(own.dims), following).reaches_the_loss()


class _Walk:
    """The placements that follow from cutting inputs at `dims`."""

    def __init__(self, graph: Graph, mesh: Mesh, dims: dict[str, int], following: set[str]) -> None:
        self.graph, self.mesh, self.following = graph, mesh, following
        self.known = rules.candidates(graph, mesh)
        self.placed: dict[str, Placement] = {name: Shard(dim) for name, dim in dims.items()}

    def reaches_the_loss(self) -> bool:
        return all(self._goes_on(op) for op in self.graph.ops)

    def _goes_on(self, op: Op) -> bool:
        own = [None if name is None else self.placed.get(name, REPLICATE) for name in op.operands]
        if not any(isinstance(place, Shard) for place in own):
            self._begins(op)
            return True
        if op.target in LABEL_LOSSES and _counts_labels(op):
            return all(place == Shard(0) for place in own[:2])
        made = next((found for found in self._offered(op, own) if all(isinstance(x, Shard) for x in found)), None)
        self.placed.update(zip(op.results, made or (), strict=made is not None))
        return made is not None

    def _begins(self, op: Op) -> None:
        """What is spread over the rows, as a token that all samples begin with, is cut as they are."""
        rows = [
            [dim for dim in range(len(self._shape(name))) if f"{name} {dim}" in self.following] for name in op.results
        ]
        wanted = [Shard(dims[0]) for dims in rows if len(dims) == 1]
        if len(wanted) == len(rows) and wanted in self._offered(
            op, [None if n is None else REPLICATE for n in op.operands]
        ):
            self.placed.update(zip(op.results, wanted, strict=True))

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.graph.tensor(name).shape

    def _offered(self, op: Op, own: list[Placement | None]) -> list[list[Placement]]:
        """What an operator makes of operands placed so, by itself."""
        found = []
        for strategy in rules.strategies(self.graph, op, self.mesh, self.known):
            given = [None if layout is None else layout.placements[0] for layout in strategy.operands]
            alone = strategy.variant == "" or strategy.variant in RANDOM
            if alone and all(map(_alike, own, given)):
                found.append([layout.placements[0] for layout in strategy.results])
        return found


def _alike(one: Placement | None, other: Placement | None) -> bool:
    """Whole on each device, whatever its gradient; or cut alike."""
    return one == other or (isinstance(one, Replicate) and isinstance(other, Replicate))
