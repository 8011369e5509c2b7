"""The invariants of a Graph. A broken one is a fault in autoshard (or a damaged file), never a user's mistake."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable

from autoshard.ir.graph import DTYPE_BYTES, OWN_NAMESPACES, Graph, GraphFault, Op, Tensor, require
from autoshard.ir.recipe_check import check_recipes
from autoshard.ir.schemas import parse

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_TARGET = re.compile(rf"(?!__){_NAME}\.{_NAME}")
_NO_OPERATORS = ("import_module.", "load_library.", "loaded_libraries.")  # what else torch.ops has: code from elsewhere
_PLAIN = re.compile(_NAME)
MOST_DIMS = 64  # torch's own limit
LARGEST_BYTES = round(1 / sys.float_info.epsilon)  # of a tensor: sums of them stay exact


def check(graph: Graph) -> None:
    """GraphFault names the first op or tensor that breaks an invariant."""
    tensors = {tensor.name: tensor for tensor in graph.tensors}
    _unique("tensor", (tensor.name for tensor in graph.tensors))
    _unique("op", (op.name for op in graph.ops))
    _unique("parameter or buffer path", _paths(graph))
    _check_paths(graph)
    _check_registrations(graph)
    _check_schemas(graph)
    for tensor in graph.tensors:
        _check_tensor(tensor)
    known = _check_sources(graph, tensors)
    for op in graph.ops:
        _check_op(op, known, tensors)
        known.update(op.results)
    for name in tensors:
        require(name in known, f"tensor {name} is neither stored, given nor produced")
    _check_ends(graph, tensors)
    unread = graph.unread_draws
    require([*unread] == sorted({-1, *unread} - {-1}), f"unread draws are {unread}, not positions in order")
    check_recipes(graph)
    _check_ranges(graph)


def _check_tensor(tensor: Tensor) -> None:
    require(tensor.dtype in DTYPE_BYTES, f"tensor {tensor.name} has the unknown dtype {tensor.dtype!r}")
    require(all(size >= 0 for size in tensor.shape), f"tensor {tensor.name} has a negative size in {tensor.shape}")
    require(len(tensor.shape) <= MOST_DIMS, f"tensor {tensor.name} has {len(tensor.shape)} dims, at most {MOST_DIMS}")
    require(tensor.bytes <= LARGEST_BYTES, f"tensor {tensor.name} of shape {tensor.shape} is larger than 4 PiB")
    floating = "float" in tensor.dtype
    require(
        floating or not tensor.requires_grad,
        f"tensor {tensor.name} is {tensor.dtype} and can't require a gradient",
    )


def _check_sources(graph: Graph, tensors: dict[str, Tensor]) -> set[str]:
    sources = [*graph.inputs, *(stored.tensor for stored in graph.parameters + graph.buffers)]
    _unique("input, parameter or buffer", sources)
    for name in sources:
        require(name in tensors, f"input, parameter or buffer {name} has no tensor")
    return set(sources)


def _check_ranges(graph: Graph) -> None:
    """Synthetic numbers can be drawn from each."""
    bounds = [(one.tensor, ((one.low, one.high),)) for one in graph.input_ranges]
    for tensor, pairs in [*bounds, *((one.tensor, one.bounds) for one in graph.column_ranges)]:
        sound = all(math.isfinite(low) and math.isfinite(high) and low < high for low, high in pairs)
        require(pairs and sound, f"the numbers of input {tensor} are in no range: {pairs}")


def _check_op(op: Op, known: set[str], tensors: dict[str, Tensor]) -> None:
    label = f"op {op.name} ({op.target})"
    require(_is_target(op.target), f"op {op.name} has the target {op.target!r}, not namespace.name")
    for name, _ in op.attributes:
        require(_PLAIN.fullmatch(name), f"{label} has an attribute {name!r}, which is no argument of an operator")
    for operand in op.operands:
        require(operand is None or operand in known, f"{label} reads {operand} before it is produced")
    for result in op.results:
        require(result in tensors, f"{label} makes {result}, which has no tensor")
        require(result not in known, f"{label} makes {result} a second time")
    _unique(f"{label} attribute", (name for name, _ in op.attributes))
    for kind, positions, count in (
        ("operand", op.saved.operands, len(op.operands)),
        ("result", op.saved.results, len(op.results)),
        ("result", [result for result, _ in op.saved.aliases], len(op.results)),
        ("operand", [operand for _, operand in op.saved.aliases], len(op.operands)),
    ):
        require(all(0 <= position < count for position in positions), f"{label} saves {kind} {positions} of {count}")
    require(all(op.operands[i] is not None for i in op.saved.operands), f"{label} saves an operand that is not given")
    require(0 <= op.saved.extra_bytes <= LARGEST_BYTES, f"{label} saves {op.saved.extra_bytes} bytes")


def _check_ends(graph: Graph, tensors: dict[str, Tensor]) -> None:
    for name in graph.outputs:
        require(name in tensors, f"output {name} has no tensor")
    if graph.loss is not None:
        require(graph.loss in tensors, f"the loss {graph.loss} has no tensor")
        loss = tensors[graph.loss]
        require(
            loss.shape == () and "float" in loss.dtype,
            f"the loss {loss.name} is {loss.dtype} {loss.shape}, not a scalar",
        )
    buffers = {buffer.tensor for buffer in graph.buffers}
    for buffer, value in graph.buffer_updates:
        require(buffer in buffers, f"{buffer} is updated but is no buffer")
        require(value in tensors, f"buffer {buffer} gets {value}, which has no tensor")
        same = (tensors[buffer].shape, tensors[buffer].dtype) == (tensors[value].shape, tensors[value].dtype)
        require(same, f"buffer {buffer} gets {value}, of another shape or dtype")


def _paths(graph: Graph) -> Iterable[str]:
    for stored in graph.parameters + graph.buffers:
        yield stored.path
        yield from stored.ties


def _check_paths(graph: Graph) -> None:
    """A path is names with dots between, and what holds something else is no tensor."""
    paths = [stored.path for stored in graph.parameters + graph.buffers]
    modules = [path for path, _ in graph.modules]
    for path in (*_paths(graph), *filter(None, modules)):
        require(all(path.split(".")), f"{path!r} is no path of a parameter, buffer or module")
    holders = {path[:i] for path in (*paths, *modules) for i, char in enumerate(path) if char == "."}
    for path in paths:
        require(path not in holders and path not in modules, f"{path} is a parameter or buffer, and holds others")


def _check_registrations(graph: Graph) -> None:
    for item in graph.registrations:
        named = not item.module or bool(item.text) or all(map(_PLAIN.fullmatch, item.module.split(".")))
        require(named, f"operators are registered by {item.module!r}, which is no name of a module")
        for target in item.targets:
            require(_is_target(target), f"{item.module} registers {target!r}, not namespace.name")
            require(target.partition(".")[0] not in OWN_NAMESPACES, f"{item.module} registers {target!r}, torch's own")


def _is_target(text: str) -> bool:
    """Is it an operator's name? It becomes an expression, `torch.ops.` and this."""
    return _TARGET.fullmatch(text) is not None and not text.startswith(_NO_OPERATORS)


def _check_schemas(graph: Graph) -> None:
    """Their names become code, as an operator's own do."""
    for text in graph.schemas:
        try:
            schema = parse(text)
        except ValueError as error:
            raise GraphFault(str(error)) from None
        names = (schema.overload or "default", *(argument.name for argument in schema.arguments))
        named = _is_target(schema.target) and all(map(_PLAIN.fullmatch, names))
        require(named, f"the schema {text!r} has more than names of operators and arguments")


def _unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        require(name not in seen, f"{kind} {name} appears twice")
        seen.add(name)
