"""Graph as a line of blocks: the items of its lists of modules, and what stands before and after them.

Blocks of one kind are equal operator for operator, and read and return the same. Operators between two blocks belong to
the first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from autoshard.ir.graph import Graph, Op
from autoshard.program.weight_buckets import block_of

Marks = Mapping[str, tuple[Hashable, ...]]
KEPT = 3  # blocks of a run of equal ones that a short graph keeps: the one in the middle stands for all


@dataclass(frozen=True)
class LineBlock:
    """Operators [first, stop). `module` is the block's path, "" before and after the blocks. Equal blocks have the same
    `kind`, numbered by first mention."""

    first: int
    stop: int
    module: str
    kind: int = -1


@dataclass(frozen=True, eq=False)
class BlockLine:
    graph: Graph
    blocks: tuple[LineBlock, ...]

    def ops(self, block: LineBlock) -> tuple[Op, ...]:
        return self.graph.ops[block.first : block.stop]

    def runs(self) -> Iterator[list[int]]:
        """Runs of consecutive blocks of one kind, as positions in the line."""
        for _, run in groupby(range(len(self.blocks)), key=lambda k: self.blocks[k].kind):
            yield list(run)


def block_line(graph: Graph, marks: Marks = MappingProxyType({})) -> BlockLine:
    """Blocks of a graph, in its order. `marks`: operator -> what else tells equal ones apart, such as pins."""
    blocks: list[LineBlock] = []
    for module, indices in groupby(range(len(graph.ops)), key=lambda i: block_of(graph.ops[i].module)):
        positions = list(indices)
        first, stop = positions[0], positions[-1] + 1
        between = not module and blocks and stop < len(graph.ops)
        if between:
            blocks[-1] = replace(blocks[-1], stop=stop)
        else:
            blocks.append(LineBlock(first, stop, module))
    return BlockLine(graph, _with_kinds(graph, blocks, marks))


def _with_kinds(graph: Graph, blocks: list[LineBlock], marks: Marks) -> tuple[LineBlock, ...]:
    makers = {name: i for i, op in enumerate(graph.ops) for name in op.results}
    readers: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for name in op.operands:
            if name is not None:
                readers.setdefault(name, []).append(i)
    owner = [number for number, block in enumerate(blocks) for _ in range(block.first, block.stop)]
    kinds: dict[Hashable, int] = {}
    numbered = []
    marked = [tuple(marks.get(op.name, ()) for op in graph.ops[block.first : block.stop]) for block in blocks]
    for number, block in enumerate(blocks):
        before = marked[number - 1] if number and blocks[number - 1].module else ()  # what leaves it comes in here
        before = before if before != marked[number] and any(before) else ()
        key = _content(graph, block, number, owner, makers, readers), marked[number], before
        numbered.append(replace(block, kind=kinds.setdefault(key, len(kinds))))
    return tuple(numbered)


def _content(
    graph: Graph, block: LineBlock, number: int, owner: list[int], makers: dict[str, int], readers: dict[str, list[int]]
) -> Hashable:
    stored = {p.tensor for p in (*graph.parameters, *graph.buffers)}

    def facts(name: str) -> Hashable:
        tensor = graph.tensor(name)
        return tensor.shape, tensor.dtype, tensor.requires_grad

    def reference(name: str) -> Hashable:
        maker = makers.get(name)
        if maker is None:
            alone = name in stored and {owner[i] for i in readers[name]} == {number}
            return ("own", facts(name)) if alone else ("shared", name)
        if owner[maker] == number:
            return maker - block.first, graph.ops[maker].results.index(name)
        alone = {owner[i] for i in readers[name]} <= {number - 1, number}
        return ("before", facts(name)) if alone and owner[maker] == number - 1 else ("outer", name)

    def outside_readers(op: Op) -> Iterator[Hashable]:
        """Readers of each result outside the block: any, any beyond the next block, the graph's outputs."""
        for name in op.results:
            outside = {owner[i] - number for i in readers.get(name, ()) if owner[i] != number}
            yield bool(outside), bool(outside - {1}), name in graph.outputs

    return tuple(
        (
            op.target,
            op.attributes,
            op.saved,
            tuple(None if name is None else reference(name) for name in op.operands),
            tuple(map(facts, op.results)),
            tuple(outside_readers(op)),
        )
        for op in graph.ops[block.first : block.stop]
    )


@dataclass(frozen=True, eq=False)
class ShortGraph:
    """Graph with at most KEPT blocks of each run. `sources[k]`: the block of the whole line that block k is;
    `represents[kind]`: the block of the short line that stands for a kind of the whole line."""

    line: BlockLine
    sources: tuple[int, ...]
    represents: dict[int, int]

    @property
    def graph(self) -> Graph:
        return self.line.graph


def shortened(line: BlockLine) -> ShortGraph:
    """The line with fewer equal blocks: readers of a removed block's result read that of the last block kept."""
    sources: list[int] = []
    renamed: dict[str, str] = {}
    for run in line.runs():
        sources += run[:KEPT]
        last = line.ops(line.blocks[run[:KEPT][-1]])
        for number in run[KEPT:]:
            for left_out, stays in zip(line.ops(line.blocks[number]), last, strict=True):
                renamed |= dict(zip(left_out.results, stays.results, strict=True))
    ops = [op for number in sources for op in line.ops(line.blocks[number])]
    graph = _only(line.graph, ops, renamed)
    blocks, position = [], 0
    for number in sources:
        block = line.blocks[number]
        size = block.stop - block.first
        blocks.append(replace(block, first=position, stop=position + size))
        position += size
    short = BlockLine(graph, tuple(blocks))
    represents: dict[int, int] = {}
    for run in short.runs():
        represents.setdefault(blocks[run[0]].kind, run[len(run) // 2])
    return ShortGraph(short, tuple(sources), represents)


def _only(graph: Graph, ops: list[Op], renamed: dict[str, str]) -> Graph:
    ops = [replace(op, operands=tuple(name and renamed.get(name, name) for name in op.operands)) for op in ops]
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    used = {name for op in ops for name in (*op.operands, *op.results) if name} | {*graph.inputs, *outputs}
    names = {op.name for op in ops}
    parameters = tuple(p for p in graph.parameters if p.tensor in used)
    used |= {buffer.tensor for buffer in graph.buffers}
    paths = {path for p in (*parameters, *graph.buffers) for path in (p.path, *p.ties)}
    updates = tuple((b, value) for b, value in graph.buffer_updates if b in used and value in used)
    return replace(
        graph,
        tensors=tuple(t for t in graph.tensors if t.name in used),
        parameters=parameters,
        ops=tuple(ops),
        outputs=outputs,
        buffer_updates=updates,
        recipes=tuple(recipe for recipe in graph.recipes if paths.issuperset(recipe.paths)),
        discovered=tuple(pair for pair in graph.discovered if pair[0] in names),
        strategies=tuple(pair for pair in graph.strategies if pair[0] in names),
        free_sizes=(),  # of numbers of the whole graph
    )
