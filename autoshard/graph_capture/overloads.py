"""Which overload of a torch operator an op of a graph means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from autoshard.ir.graph import Graph
from autoshard.ir.schemas import Schema, fitting, parse


@cache
def schemas_of(target: str) -> dict[Schema, Any]:
    """The functional overloads of an operator (`aten.add`) on tensors; none where torch does not know it."""
    namespace, _, name = target.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return {}
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return {parse(str(o._schema)): o for o in overloads if _is_functional(o._schema)}


def _is_functional(schema: Any) -> bool:
    text = str(schema)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not writes and "Dimname" not in text and "prim_" not in schema.overload_name and "Tensor" in text


# What a graph from elsewhere may call: tensors, numbers and choices go in, nothing but tensors and numbers comes out.
_NAMESPACES = ("aten", "prims")
_KINDS = frozenset({"Tensor", "number", "int", "float", "bool", "complex", "Device", "Generator"})
_CHOICES = frozenset({  # arguments whose text is one of a few words, and no name of a file
    "reduce", "activation", "padding_side", "norm", "mode", "ord", "approximate", "interpolation", "driver", "p",
    "pad_mode", "UPLO", "side", "rounding_mode", "padding", "equation", "indexing",
})  # fmt: skip
# Files; torch's own tests; what takes numbers as pointers or sizes without a look, or a process's memory.
_NEVER = re.compile(r"from_file|_test_.*|_foobar|.*fbgemm.*|_wrapped_.*|_nested_.*|_sparse_.*_unsafe|.*pin_memory|set_")


def is_operator(target: str) -> bool:
    """Does this torch have it?"""
    namespace, _, name = target.partition(".")
    return isinstance(getattr(getattr(torch.ops, namespace), name, None), torch._ops.OpOverloadPacket)


def is_harmless(target: str) -> bool:
    """Has it a functional overload that touches tensors alone?"""
    return any(_is_functional(schema) and _is_plain(schema) for schema in _callable(target).values())


def is_harmless_call(target: str, overload: str) -> bool:
    """Does this overload touch tensors alone? It may change those that it is given."""
    schema = _callable(target).get(overload)
    return schema is not None and _is_plain(schema)


def _callable(target: str) -> dict[str, Any]:
    """Overload -> schema, of what may be callable at all."""
    namespace, _, name = target.partition(".")
    if namespace not in _NAMESPACES or _NEVER.fullmatch(name) or not is_operator(target):
        return {}
    packet = getattr(getattr(torch.ops, namespace), name)
    return {overload: getattr(packet, overload)._schema for overload in packet.overloads()}


def _is_plain(schema: Any) -> bool:
    kinds = {(re.sub(r"Optional\[|List\[|\]", "", str(a.type)), a.name) for a in schema.arguments}
    return bool(schema.returns) and all(kind in _KINDS or (kind == "str" and a in _CHOICES) for kind, a in kinds)


def schema_of(target: str, operands: Sequence[object], attributes: Mapping[str, Any]) -> Schema | None:
    """The overload that takes these operands and attributes; None where there is none."""
    return fitting(tuple(schemas_of(target)), operands, attributes)


def note_schemas(graph: Graph) -> Graph:
    """The graph with the schema of each operator that it calls, for those that write the calls."""
    schemas = {
        text: None
        for op in graph.ops
        if not op.target.startswith("autoshard.")
        for schema in [schema_of(op.target, op.operands, dict(op.attributes))]
        if schema is not None
        for text in [str(schemas_of(op.target)[schema]._schema)]
    }
    return replace(graph, schemas=tuple(sorted(schemas)))
