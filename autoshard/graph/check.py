"""The invariants of a Graph. A broken one is a fault in autoshard (or a damaged file), never a person's mistake."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autoshard.graph.check_recipes import check_recipes
from autoshard.graph.model import DTYPE_BYTES, Graph, Op, Tensor

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_DOTTED = re.compile(rf"{_NAME}(\.{_NAME})+")
_PLAIN = re.compile(_NAME)


def check(graph: Graph) -> None:
    """AssertionError names the first op or tensor that breaks an invariant."""
    tensors = {tensor.name: tensor for tensor in graph.tensors}
    _unique("tensor", (tensor.name for tensor in graph.tensors))
    _unique("op", (op.name for op in graph.ops))
    _unique("parameter or buffer path", _paths(graph))
    _check_paths(graph)
    _check_registrations(graph)
    for tensor in graph.tensors:
        _check_tensor(tensor)
    known = _check_sources(graph, tensors)
    for op in graph.ops:
        _check_op(op, known, tensors)
        known.update(op.results)
    unmade = [name for name in tensors if name not in known]
    assert not unmade, f"tensor {unmade[0]} is neither stored, given nor produced"
    _check_ends(graph, tensors)
    check_recipes(graph)


def _check_tensor(tensor: Tensor) -> None:
    assert tensor.dtype in DTYPE_BYTES, f"tensor {tensor.name} has the unknown dtype {tensor.dtype!r}"
    assert all(size >= 0 for size in tensor.shape), f"tensor {tensor.name} has a negative size in {tensor.shape}"
    floating = "float" in tensor.dtype
    assert floating or not tensor.requires_grad, f"tensor {tensor.name} is {tensor.dtype} and can't require a gradient"


def _check_sources(graph: Graph, tensors: dict[str, Tensor]) -> set[str]:
    sources = [*graph.inputs, *(stored.tensor for stored in graph.parameters + graph.buffers)]
    _unique("input, parameter or buffer", sources)
    for name in sources:
        assert name in tensors, f"input, parameter or buffer {name} has no tensor"
    return set(sources)


def _check_op(op: Op, known: set[str], tensors: dict[str, Tensor]) -> None:
    label = f"op {op.name} ({op.target})"
    assert _DOTTED.fullmatch(op.target), f"op {op.name} has the target {op.target!r}, not namespace.name"
    for name, _ in op.attributes:
        assert _PLAIN.fullmatch(name), f"{label} has an attribute {name!r}, which is no argument of an operator"
    for operand in op.operands:
        assert operand is None or operand in known, f"{label} reads {operand} before it is produced"
    for result in op.results:
        assert result in tensors, f"{label} makes {result}, which has no tensor"
        assert result not in known, f"{label} makes {result} a second time"
    _unique(f"{label} attribute", (name for name, _ in op.attributes))
    for kind, positions, count in (
        ("operand", op.saved.operands, len(op.operands)),
        ("result", op.saved.results, len(op.results)),
        ("result", [result for result, _ in op.saved.aliases], len(op.results)),
        ("operand", [operand for _, operand in op.saved.aliases], len(op.operands)),
    ):
        assert all(0 <= position < count for position in positions), f"{label} saves {kind} {positions} of {count}"
    assert all(op.operands[i] is not None for i in op.saved.operands), f"{label} saves an operand that is not given"
    assert op.saved.extra_bytes >= 0, f"{label} saves {op.saved.extra_bytes} bytes"


def _check_ends(graph: Graph, tensors: dict[str, Tensor]) -> None:
    for name in graph.outputs:
        assert name in tensors, f"output {name} has no tensor"
    if graph.loss is not None:
        assert graph.loss in tensors, f"the loss {graph.loss} has no tensor"
        loss = tensors[graph.loss]
        assert loss.shape == () and "float" in loss.dtype, (
            f"the loss {loss.name} is {loss.dtype} {loss.shape}, not a scalar"
        )
    buffers = {buffer.tensor for buffer in graph.buffers}
    for buffer, value in graph.buffer_updates:
        assert buffer in buffers, f"{buffer} is updated but is no buffer"
        assert value in tensors, f"buffer {buffer} gets {value}, which has no tensor"
        same = (tensors[buffer].shape, tensors[buffer].dtype) == (tensors[value].shape, tensors[value].dtype)
        assert same, f"buffer {buffer} gets {value}, of another shape or dtype"


def _paths(graph: Graph) -> Iterable[str]:
    for stored in graph.parameters + graph.buffers:
        yield stored.path
        yield from stored.ties


def _check_paths(graph: Graph) -> None:
    """A path is names with dots between, and what holds something else is no tensor."""
    paths = [stored.path for stored in graph.parameters + graph.buffers]
    modules = [path for path, _ in graph.modules]
    for path in (*_paths(graph), *filter(None, modules)):
        assert all(path.split(".")), f"{path!r} is no path of a parameter, buffer or module"
    holders = {path[:i] for path in (*paths, *modules) for i, char in enumerate(path) if char == "."}
    for path in paths:
        assert path not in holders and path not in modules, f"{path} is a parameter or buffer, and holds others"


def _check_registrations(graph: Graph) -> None:
    for item in graph.registrations:
        named = not item.module or bool(item.text) or all(map(_PLAIN.fullmatch, item.module.split(".")))
        assert named, f"operators are registered by {item.module!r}, which is no name of a module"
        for target in item.targets:
            assert _DOTTED.fullmatch(target), f"{item.module} registers {target!r}, not namespace.name"


def _unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        assert name not in seen, f"{kind} {name} appears twice"
        seen.add(name)
