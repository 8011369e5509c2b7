"""Writes at given places (`x[i] = y`, index_copy, scatter_reduce), one-hot codes, and bins."""

from __future__ import annotations

from autoshard.ir.graph import Op
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import (
    NoRule,
    OperatorCall,
    letters,
    replaced,
    term,
)
from autoshard.rules.algebra.operator_record import CodeWriter, Given, Names, Operator
from autoshard.rules.algebra.variant_record import Layouts, LocalTensors, Temporary, temporaries
from autoshard.rules.operators.indexing import scatter


def one_hot(call: OperatorCall) -> str:
    names = letters(call.rank)
    return f"{term(names)} -> {term([*names, str(call.results[0][-1])])}"


def bucketize(call: OperatorCall) -> str:
    if len(call.shapes) < 2:
        raise NoRule
    return "..., b -> ... | whole: b"


def index_put(call: OperatorCall) -> str:
    """Rule of x[i, j] = values: indexed dims are whole, others independent; a mask with one value is elementwise."""
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
    value_dims = [
        "1" if size == 1 else place for size, place in zip(values, places[len(places) - len(values) :], strict=True)
    ]
    left = replaced(names, {i: str(call.shape[i]) for i in at})
    sides = ["-" if shape is None else term([str(size) for size in shape]) for shape in indices]
    last = len(call.shapes) - 1
    return f"{left}, {', '.join(sides)}, {term(value_dims)} -> {left} | linear: 0+{last}"


def index_copy(call: OperatorCall) -> str:
    """Rule of rows put in place of others: the dim is whole."""
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


def spell_index_put(writer: CodeWriter, operands: Names, arguments: Given) -> str:
    accumulate = ", accumulate=True" if arguments.get("accumulate") else ""
    indices = ", ".join(str(operand) for operand in operands[1:-1])
    return f"torch.ops.aten.index_put({operands[0]}, [{indices}], {operands[-1]}{accumulate})"


_REDUCED: dict[object, tuple[float, float]] = {  # tensors that the gradient makes before its result, and the forward
    "amax": (8.25, 0), "amin": (8.25, 0), "mean": (4, 2.25), "prod": (12, 0),
}  # fmt: skip


def scatter_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes of masks of extremes, counts of a mean, products of the others."""
    backward, forward = _REDUCED.get(dict(op.attributes).get("reduce"), (0, 0))
    return temporaries({2: backward}, forward)(mesh, op, operands, layouts, results)


OPERATORS: dict[str, Operator] = {
    "aten.bucketize": Operator(rule=bucketize, in_torch=True),
    "aten.index_copy": Operator(
        rule=index_copy, spelling="{0}.index_copy({dim}, {1}, {2})", chooses="along", dims="dim"
    ),
    "aten.index_fill": Operator(rule=index_fill, in_torch=True, chooses="along", dims="dim"),
    "aten.index_put": Operator(rule=index_put, autocast="widest", spelling=spell_index_put, in_torch=True),
    "aten.index_reduce": Operator(in_torch=True, chooses="along", dims="dim"),
    "aten.one_hot": Operator(rule=one_hot, spelling="F.one_hot({0}, {num_classes})"),
    "aten.scatter_reduce": Operator(rule=scatter, in_torch=True, holds=scatter_holds, chooses="along", dims="dim"),
}
