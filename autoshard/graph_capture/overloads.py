"""Which overload of a torch operator an op of a graph means."""

from __future__ import annotations

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


def is_operator(target: str) -> bool:
    """Does this torch have it?"""
    namespace, _, name = target.partition(".")
    return isinstance(getattr(getattr(torch.ops, namespace), name, None), torch._ops.OpOverloadPacket)


def schema_of(target: str, operands: Sequence[object], attributes: Mapping[str, Any]) -> Schema | None:
    """The overload that takes these operands and attributes; None where there is none."""
    return fitting(tuple(schemas_of(target)), operands, attributes)


def note_schemas(graph: Graph) -> Graph:
    """The graph with the schema of each operator that it calls, for those that write the calls."""
    found = {
        text: None
        for op in graph.ops
        if not op.target.startswith("autoshard.")
        for schema in [schema_of(op.target, op.operands, dict(op.attributes))]
        if schema is not None
        for text in [str(schemas_of(op.target)[schema]._schema)]
    }
    return replace(graph, schemas=tuple(sorted(found)))
