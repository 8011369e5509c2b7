"""Look-ups: embeddings, gather, advanced indexing."""

from __future__ import annotations

from autoshard.ir.graph import DTYPE_BYTES, Op, Tensor
from autoshard.ir.local_op import LocalOp
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    NoRule,
    OperatorCall,
    letters,
    replaced,
    term,
)
from autoshard.rules.algebra.operator_record import CodeWriter, Given, Names, Operator, TensorParallel, each
from autoshard.rules.algebra.saved_for_backward import NOTHING, Kept, Operands, keeps, needs_grad
from autoshard.rules.algebra.variant_record import OperatorVariant


def embedding(call: OperatorCall) -> str:
    """Rule of a look-up. A sharded vocabulary is a variant: rows that a device lacks are zero, the result partial."""
    rows = "..."
    if call.get("scale_grad_by_freq"):
        return f"vocabulary d, {rows} -> {rows} d | whole: vocabulary ..."
    if call.integer("padding_idx", -1) >= 0 or call.get("sparse"):
        return f"vocabulary d, {rows} -> {rows} d | whole: vocabulary"
    variant = "variant: vocabulary_parallel_embedding vocabulary"
    return f"vocabulary d, {rows} -> {rows} d | sum: vocabulary | empty: vocabulary | plain: vocabulary | {variant}"


def embedding_bag(call: OperatorCall) -> str:
    """Rule of bags. Ids in a matrix go with their bags; in a list they are whole, and a device takes those of its bags.
    If rows are sharded, a bag is the sum over the devices of the rows that each has."""
    matrix = len(call.shapes[1] or ()) == 2
    ids, offsets = ("b l", "-") if matrix else ("n", "o")
    weights = "-" if call.shapes[3] is None else ids
    summed = call.get("mode") != "max"
    whole = ["l" if matrix else "n", *(["o"] * (not matrix)), *(["vocabulary"] * (not summed))]
    cut = ["vocabulary"] * summed + ["b"] * (not matrix)
    options = [f"whole: {' '.join(whole)}", *(["sum: vocabulary", "empty: vocabulary"] if summed else [])]
    options += [f"plain: {' '.join(cut)}", f"variant: parallel_embedding_bag {' '.join(cut)}"] if cut else []
    return " | ".join([f"vocabulary d, {ids}, {offsets}, {weights} -> b d", *options])


def gather(call: OperatorCall) -> str:
    """Rule of a gather: other dims than the gathered one follow the index if both are as long."""
    index = call.shapes[1]
    assert index is not None
    names = letters(call.rank)
    dim = call.dim()
    left = [str(size) if i == dim or size != index[i] else names[i] for i, size in enumerate(call.shape)]
    right = [names[i] if i == dim or size == index[i] else str(index[i]) for i, size in enumerate(call.shape)]
    return f"{term(left)}, {term(right)} -> {term(right)} | linear: 0"


def index_select(call: OperatorCall) -> str:
    names = letters(call.rank)
    dim = call.dim()
    return f"{replaced(names, {dim: str(call.shape[dim])})}, {names[dim]} -> {term(names)} | linear: 0"


def index(call: OperatorCall) -> str:
    """Rule of x[i, j]: indexed dims are whole; the indices' dims (broadcast) take their place, or lead if apart."""
    indices = call.shapes[1:]
    if any(dtype == "bool" for dtype in call.dtypes[1:]):
        raise NoRule
    names = [f"x{i}" for i in range(call.rank)]
    at = [i for i, shape in enumerate(indices) if shape is not None]
    rank = max(len(indices[i] or ()) for i in at)
    broadcast = [f"i{i}" for i in range(rank)]
    sides = ["-" if s is None else _right(s, broadcast) for s in indices]
    together = at == list(range(at[0], at[-1] + 1))
    before = [n for i, n in enumerate(names) if i not in at and together and i < at[0]]
    after = [n for i, n in enumerate(names) if i not in at and n not in before]
    left = replaced(names, {i: str(call.shape[i]) for i in at})
    result = _sized([*before, *broadcast, *after], call.results[0])
    return f"{left}, {', '.join(sides)} -> {result} | linear: 0"


