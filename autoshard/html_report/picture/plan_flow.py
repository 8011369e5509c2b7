"""Data of a plan's picture: for each distinct block its boxes and the edges between them.

A box is an operator that matters (see `plan_summary.is_shown`), or joins two flows; the others belong to the box before
them. A redistribution that communicates is a box of its own, between the value and its readers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout
from autoshard.ir.plan import Plan, RedistributionPlan
from autoshard.program.module_tree import HANDFUL
from autoshard.rules.operators import constants
from autoshard.text import plan_labels
from autoshard.text.collective_lines import collectives, move_cost, move_lines, stored_paths
from autoshard.text.plan_summary import is_shown

Kind = Literal["op", "join", "move", "input", "output"]
_QUIET = frozenset(
    {"alias", "arange", "chunk", "clone", "contiguous", "detach", "expand", "flatten", "full", "index", "ones",
     "permute", "reshape", "select", "slice", "split", "squeeze", "t", "to", "transpose", "unflatten", "unsqueeze",
     "view", "zeros"}
)  # fmt: skip
MOST_BOXES = 150  # from which on an operator split as the one before it belongs to that one's box
_MERGED = "\0"


@dataclass(frozen=True)
class TensorShards:
    """A tensor with where it lies."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    talks: tuple[str, ...] = ()  # a stored weight's collectives, in words


