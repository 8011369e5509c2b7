"""Tables in unequal parts: lengths that pins and the model's code ask for, noted in the graph before a search.

A search offers them then, for the rows of tables that embeddings look up in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from autoshard.constraints.pins import KINDS, parse_cuts, pin_file_texts, said_memory
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op
from autoshard.rules.operators import record

Lengths = tuple[int, ...]
_EXACT = re.compile(r"S(\d+)\[(\d+(?:\+\d+)*)\]")


def with_manual_splits(graph: Graph, texts: Sequence[str], file: Path | None = None) -> Graph:
    """The graph with the parts that pins `WHAT=HOW` and its own strategies name.

    UsageError where they are not of a table's rows, or do not make up all of them.
    """
    splits = dict.fromkeys(graph.manual_splits)
    model_texts = (f"op:{name}={how}" for name, how in graph.strategies)
    for text in (*model_texts, *(pin_file_texts(file) if file else ()), *texts):
        what, _, how = text.partition("=")
        for operand, dim, lengths in _requested_cuts(said_memory(how.strip())[0], text):
            for table in _tables(graph, what.strip(), operand, text):
                _check(graph, table, dim, lengths, text)
                splits[table, lengths] = None
    return graph if len(splits) == len(graph.manual_splits) else replace(graph, manual_splits=tuple(splits))


def _requested_cuts(how: str, text: str) -> Iterator[tuple[int | None, int, Lengths]]:
    """(operand, None where it is the tensor named; dim; lengths) of every cut in parts."""
    if how.startswith(("(", "[")):
        yield from parse_cuts(how, text)[2]
        return
    for match in _EXACT.finditer(how):
        yield None, int(match[1]), tuple(map(int, match[2].split("+")))


def _tables(graph: Graph, what: str, operand: int | None, text: str) -> list[str]:
    """The tables that embeddings read, among what a pin names; UsageError where there is none."""
    kind, colon, target = what.partition(":")
    name = target if colon and kind in KINDS else what
    paths = {stored.tensor: (stored.path, *stored.ties) for stored in (*graph.parameters, *graph.buffers)}
    reads = [(op, table) for op in graph.ops for table in [_table(op)] if table is not None and operand in (None, 0)]
    names = {table: paths.get(table, (table,)) for _, table in reads}
    matching = dict.fromkeys(
        table for op, table in reads if any(fnmatchcase(label, name) for label in (*names[table], op.name, op.module))
    )
    if not matching:
        tables = dict.fromkeys(paths.get(t, (t,))[0] for t in map(_table, graph.ops) if t is not None)
        message = f"pin {text!r}: parts of given lengths are for a table that an embedding reads, which {name} is not"
        raise UsageError(message, " or ".join(tables) or "counts, which cut in equal parts")
    return list(matching)


def _table(op: Op) -> str | None:
    return op.operands[0] if record(op.target).chooses == "rows" else None


def _check(graph: Graph, table: str, dim: int, lengths: Lengths, text: str) -> None:
    shape = graph.tensor(table).shape
    spelt = ", ".join(map(str, lengths))
    if dim != 0:
        message = f"pin {text!r}: dim {dim} is cut in parts of {spelt}, but only rows (dim 0) can be"
        raise UsageError(message, f"(({spelt}), 1)")
    if sum(lengths) != shape[0]:
        last = shape[0] - sum(lengths[:-1])
        near = (*lengths[:-1], last) if last > 0 else (*(1,) * (len(lengths) - 1), shape[0] - len(lengths) + 1)
        message = f"pin {text!r}: parts of {spelt} make {sum(lengths)} rows, and the table has {shape[0]}"
        raise UsageError(message, f"parts that make {shape[0]}, such as ({', '.join(map(str, near))})")
