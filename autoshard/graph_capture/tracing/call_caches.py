"""Whether a forward keeps from call to call only what it would compute anew: masks, rotary tables, biases by index.

A trace begins with empty caches and holds the computation: the model, if a call with full ones computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

_CONTAINERS = (list, dict, set)
_LASTING = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


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
            for own in (both[:half], both[half:]):
                results.append(tree_leaves(self.model(*own)))
                seen.append(look())
            return results[0], results[1]

    others = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, inputs)
    with attributes_put_back(model):
        try:
            program = export(Twice(), (*inputs, *others)).run_decompositions({})
        except Exception:  # of any kind, of the model's own code in its second call
            return False
    return len(seen) >= 2 and seen[-1] == seen[-2] and _computes_alike(program, model.training)


def _computes_alike(program: Any, training: bool) -> bool:
    graph, signature = program.graph, program.graph_signature
    first, second = _halves(graph, signature)
    shapes = _shapes(graph, signature)
    if [shapes[node] for node in first] != [shapes[node] for node in second]:
        return False
    kept = (_behind(first) & _behind(second)) - {node for node in graph.nodes if node.op == "placeholder"}
    fixed = {node for node, kind in _placeholders(graph, signature) if kind in _fixed(training)}
    changed = set(signature.buffers_to_mutate.values())
    fixed -= {node for node in fixed if signature.inputs_to_buffers.get(node.name) in changed}
    roots = {node for node in _behind(tuple(kept)) if node.op == "placeholder"}
    return roots <= fixed and not any(map(_draws, kept))


def _fixed(training: bool) -> tuple[InputKind, ...]:
    """What keeps its values from call to call."""
    return _LASTING[1:] if training else _LASTING


def _placeholders(graph: fx.Graph, signature: ExportGraphSignature) -> list[tuple[fx.Node, InputKind]]:
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    return [(node, spec.kind) for node, spec in zip(nodes, signature.input_specs, strict=True)]


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


def _shapes(graph: fx.Graph, signature: ExportGraphSignature) -> dict[fx.Node, int]:
    """Nodes that compute alike have one number: the same operator of operands alike; inputs of both calls by place."""
    numbers: dict[Any, int] = {}
    found: dict[fx.Node, int] = {}
    inputs = [node for node, kind in _placeholders(graph, signature) if kind is InputKind.USER_INPUT]
    place = {node: index % (len(inputs) // 2 or 1) for index, node in enumerate(inputs)}
    for node in graph.nodes:
        if node.op == "placeholder":
            key: Any = ("input", place[node]) if node in place else node.name
        else:
            arguments = tree_map(
                lambda x: ("node", found[x]) if isinstance(x, fx.Node) else repr(x), (node.args, node.kwargs)
            )
            key = (str(node.target), repr(arguments))
        found[node] = numbers.setdefault(key, len(numbers))
    return found


def _behind(nodes: tuple[fx.Node, ...]) -> set[fx.Node]:
    """These and all that they are made of."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@contextmanager
def attributes_put_back(model: Module) -> Iterator[None]:
    """Attributes of every module as they are, with what stands in their containers: no cache outlives the context."""
    own = [(module, dict(module.__dict__)) for module in model.modules()]
    held = [value for _, found in own for value in found.values() if type(value) in _CONTAINERS]
    containers = [(value, value.copy()) for value in held]
    try:
        yield
    finally:
        for module, found in own:
            module.__dict__.clear()
            module.__dict__.update(found)
        for value, was in containers:
            value.clear()
            value.extend(was) if isinstance(value, list) else value.update(was)