def scatter(call: OperatorCall) -> str:
    """Rule of a scatter: other dims than the scattered one are common if index and source are as long as the whole."""
    shapes = [shape for shape in call.shapes if shape is not None]
    if any(len(shape) != call.rank for shape in shapes):
        raise NoRule
    names, dim = letters(call.rank), call.dim()
    common = [i != dim and all(shape[i] == call.shape[i] for shape in shapes) for i in range(call.rank)]
    sides = [term([names[i] if common[i] else str(size) for i, size in enumerate(shape)]) for shape in shapes]
    moves = len(shapes) == 3 and call.get("reduce") is None
    return f"{', '.join(sides)} -> {sides[0]}" + (" | linear: 0+2" if moves else "")


def index_add(call: OperatorCall) -> str:
    """Rule of index_add: rows are added one by one, so the rows themselves can be sharded."""
    names, dim = letters(call.rank), call.dim()
    whole = replaced(names, {dim: str(call.shape[dim])})
    return f"+{whole}, {names[dim]}, {term(names)} -> {whole} | sum: {names[dim]}"


def slice_scatter(call: OperatorCall) -> str:
    """Rule of a write in part of a dim, which is literal; select_scatter's source lacks it."""
    names, dim = letters(call.rank), call.dim()
    source = call.shapes[1]
    assert source is not None
    whole = replaced(names, {dim: str(call.shape[dim])})
    part = replaced(names, {dim: str(source[dim]) if len(source) == call.rank else ""})
    return f"{whole}, {part} -> {whole} | linear: 0+1"


def _right(shape: tuple[int, ...], names: list[str]) -> str:
    return term(
        ["1" if size == 1 else name for size, name in zip(shape, names[len(names) - len(shape) :], strict=True)]
    )


def _sized(names: list[str], shape: tuple[int, ...]) -> str:
    return term(["1" if size == 1 else name for size, name in zip(shape, names, strict=True)])


