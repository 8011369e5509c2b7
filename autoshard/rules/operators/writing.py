"""Writes at given places (`x[i] = y`, index_copy, scatter_reduce), one-hot codes, and bins."""

from __future__ import annotations

from autoshard.rules.algebra.argument_rules import (
    Localise,
    LocaliseVariant,
    NoRule,
    OperatorCall,
    RuleFor,
    letters,
    replaced,
    term,
)
from autoshard.rules.operators.indexing import scatter


def one_hot(call: OperatorCall) -> str:
    names = letters(call.rank)
    return f"{term(names)} -> {term([*names, str(call.results[0][-1])])}"


def bucketize(call: OperatorCall) -> str:
    if len(call.shapes) < 2:
        raise NoRule
    return "..., b -> ... | whole: b"


def index_put(call: OperatorCall) -> str:
    """x[i, j] = values: indexed dims are whole, the others stand alone; a mask with one value is elementwise."""
    *indices, values = call.shapes[1:]
    assert values is not None
    names = letters(call.rank)
    at = [i for i, shape in enumerate(indices) if shape is not None]
    if any(dtype == "bool" for dtype in call.dtypes[1:-1]):
        if at != [0] or len(indices) != 1 or values != ():
            raise NoRule
        return f"{term(names)}, {term(names[: len(indices[0] or ())])}, () -> {term(names)}"
    shapes = [indices[i] or () for i in at]
    rank = max(map(len, shapes))
    broadcast = [str(max(s[len(s) - 1 - k] for s in shapes if len(s) > k)) for k in reversed(range(rank))]
    together = at == list(range(at[0], at[-1] + 1))
    before = [n for i, n in enumerate(names) if i not in at and together and i < at[0]]
    after = [n for i, n in enumerate(names) if i not in at and n not in before]
    places = [*before, *broadcast, *after]
    given = [
        "1" if size == 1 else place for size, place in zip(values, places[len(places) - len(values) :], strict=True)
    ]
    left = replaced(names, {i: str(call.shape[i]) for i in at})
    sides = ["-" if shape is None else term([str(size) for size in shape]) for shape in indices]
    last = len(call.shapes) - 1
    return f"{left}, {', '.join(sides)}, {term(given)} -> {left} | linear: 0+{last}"


def index_copy(call: OperatorCall) -> str:
    """Rows put in place of others: the dim is whole."""
    names, dim = letters(call.rank), call.dim()
    count = 1 if call.shapes[1] == () else (call.shapes[1] or (0,))[0]
    whole = replaced(names, {dim: str(call.shape[dim])})
    index = "()" if call.shapes[1] == () else str(count)
    return f"{whole}, {index}, {replaced(names, {dim: str(count)})} -> {whole} | linear: 0+2"


def index_fill(call: OperatorCall) -> str:
    names, dim = letters(call.rank), call.dim()
    whole = replaced(names, {dim: str(call.shape[dim])})
    index = "()" if call.shapes[1] == () else str((call.shapes[1] or (0,))[0])
    value = ", ()" if len(call.shapes) > 2 else ""
    return f"{whole}, {index}{value} -> {whole}"


RULES: dict[str, str | RuleFor] = {
    "aten.bucketize": bucketize,
    "aten.index_copy": index_copy,
    "aten.index_fill": index_fill,
    "aten.index_put": index_put,
    "aten.one_hot": one_hot,
    "aten.scatter_reduce": scatter,
}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {}
