"""Limits on the length of sequences: tables that are sliced, and tables that positions look up in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op
from autoshard.rules.op_labels import line_of
from autoshard.rules.resize.captured_length import sequence_length
from autoshard.rules.value_range import Lengthened

Slopes = Mapping[str, Fraction]
TABLES = ("aten.embedding", "aten.embedding_bag", "autoshard.embedding_bags")
# of rows (operand 1) in a table (operand 0); where the table is cut, rows that it lacks are zeros, no error
ELEMENTS = ("aten.gather", "aten.index_select", "aten.index")


def longest(graph: Graph, slopes: Slopes, shortest: int, most: int) -> int:
    """Largest length up to `most` that tables allow: no slice or looked-up row lies beyond its table's end.

    UsageError if nothing shows, at `shortest` and at the graph's own length, that a table has all rows.
    """
    base = sequence_length(graph)
    for op in graph.ops:
        if op.target in TABLES and not all(_has_all(graph, slopes, op, length - base) for length in (shortest, base)):
            what = f"nothing tells which rows {op.name} ({op.target} at {line_of(graph, op)}) looks up"
            raise UsageError(f"{what} in sequences of another length: its table may lack some", "positions by arange")
    most = min([most, *(base + room // slope for room, slope in _slices(graph, slopes))])
    lookups = [op for op in graph.ops if op.target in (*TABLES, *ELEMENTS) and _has_all(graph, slopes, op, 0)]
    return _last(lambda length: all(_has_all(graph, slopes, op, length - base) for op in lookups), base, most)


def _last(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Last number from `least` on that fits, if all below do."""
    if most < least or fits(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _slices(graph: Graph, slopes: Slopes) -> Iterator[tuple[Fraction, Fraction]]:
    """Rows left behind the end of each slice of a table, and how fast the end grows."""
    for op in graph.ops:
        attributes = dict(op.attributes)
        dim, end = attributes.get("dim"), attributes.get("end")
        if op.target != "aten.slice" or op.operands[0] is None or not isinstance(dim, int) or not isinstance(end, int):
            continue
        shape = graph.tensor(op.operands[0]).shape
        dim %= len(shape)
        slope = slopes.get(f"{op.name} end", Fraction(0)) - slopes.get(f"{op.operands[0]} {dim}", Fraction(0))
        if slope > 0:
            yield Fraction(shape[dim] - end), slope


def _has_all(graph: Graph, slopes: Slopes, op: Op, more: int) -> bool:
    """True if all rows are there that `op` looks up in sequences that are `more` longer. False if nothing tells."""
    origin, at = Lengthened(graph, slopes), Lengthened(graph, slopes, more)
    return all(_within(at, origin, op, dim, rows) for dim, rows in _looked_up(op))


def _looked_up(op: Op) -> list[tuple[int, str | None]]:
    """(dim of operand 0, operand that picks along it) of a look-up."""
    if op.target == "aten.index":
        return [(dim, rows) for dim, rows in enumerate(op.operands[1:]) if rows is not None]
    dim = 0 if op.target in TABLES else dict(op.attributes)["dim"]
    assert isinstance(dim, int)
    return [(dim, op.operands[1])]


def _within(at: Lengthened, origin: Lengthened, op: Op, dim: int, rows: str | None) -> bool:
    """True if all rows lie in the table. Rows below 0 are as many as there were: `mask.cumsum(1) - 1`."""
    grown, planned, table = at.range(rows), origin.range(rows), op.operands[0]
    if grown is None or planned is None or table is None:
        return False
    return grown.empty or (grown.low >= min(0, planned.low) and grown.high < at.size(table, dim))
