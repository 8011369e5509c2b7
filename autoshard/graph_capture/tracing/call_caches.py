"""Checks that a forward keeps from call to call only what it would recompute: masks, rotary tables, biases by index.

A trace begins with empty caches and holds the computation: that is the model if a call with full ones does the same.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.graph_capture.tracing import LISTED

_CONTAINERS = (list, dict, set, OrderedDict)  # hooks are in the last
_CACHED = type(functools.lru_cache(lambda: None))
_ATEN = torch.ops.aten
_COPIES = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN.copy.default)  # of the last operand
_SLICE, _WRITTEN = _ATEN.slice.Tensor, _ATEN.slice_scatter.default


def cached_alike(
    model: Module, inputs: tuple[Any, ...], export: Callable[[Module, tuple[Any, ...]], Any], look: Callable[[], Any]
) -> bool:
    """True where a second call, of other values, leaves all as the first left it (`look` gives the attributes), and
    computes what the first did, in part by what that kept: nothing drawn, or of an input, or of what a step changes.

    Both calls are one trace, so that no value is needed. The model is left as it was.
    """
    seen: list[Any] = []

    class Twice(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *both: Any) -> tuple[list[Any], list[Any]]:
            half, results = len(both) // 2, []
            for arguments in (both[:half], both[half:]):
                results.append(leaves(self.model(*arguments)))
                seen.append(look())
            return results[0], results[1]

    others = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, inputs)
    with attributes_put_back(model):
        try:
            program = export(Twice(), (*inputs, *others)).run_decompositions({})
        except Exception:  # of any kind, of the model's own code in its second call
            return False
    trained = {f"model.{path}" for path, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
    return len(seen) >= 2 and seen[-1] == seen[-2] and _computes_alike(program, model.training, trained)


def leaves(returned: Any) -> list[Any]:
    """Leaves of what a forward returned; torch learns how to take apart the dataclasses in it."""
    while learned(returned):
        pass
    return list(tree_leaves(returned))


def learned(returned: Any) -> bool:
    """Register dataclasses in `returned` that torch could not take apart; True if there were any."""
    kinds = {type(leaf) for leaf in tree_leaves(returned) if dataclasses.is_dataclass(leaf)} - {type}
    for kind in kinds:
        torch.export.register_dataclass(kind)
    return bool(kinds)


def _computes_alike(program: Any, training: bool, trained: Container[str]) -> bool:
    graph, signature = program.graph, program.graph_signature
    changing = {node for node, spec in _placeholders(graph, signature) if _changes(spec, signature, training, trained)}
    same = _passed_on(graph, changing)
    first, second = (tuple(same.get(node, node) for node in half) for half in _halves(graph, signature))
    numbers = _numbers(program, same)
    if [numbers[node] for node in first] != [numbers[node] for node in second]:
        return False
    cached = {node for node in _behind(first, same) & _behind(second, same) if node.op != "placeholder"}
    roots = {node for node in _behind(tuple(cached), same) if node.op == "placeholder"}
    return not roots & changing and not any(map(_draws, cached))


def _changes(spec: Any, signature: ExportGraphSignature, training: bool, trained: Container[str]) -> bool:
    """True if the input of this spec has other values in another call."""
    if spec.kind is InputKind.PARAMETER:
        return training and spec.target in trained
    return spec.kind is InputKind.USER_INPUT or spec.target in signature.buffers_to_mutate.values()


def _placeholders(graph: fx.Graph, signature: ExportGraphSignature) -> list[tuple[fx.Node, Any]]:
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    return list(zip(nodes, signature.input_specs, strict=True))


def _passed_on(graph: fx.Graph, changing: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Nodes that hand on another's value, mapped to it: a copy, or the part of a tensor that was just written there.
    Not for what changes from call to call, whose gradient a copy may stop."""
    sources: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        operands = [sources.get(x, x) for x in node.args if isinstance(x, fx.Node)]
        if node.target == _SLICE and operands[0].target == _WRITTEN and node.args[1:] == operands[0].args[2:]:
            source = operands[0].args[1]
        else:
            source = operands[-1] if node.target in _COPIES and _alike(operands[-1], node) else None
        if isinstance(source, fx.Node) and not _behind((source,), sources) & changing:
            sources[node] = sources.get(source, source)
    return sources


