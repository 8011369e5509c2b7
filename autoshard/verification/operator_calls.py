"""Runs one operator exactly as packages call it: the statement that would be emitted, executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.emit.expressions import ExpressionWriter
from autoshard.emit.runtime.float8 import float8_linear
from autoshard.emit.runtime.rotary import rotate_half
from autoshard.errors import CaptureError
from autoshard.graph_capture.overloads import schema_of, schemas_of
from autoshard.ir.graph import Graph, Op


def statement_of(
    target: str, operands: Sequence[object], attributes: Mapping[str, Any], results: int, device: str = "cpu"
) -> str:
    """`y0, y1 = torch.ops…(x0, x1, …)`: operands are x0, x1, … (None where absent), results y0, y1, …"""
    schema = schema_of(target, operands, attributes)
    known = (str(schemas_of(target)[schema]._schema),) if schema else ()
    speller = ExpressionWriter(lambda size: str(size.size), f'"{device}"', known)
    names = tuple(None if operand is None else f"x{i}" for i, operand in enumerate(operands))
    left = speller.assigned(target, names, attributes, [f"y{i}" for i in range(results)])
    return f"{left} = {speller.spell(target, names, attributes)}"


def run_emitted(
    target: str, operands: Sequence[Any], attributes: Mapping[str, Any], results: int, device: str = "cpu"
) -> list[Any]:
    """Results of the emitted call; raises what the call raises, SyntaxError if it is not Python."""
    known = {"rotate_half": rotate_half, "float8_linear": float8_linear}
    namespace: dict[str, Any] = {"torch": torch, "F": F, **known}
    namespace |= {f"x{i}": value for i, value in enumerate(operands)}
    exec(_compiled(statement_of(target, operands, attributes, results, device)), namespace)
    return [namespace[f"y{i}"] for i in range(results)]


@cache
def _compiled(statement: str) -> CodeType:
    return compile(statement, f"<{statement}>", "exec")


def check_calls(graph: Graph) -> None:
    """Runs every call of the graph as it would be emitted, on tensors without values, and compares it with the capture.

    CaptureError names the operator and its place. Operators that torch can't run without values are left out.
    """
    seen: set[object] = set()
    for op in graph.ops:
        tensors = [None if name is None else graph.tensor(name) for name in op.operands]
        facts = tuple(None if t is None else (t.shape, t.dtype) for t in tensors)
        key = (op.target, facts, op.attributes)
        if key in seen or op.target.startswith("autoshard."):
            continue
        seen.add(key)
        wanted = [(graph.tensor(name).shape, graph.tensor(name).dtype) for name in op.results]
        operands = [None if f is None else torch.empty(f[0], dtype=getattr(torch, f[1]), device="meta") for f in facts]
        problem = _problem(op, operands, wanted)
        if problem:
            place = f" at {op.source}" if op.source else ""
            statement = statement_of(op.target, operands, dict(op.attributes), len(wanted))
            raise CaptureError(f"{op.name} ({op.target}){place} can't be emitted: {statement} {problem}", _HINT)


_HINT = "other operators at that line; and report it: this is a fault of autoshard"
_NO_CALL = (TypeError, AttributeError, NameError, SyntaxError)


def _problem(op: Op, operands: Sequence[Any], wanted: Sequence[tuple[tuple[int, ...], str]]) -> str:
    try:
        results = run_emitted(op.target, operands, dict(op.attributes), len(wanted), "meta")
    except _NO_CALL as error:
        return f"does not run: {error}"
    except Exception:
        return ""  # what torch can't run without values
    actual = [(tuple(r.shape), str(r.dtype).removeprefix("torch.")) for r in results]
    return "" if actual == list(wanted) else f"gives {actual}, {list(wanted)} was captured"
