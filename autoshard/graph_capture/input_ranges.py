"""From where to where the numbers of the example inputs go, where a package's synthetic batches must keep to that.

A target of a binary cross entropy is a probability, an index that something is added to has fewer values than the table
has rows. Examples on meta have no values: what the user's code called to make them is run again, from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autoshard.graph_capture.constructor.recipes import replay
from autoshard.ir.graph import Graph, InputRange, RecipeCall
from autoshard.rules.operators import record

LARGEST_ELEMENTS = 2**24  # of one example that is made again
_ALSO_MOVES = frozenset(f"aten.{name}" for name in ("unbind", "stack", "where", "masked_fill"))


def input_ranges(
    graph: Graph, inputs: Sequence[Any], calls_of: Callable[[torch.Tensor], tuple[RecipeCall, ...]]
) -> tuple[InputRange, ...]:
    """Of the inputs whose range the graph alone does not tell: fractions from 0 to 1, and integers computed with."""
    examples = [leaf for leaf in tree_leaves(tuple(inputs)) if isinstance(leaf, torch.Tensor)]
    shapes = [tuple(example.shape) for example in examples]
    if shapes != [graph.tensor(name).shape for name in graph.inputs]:
        return ()  # inputs that the forward does not read are not in the graph
    found = (_range(graph, name, example, calls_of) for name, example in zip(graph.inputs, examples, strict=True))
    return tuple(one for one in found if one is not None)


def _range(
    graph: Graph, name: str, example: torch.Tensor, calls_of: Callable[[torch.Tensor], tuple[RecipeCall, ...]]
) -> InputRange | None:
    is_integer = not example.is_floating_point() and not example.is_complex() and example.dtype != torch.bool
    if not 0 < example.numel() <= LARGEST_ELEMENTS or not (is_integer or example.is_floating_point()):
        return None
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
        return InputRange(name, low, high + 1)
    return InputRange(name, 0.0, 1.0) if 0 <= low < high <= 1 else None


def _is_computed_with(graph: Graph, name: str) -> bool:
    """Whether integers are made of the input's that are not just the same ones."""
    todo, seen = [name], {name}
    while todo:
        for op, _ in graph.consumers[todo.pop()]:
            fresh = [x for x in op.results if x not in seen and graph.tensor(x).dtype.startswith(("int", "uint"))]
            if fresh and not (record(op.target).moves or op.target in _ALSO_MOVES):
                return True
            seen.update(fresh)
            todo += fresh
    return False
