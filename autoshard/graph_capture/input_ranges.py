"""Ranges of the example inputs' numbers, where a package's synthetic batches must keep to them.

A target of a binary cross entropy is a probability, an index that something is added to has fewer values than the table
has rows, and other ones in each column where an offset for each column is added. Examples on meta have no values: what
the user's code called to make them is run again, from a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autoshard.graph_capture.constructor.recipes import replay
from autoshard.graph_capture.tracing import LARGEST_ELEMENTS, LISTED
from autoshard.ir.graph import ColumnRanges, Graph, InputRange, Op, RecipeCall
from autoshard.rules.operators import record

_ALSO_MOVES = frozenset(f"aten.{name}" for name in ("unbind", "stack", "where", "masked_fill"))
_BAGS = ("autoshard.embedding_bags", "aten.embedding_bag")
_CHOOSE_COLUMNS = frozenset(f"aten.{name}" for name in ("select", "slice", "narrow", "unbind", "split", "chunk"))

CallsOf = Callable[[torch.Tensor], tuple[RecipeCall, ...]]
Ranges = tuple[tuple[InputRange, ...], tuple[ColumnRanges, ...]]


def input_ranges(graph: Graph, inputs: Sequence[Any], calls_of: CallsOf) -> Ranges:
    """The ranges of the inputs that the graph alone does not tell: fractions from 0 to 1, and integers computed with,
    these for each column too where columns differ."""
    examples = [leaf for leaf in tree_leaves(tuple(inputs)) if isinstance(leaf, torch.Tensor)]
    shapes = [tuple(example.shape) for example in examples]
    if shapes != [graph.tensor(name).shape for name in graph.inputs]:
        return (), ()  # inputs that the forward does not read are not in the graph
    ranges = [_range(graph, name, example, calls_of) for name, example in zip(graph.inputs, examples, strict=True)]
    return tuple(r for r in ranges if isinstance(r, InputRange)), tuple(
        r for r in ranges if isinstance(r, ColumnRanges)
    )


def _range(graph: Graph, name: str, example: torch.Tensor, calls_of: CallsOf) -> InputRange | ColumnRanges | None:
    is_integer = not example.is_floating_point() and not example.is_complex() and example.dtype != torch.bool
    if not 0 < example.numel() <= LARGEST_ELEMENTS or not (is_integer or example.is_floating_point()):
        return None
    if is_integer and (starts := _starts(graph, name)):
        return ColumnRanges(name, tuple((float(start), start + 1.0) for start in starts))
    if is_integer and not _is_computed_with(graph, name):
        return None
    if calls := calls_of(example):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same graph every time
            example = replay(calls)
    if example.is_meta or not bool(torch.isfinite(example).all()):
        return None
    low, high = (float(x) for x in example.detach().aminmax())
    if is_integer:
        return _of_columns(name, example) if _columns_differ(graph, name) else InputRange(name, low, high + 1)
    return InputRange(name, 0.0, 1.0) if 0 <= low < high <= 1 else None


def _starts(graph: Graph, name: str) -> list[int]:
    """Offsets of equally long bags, if input `name` says where the bags of a list of ids begin; else []."""
    moved = [tensor for op, _ in _integer_uses(graph, name) if _moves(op) for tensor in op.results]
    for op, position in (use for tensor in (name, *moved) for use in graph.consumers[tensor]):
        if op.target in _BAGS and position == 2 and op.operands[1] is not None:
            count, bags = graph.tensor(op.operands[1]).numel, graph.tensor(op.results[0]).shape[0]
            return [count * place // max(bags, 1) for place in range(graph.tensor(name).numel)]
    return []


def _of_columns(name: str, example: torch.Tensor) -> ColumnRanges:
    rows = example.detach().flatten(0, -2)
    pairs = zip(rows.amin(0).tolist(), rows.amax(0).tolist(), strict=True)
    return ColumnRanges(name, tuple((float(low), float(high) + 1) for low, high in pairs))


def _is_computed_with(graph: Graph, name: str) -> bool:
    """True if an operator computes new integers from the input, rather than only moving its own."""
    return any(not _moves(op) for op, _ in _integer_uses(graph, name))


def _columns_differ(graph: Graph, name: str) -> bool:
    """True if the model takes single places of the last dim, or computes with a different number for each place."""
    shape = graph.tensor(name).shape
    if len(shape) < 2 or not 1 < shape[-1] <= LISTED:  # longer ones are hidden sizes, not features
        return False
    uses = [(op, value) for op, value in _integer_uses(graph, name) if graph.tensor(value).shape[-1:] == shape[-1:]]
    places = sum(_places(graph, op, value) for op, value in uses)
    return places > 1 or any(_by_column(graph, op, value, shape[-1]) for op, value in uses)


def _places(graph: Graph, op: Op, value: str) -> int:
    """How many single places of the last dim an operator takes: one token of a sequence says nothing, nor do many."""
    shape, dim = graph.tensor(value).shape, dict(op.attributes).get("dim")
    if op.target not in _CHOOSE_COLUMNS or not isinstance(dim, int) or dim % len(shape) != len(shape) - 1:
        return 0
    positions = math.prod(shape[:-1])
    return sum(graph.tensor(result).numel == positions for result in op.results)


def _by_column(graph: Graph, op: Op, value: str, columns: int) -> bool:
    others = [graph.tensor(x) for x in op.operands if x is not None and x != value and x not in graph.inputs]
    return not _moves(op) and any(x.shape[-1:] == (columns,) == (x.numel,) and "int" in x.dtype for x in others)


def _integer_uses(graph: Graph, name: str) -> Iterator[tuple[Op, str]]:
    """(op, operand) of each op that makes integers of the input's, as far as these are just the same ones."""
    todo, seen = [name], {name}
    while todo:
        value = todo.pop()
        for op, _ in graph.consumers[value]:
            fresh = [x for x in op.results if x not in seen and graph.tensor(x).dtype.startswith(("int", "uint"))]
            if fresh:
                yield op, value
            if _moves(op):
                seen.update(fresh)
                todo += fresh


def _moves(op: Op) -> bool:
    return record(op.target).moves or op.target in _ALSO_MOVES