@dataclass(frozen=True)
class FlowBox:
    """`name` is the module, `what` the operator or collective, `words` the strategy. `after`: quiet operators that
    follow and belong to it."""

    key: str
    kind: Kind
    name: str = ""
    what: str = ""
    words: str = ""
    tensors: tuple[TensorShards, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockFlow:
    """A distinct block, drawn once for its `times`; edges are (from, to) keys in order."""

    title: str
    times: int
    boxes: tuple[FlowBox, ...]
    edges: tuple[tuple[str, str], ...]


def flows(plan: Plan, graph: Graph) -> tuple[BlockFlow, ...]:
    """The distinct blocks in execution order; those in which nothing matters are left out."""
    groups: list[tuple[str, plan_labels.Block]] = []
    for block in plan_labels.blocks(plan, graph):
        small = len(block.names) == 1 and len(block.rows) <= HANDFUL  # those share a drawing
        if small and groups and len(groups[-1][1].names) == 1 and groups[-1][1].names[0] == _MERGED:
            first = groups[-1][0].partition(" … ")[0]
            title = first if first == _title(block) else f"{first} … {_title(block)}"
            groups[-1] = title, plan_labels.Block((_MERGED,), (*groups[-1][1].rows, *_named(block)))
        elif small:
            groups.append((_title(block), plan_labels.Block((_MERGED,), _named(block))))
        else:
            groups.append((_title(block), block))
    every = [_FlowOfBlock(plan, graph, block).flow(title) for title, block in groups]
    if sum(len(flow.boxes) for flow in every) > MOST_BOXES:
        every = [_FlowOfBlock(plan, graph, block, short=True).flow(title) for title, block in groups]
    return tuple(flow for flow in every if any(box.kind in ("op", "move") for box in flow.boxes))


def _title(block: plan_labels.Block) -> str:
    return block.title if block.names[0] else "outside of blocks"


def _named(block: plan_labels.Block) -> tuple[plan_labels.BlockRow, ...]:
    """Rows with whole module paths, for a picture of several blocks."""
    return tuple(replace(row, module=row.op.module) for row in block.rows)


@dataclass
class _FlowOfBlock:
    """The flow of one block, operator by operator."""

    plan: Plan
    graph: Graph
    block: plan_labels.Block
    short: bool = False
    boxes: dict[str, FlowBox] = field(default_factory=dict)
    edges: dict[tuple[str, str], None] = field(default_factory=dict)
    behind: dict[str, tuple[str, ...]] = field(default_factory=dict)  # tensor -> the boxes that it comes from

    @cached_property
    def stored(self) -> dict[str, Layout]:
        """Parameter -> the layout that it is stored in."""
        here = not self.plan.servers.count  # else tables are on servers
        return {param.name: replace(param.layout, host=param.layout.host and here) for param in self.plan.parameters}

    def flow(self, title: str) -> BlockFlow:
        graph, rows = self.graph, plan_labels.without_casts(self.block.rows, self.graph)
        total = sum(row.plan.forward_seconds + row.plan.backward_seconds for row in rows) or float("inf")
        moves = _moves(self.plan, rows)
        for row in rows:
            sources = self._sources(row.op.operands)
            if self.short and self._goes_on(row, sources, moves):
                self._passes(row.op, sources)
            elif is_shown(row, self.plan, graph, total) or len(sources) > 1:
                self._box(row, moves, shown=is_shown(row, self.plan, graph, total))
            else:
                self._passes(row.op, sources)
        self._outputs()
        times = len(self.block.names)
        joined = {key for edge in self.edges for key in edge}  # what no value of the flow enters or leaves is no part
        boxes = tuple(box for box in self.boxes.values() if box.key in joined)
        return BlockFlow(title, times, boxes, tuple(self.edges))

    def _goes_on(
        self, row: plan_labels.BlockRow, sources: tuple[str, ...], moves: dict[tuple[str, str], RedistributionPlan]
    ) -> bool:
        """True if it is split like the one operator that it reads, and nothing is communicated on the way."""
        before = self.boxes[sources[0]] if len(sources) == 1 else None
        if before is None or (before.kind, before.words) != ("op", row.words) or row.plan.variant:
            return False
        reads = (moves.get((row.op.name, name)) for name in row.op.operands if name and name not in self.graph.weights)
        return not any(move and collectives(move, self.plan, self.graph) for move in reads)

    def _carries(self, name: str) -> bool:
        """True if a value is on the way from input to output: one without a gradient only steers."""
        tensor = self.graph.tensor(name)
        if self.graph.loss is not None:
            return tensor.requires_grad and name not in self.graph.weights
        return "float" in tensor.dtype and name not in constants(self.graph) and name not in self.graph.weights

    def _sources(self, operands: Iterable[str | None]) -> tuple[str, ...]:
        """The boxes that values come from, in order; those of another block are inputs."""
        sources: dict[str, None] = {}
        for name in operands:
            if name is not None and self._carries(name):
                sources |= dict.fromkeys(self.behind.get(name) or (self._input(name),))
        return tuple(sources)

    def _input(self, name: str) -> str:
        key = f"in {name}"
        maker = self.graph.producers.get(name)
        module = maker.module if maker else stored_paths(self.graph).get(name, name)
        self.boxes.setdefault(key, FlowBox(key, "input", name=f"from {module or (maker.name if maker else name)}"))
        return key

    def _passes(self, op: Op, sources: tuple[str, ...]) -> None:
        """A quiet operator: its results come from where its operands do."""
        short = op.target.partition(".")[2]
        for result in op.results:
            self.behind[result] = sources
        if len(sources) == 1 and short not in _QUIET and self.boxes[sources[0]].kind in ("op", "join"):
            box = self.boxes[sources[0]]
            if short not in box.after:
                self.boxes[box.key] = replace(box, after=(*box.after, short))

    def _box(self, row: plan_labels.BlockRow, moves: dict[tuple[str, str], RedistributionPlan], shown: bool) -> None:
        op, graph = row.op, self.graph
        weights: dict[str, Layout] = {}
        incoming: dict[str, None] = {}
        for name, layout in zip(op.operands, row.strategy.operands, strict=True):
            if name is None or layout is None:
                continue
            move = moves.get((op.name, name))
            if name in graph.weights:
                weights[name] = self.stored[graph.weights[name]]
            elif move is not None and collectives(move, self.plan, self.graph):
                incoming[self._move(move)] = None
            elif self._carries(name) or (name in graph.inputs and not self._sources(op.operands)):
                incoming |= dict.fromkeys(self.behind.get(name) or (self._input(name),))
        shards = [
            TensorShards("", graph.tensor(name).shape, layout)
            for name, layout in zip(op.results, row.strategy.results, strict=True)
        ]
        words = row.words + (f", {row.plan.variant}" if row.plan.variant else "")
        what = op.target.partition(".")[2]
        self.boxes[op.name] = FlowBox(
            op.name, "op" if shown else "join", row.module, what, words, (*self._weights(row, weights), *shards[:1])
        )
        for key in incoming:
            self.edges[key, op.name] = None
        for result in op.results:
            self.behind[result] = (op.name,)

    def _weights(self, row: plan_labels.BlockRow, layouts: dict[str, Layout]) -> tuple[TensorShards, ...]:
        """Stored weights: the largest with its layout, the others by name, and their joint communication."""
        if not layouts:
            return ()
        tensors = sorted(layouts, key=lambda name: -self.graph.tensor(name).numel)
        paths = stored_paths(self.graph)
        names = ", ".join(paths[name].rpartition(".")[2] for name in tensors)
        moves = [move for move in row.moves if move.tensor in self.graph.weights]
        largest = self.graph.tensor(tensors[0])
        return (
            TensorShards(names, largest.shape, layouts[tensors[0]], tuple(move_lines(moves, self.plan, self.graph))),
        )

    def _move(self, move: RedistributionPlan) -> str:
        key = f"move {move.tensor} {move.target}"
        if key not in self.boxes:
            for source in self.behind.get(move.tensor) or (self._input(move.tensor),):
                self.edges[source, key] = None
            what, _, back = collectives(move, self.plan, self.graph).partition(", ")
            cost = ", ".join(filter(None, (back, move_cost([move], self.graph, self.plan.mesh))))
            shards = TensorShards("", self.graph.tensor(move.tensor).shape, move.target)
            self.boxes[key] = FlowBox(key, "move", what=what, words=cost, tensors=(shards,))
        return key

    def _outputs(self) -> None:
        """Add the output box, and edges of values that leave the block, in the block's order."""
        ops = {row.op.name for row in self.block.rows}
        for row in self.block.rows:
            for name in row.op.results:
                leaves = name in self.graph.outputs or any(
                    user.name not in ops for user, _ in self.graph.consumers[name]
                )
                sources = self.behind.get(name, ())
                if leaves and self._carries(name) and any(self.boxes[s].kind != "input" for s in sources):
                    self.boxes.setdefault("out", FlowBox("out", "output", name=_out(name, self.graph)))
                    self.edges |= {(source, "out"): None for source in sources if self.boxes[source].kind != "input"}


def _out(name: str, graph: Graph) -> str:
    return "the loss" if name == graph.loss else "an output" if name in graph.outputs else "to the next"


def _moves(plan: Plan, rows: Iterable[plan_labels.BlockRow]) -> dict[tuple[str, str], RedistributionPlan]:
    """(op, tensor) -> what is made for it, whichever reader it is listed under."""
    ops = {row.op.name for row in rows}
    return {
        (consumer, move.tensor): move for move in plan.redistributions for consumer in move.consumers if consumer in ops
    }