def localise_embedding(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {"size": local.instance.size["vocabulary"], **row_parts(local)}, (("vocabulary", local.axes("vocabulary")),)


def row_parts(local: Local) -> dict[str, LocalAttribute]:
    """Lengths in which the rows are split, if they are stated."""
    said = [choice.unit for choice in local.strategy.choices if choice.factor == "vocabulary"]
    return {"parts": said[0]} if said and isinstance(said[0], tuple) else {}


def localise_embedding_bag(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    facts = local.instance.operands[0]
    assert facts is not None
    options = {key: value for key, value in local.op.attributes if value is not None}
    matrix = local.op.operands[2] is None
    roles = (("vocabulary", local.axes("vocabulary")), ("bags", () if matrix else local.axes("b")))
    return {"size": facts.shape[0], **row_parts(local), **options}, tuple((role, axes) for role, axes in roles if axes)


def index_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Indices only."""
    return tuple(range(1, len(operands))), (), 0


def bags_save(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Ids, offsets and their weights, the table only for the gradient of these; the bag of each id and its length."""
    ids, bags, eight = operands[1], results[0].shape[0], DTYPE_BYTES["int64"]
    assert ids is not None
    extra = results[0].numel if op.attribute("mode") == "max" else ids.numel
    return (1, 2, 3, *([0] if needs_grad(operands, 3) else [])), (), (extra + 2 * bags) * eight


def embedding_traffic(op: LocalOp) -> tuple[float, float]:
    """Traffic: forward touches the gathered rows only; backward zeroes a gradient table and adds rows to it."""
    table, rows = op.operand(0).bytes, op.results[0].bytes
    return 2 * rows + op.operand(1).bytes, table + 3 * rows


def parallel_embedding_traffic(op: LocalOp) -> tuple[float, float]:
    """Traffic of the embedding, with rows of other devices masked out."""
    forward, backward = embedding_traffic(op)
    return forward + 2 * op.results[0].bytes, backward + 2 * op.results[0].bytes


def bags_traffic(op: LocalOp) -> tuple[float, float]:
    """Traffic: forward reads the row of each id; backward zeroes a gradient table and adds a row to it for each id."""
    table, ids, bags = op.operand(0), op.operand(1), op.results[0]
    rows = float(table.bytes / max(table.shape[0], 1) * ids.numel)
    return rows + bags.bytes + ids.bytes, table.bytes + 2 * rows + bags.bytes


def parallel_bags_traffic(op: LocalOp) -> tuple[float, float]:
    """Traffic of the bags, with a weight for each id that marks if its row is here, made in four passes."""
    forward, backward = bags_traffic(op)
    return forward + 4 * op.operand(1).bytes, backward


def spell_index(writer: CodeWriter, operands: Names, arguments: Given) -> str:
    return f"{operands[0]}[{', '.join(operand or ':' for operand in operands[1:])}]"


OPERATORS: dict[str, Operator] = {
    "aten.embedding": Operator(
        rule=embedding,
        saves=keeps(1),
        bandwidth="gather",
        traffic=embedding_traffic,
        spelling="F.embedding({1}, {0}<padding_idx=-1><scale_grad_by_freq=False><sparse=False>)",
        result_name="x",
        tensor_parallel=TensorParallel(("vocabulary",), ("d",), False),
        split_words={(0, 0): "vocabulary-parallel", (0, 1): "hidden dim split"},
        chooses="rows",
        on_host=True,
    ),
    "aten.embedding_bag": Operator(in_torch=True, chooses="rows"),
    "autoshard.embedding_bags": Operator(
        rule=embedding_bag,
        saves=bags_save,
        bandwidth="gather",
        traffic=bags_traffic,
        spelling="F.embedding_bag({1}, {0}<2><mode='mean'><per_sample_weights:3><padding_idx>)",
        split_words={(0, 0): "rows of the table split", (0, 1): "columns of the table split"},
        chooses="rows",
        on_host=True,
    ),
    "aten.gather": Operator(
        rule=gather,
        bandwidth="gather",
        spelling="{0}.gather({dim}, {1})",
        chooses="along",
        dims="dim",
        on_host=True,
    ),
    "aten.index": Operator(rule=index, saves=index_saves, bandwidth="gather", spelling=spell_index, on_host=True),
    "aten.index_add": Operator(
        rule=index_add, spelling="{0}.index_add({dim}, {1}, {2}<alpha=1>)", chooses="along", dims="dim"
    ),
    "aten.index_select": Operator(
        rule=index_select,
        saves=keeps(1),
        bandwidth="gather",
        spelling="{0}.index_select({dim}, {1})",
        chooses="along",
        dims="dim",
        on_host=True,
    ),
    "aten.scatter": Operator(rule=scatter, spelling="{0}.scatter({dim}, {1}, {value|2})", chooses="along", dims="dim"),
    "aten.scatter_add": Operator(
        rule=scatter, autocast="widest", spelling="{0}.scatter_add({dim}, {1}, {2})", chooses="along", dims="dim"
    ),
    **each("searchsorted take", Operator(in_torch=True)),
    "aten.take_along_dim": Operator(in_torch=True, spelling="torch.take_along_dim({0}.contiguous(), {1}<dim>)"),
    "aten.select_scatter": Operator(
        rule=slice_scatter,
        saves=NOTHING,
        first_decides_dtype=True,
        spelling="torch.select_scatter({0}, {1}, {dim}, {index})",
        dims="dim",
    ),
    "aten.slice_scatter": Operator(
        rule=slice_scatter, saves=NOTHING, first_decides_dtype=True, in_torch=True, dims="dim"
    ),
}
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_embedding_bag": OperatorVariant(
        localise=localise_embedding_bag, bandwidth="gather", traffic=parallel_bags_traffic
    ),
    "vocabulary_parallel_embedding": OperatorVariant(
        localise=localise_embedding, bandwidth="gather", traffic=parallel_embedding_traffic
    ),
}