def _alike(a: fx.Node, b: fx.Node) -> bool:
    one, other = a.meta.get("val"), b.meta.get("val")
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and (one.shape, one.dtype) == (other.shape, other.dtype)


def _halves(graph: fx.Graph, signature: ExportGraphSignature) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The tensors that each call returns."""
    returned = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(returned, list | tuple)
    user = [
        node
        for node, spec in zip(returned, signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(node, fx.Node)
    ]
    half = len(user) // 2
    return tuple(user[:half]), tuple(user[half:])


def _numbers(program: Any, same: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """Number of each node; nodes that compute alike share one: the same operator of operands alike; inputs of both
    calls by place, numbers that the code writes, of which each call has its own, by value."""
    graph, signature = program.graph, program.graph_signature
    numbers: dict[Any, int] = {}
    by_node: dict[fx.Node, int] = {}
    inputs = [node for node, spec in _placeholders(graph, signature) if spec.kind is InputKind.USER_INPUT]
    place: dict[fx.Node, Any] = {node: index % (len(inputs) // 2 or 1) for index, node in enumerate(inputs)}
    for node, spec in _placeholders(graph, signature):
        value = program.constants.get(spec.target) if spec.kind is InputKind.CONSTANT_TENSOR else None
        if value is not None and value.numel() <= LISTED:
            place[node] = (str(value.dtype), tuple(value.shape), repr(value.tolist()))
    for node in graph.nodes:
        if node.op == "placeholder":
            key: Any = ("input", place[node]) if node in place else node.name
        else:
            arguments = tree_map(
                lambda x: ("node", by_node[same.get(x, x)]) if isinstance(x, fx.Node) else repr(x),
                (node.args, node.kwargs),
            )
            key = (str(node.target), repr(arguments))
        by_node[node] = numbers.setdefault(key, len(numbers))
    return by_node


def _behind(nodes: tuple[fx.Node, ...], same: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are made of."""
    reached: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = same.get(todo[-1], todo.pop())
        if node not in reached:
            reached.add(node)
            todo += node.all_input_nodes
    return reached


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@contextmanager
def attributes_put_back(model: Module) -> Iterator[None]:
    """Restore every module's attributes and what their containers hold: no cache outlives the context.

    Functions of the model's files that have tensors in a `functools.lru_cache` recompute them, within and after it.
    """
    states = [(module, dict(module.__dict__)) for module in model.modules()]
    held = [value for _, attributes in states for value in attributes.values() if type(value) in _CONTAINERS]
    containers = [(value, value.copy()) for value in held]
    functions = _cached_functions(model)
    _empty(functions)
    try:
        yield
    finally:
        _empty(functions)
        for module, attributes in states:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for value, was in containers:
            value.clear()
            value.extend(was) if isinstance(value, list) else value.update(was)


def _cached_functions(model: Module) -> list[Any]:
    """Functions with a `functools.lru_cache` in the files of the model's classes: methods too, also in a decorator."""
    names = {type(part).__module__ for part in model.modules() if not type(part).__module__.startswith("torch.")}
    values = [value for name in names if name in sys.modules for value in list(vars(sys.modules[name]).values())]
    classes = [cls for cls in values if isinstance(cls, type) and cls.__module__ in names]
    values += [value for cls in classes for value in vars(cls).values()]
    for cell in [cell for value in values for cell in getattr(value, "__closure__", None) or ()]:
        with suppress(ValueError):  # of a name that has no value yet
            values.append(cell.cell_contents)
    return [value for value in values if isinstance(value, _CACHED)]


def _empty(functions: list[Any]) -> None:
    """Clear caches that hold tensors; what else a cache holds (a configuration, a model) stays the same object."""
    for function in functions:
        if any(isinstance(x, torch.Tensor) for x in tree_leaves(gc.get_referents(function))):
            function.cache_clear()
