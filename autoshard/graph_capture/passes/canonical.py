"""One spelling for operators that mean the same: `view` is `aten.reshape`, sizes and dims are explicit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from string import ascii_letters
from typing import cast

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Attribute, Graph, Op, Tensor
from autoshard.rules.operators import record

Tensors = Mapping[str, Tensor]
Rule = Callable[[Op, Tensors], Op]


def canonical(graph: Graph) -> Graph:
    """Every op in its one spelling; the values are the same."""
    return rewrite(graph, (_canonical(part, graph.by_name) for op in graph.ops for part in _parts(op)))


def _parts(op: Op) -> Iterator[Op]:
    """`broadcast_tensors` is an expand of each operand; every other op is one."""
    if op.target != "aten.broadcast_tensors":
        yield op
        return
    for operand, result in zip(op.operands, op.results, strict=True):
        yield replace(op, name=result, target="aten.expand", operands=(operand,), results=(result,))


def _canonical(op: Op, tensors: Tensors) -> Op:
    op = replace(op, target=RENAMED.get(op.target, op.target))
    rule = _RULES.get(op.target)
    return _positive_dims(rule(op, tensors) if rule else op, tensors)


def _reshape(op: Op, tensors: Tensors) -> Op:
    return replace(
        op, target="aten.reshape", operands=op.operands[:1], attributes=(("shape", _result(op, tensors).shape),)
    )


def _view(op: Op, tensors: Tensors) -> Op:
    same_bits = _operand(op, tensors).dtype == _result(op, tensors).dtype
    return _reshape(op, tensors) if same_bits else op


def _to(op: Op, tensors: Tensors) -> Op:
    return replace(op, target="aten.to", operands=op.operands[:1], attributes=(("dtype", _result(op, tensors).dtype),))


def _swap(op: Op, tensors: Tensors) -> Op:
    """Rewrite `swapaxes` and `swapdims`, whose arguments have other names."""
    first, second = (value for _, value in op.attributes)
    return _exchange(replace(op, target="aten.transpose", attributes=(("dim0", first), ("dim1", second))), tensors)


def _exchange(op: Op, tensors: Tensors) -> Op:
    """Rewrite `transpose`, which leaves a tensor with fewer than two dims unchanged."""
    return op if len(_operand(op, tensors).shape) > 1 else replace(op, target="aten.alias", attributes=())


def _transpose(op: Op, tensors: Tensors) -> Op:
    if len(_operand(op, tensors).shape) != 2:
        return op if len(_operand(op, tensors).shape) > 2 else replace(op, target="aten.alias", attributes=())
    return replace(op, target="aten.transpose", attributes=(("dim0", 0), ("dim1", 1)))


def _reversed(op: Op, tensors: Tensors) -> Op:
    """`x.T`: all dims, the last first."""
    rank = len(_operand(op, tensors).shape)
    return _transpose(op, tensors) if rank <= 2 else _permuted(op, tuple(reversed(range(rank))))


def _movedim(op: Op, tensors: Tensors) -> Op:
    """Permute: the dims that move stand at their new places, the others in between in their order."""
    rank = len(_operand(op, tensors).shape)
    moved, places = (_dims(op.attribute(name), rank) for name in ("source", "destination"))
    others = (dim for dim in range(rank) if dim not in moved)
    at = dict(zip(places, moved, strict=True))
    return _permuted(op, tuple(at[dim] if dim in at else next(others) for dim in range(rank)))


def _permuted(op: Op, dims: tuple[int, ...]) -> Op:
    return replace(op, target="aten.permute", attributes=(("dims", dims),))


def _dims(value: Attribute, rank: int) -> tuple[int, ...]:
    listed = cast("tuple[int, ...]", value if isinstance(value, tuple) else (value,))
    return tuple(dim % rank for dim in listed)


def _flipped(dim: int) -> Rule:
    return lambda op, tensors: replace(op, target="aten.flip", attributes=(("dims", (dim,)),))


def _tile(op: Op, tensors: Tensors) -> Op:
    """Give `tile` a number per dim: fewer numbers than dims are those of the last dims."""
    dims = cast("tuple[int, ...]", op.attribute("dims"))
    missing = len(_operand(op, tensors).shape) - len(dims)
    return replace(op, target="aten.repeat", attributes=(("repeats", (1,) * missing + dims),))


def _stacked(rank: int, dim: int) -> Rule:
    """hstack and its like, of tensors with at least `rank` dims: joined along `dim`."""

    def rule(op: Op, tensors: Tensors) -> Op:
        ranks = [len(tensors[cast(str, operand)].shape) for operand in op.operands]
        return replace(op, target="aten.cat", attributes=(("dim", dim),)) if min(ranks) >= rank else op

    return rule


def _hstack(op: Op, tensors: Tensors) -> Op:
    flat = all(len(tensors[cast(str, operand)].shape) == 1 for operand in op.operands)
    return _stacked(1, 0 if flat else 1)(op, tensors)


def _expand(op: Op, tensors: Tensors) -> Op:
    return replace(
        op, target="aten.expand", operands=op.operands[:1], attributes=(("size", _result(op, tensors).shape),)
    )


def _split(op: Op, tensors: Tensors) -> Op:
    dim = cast(int, op.attribute("dim"))
    sizes = tuple(tensors[result].shape[dim] for result in op.results)
    return replace(op, target="aten.split", attributes=(("split_size", sizes), ("dim", dim)))


def _squeeze(op: Op, tensors: Tensors) -> Op:
    """Name the dims that `squeeze` removes: a shard may have dims of one element where the whole has not."""
    shape, said = _operand(op, tensors).shape, dict(op.attributes).get("dim")
    listed = said if isinstance(said, tuple) else range(len(shape)) if said is None else (said,)
    dims = [dim % len(shape) for dim in cast("tuple[int, ...]", listed)] if shape else []
    removed = tuple(sorted(dim for dim in dims if shape[dim] == 1))
    if not removed:
        return replace(op, target="aten.alias", attributes=())
    return replace(op, attributes=(("dim", removed[0] if len(removed) == 1 else removed),))


def _slice(op: Op, tensors: Tensors) -> Op:
    start, stop, step = (cast("int | None", op.attribute(name)) for name in ("start", "end", "step"))
    size = _operand(op, tensors).shape[cast(int, op.attribute("dim"))]
    start, stop, step = slice(start, stop, step).indices(size)
    return _with(op, start=start, end=max(start, stop))


def _of_two(op: Op, tensors: Tensors) -> Op:
    """Rewrite `max` and `min` of two tensors as `maximum` and `minimum`; of one they are reductions."""
    return replace(op, target=f"{op.target}imum") if len(op.operands) == 2 else op


def _repeat_interleave(op: Op, tensors: Tensors) -> Op:
    """Drop the length of the result as an argument, if the repeats are a number."""
    return _with(op, output_size=None) if isinstance(dict(op.attributes).get("repeats"), int) else op


def _attention(op: Op, tensors: Tensors) -> Op:
    """Drop a scale that equals the default: models compute it and pass it on."""
    size = _operand(op, tensors).shape[-1]
    return _with(op, scale=None) if size and dict(op.attributes).get("scale") in (size**-0.5, 1 / size**0.5) else op


def _einsum(op: Op, tensors: Tensors) -> Op:
    """Write `...` and a missing result of an einsum in letters; unchanged where sizes broadcast."""
    shapes = [tensors[cast(str, operand)].shape for operand in op.operands]
    return _with(op, equation=in_letters(str(op.attribute("equation")), shapes))


def in_letters(equation: str, shapes: Sequence[tuple[int, ...]]) -> str:
    """An equation of `torch.einsum` for operands of these shapes, with every dim under a letter."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [len(shape) - len(term) + 3 if "..." in term else 0 for term, shape in zip(terms, shapes, strict=True)]
    free = "".join(letter for letter in ascii_letters if letter not in equation)[: max(hidden)]
    terms = [term.replace("...", free[len(free) - count :]) for term, count in zip(terms, hidden, strict=True)]
    if not arrow:
        counts = Counter(left.replace("...", "").replace(",", ""))
        right = "..." + "".join(sorted(letter for letter, count in counts.items() if count == 1))
    sizes = {pair for term, shape in zip(terms, shapes, strict=True) for pair in zip(term, shape, strict=True)}
    alike = len(free) == max(hidden) and len(sizes) == len({letter for letter, _ in sizes})
    return f"{','.join(terms)}->{right.replace('...', free)}" if alike else equation


def _arange(op: Op, tensors: Tensors) -> Op:
    arguments = dict(op.attributes)
    start, end, step = arguments.get("start", 0), arguments["end"], arguments.get("step", 1)
    return replace(
        op, attributes=(("start", start), ("end", end), ("step", step), ("dtype", _result(op, tensors).dtype))
    )


def _explicit_dtype(op: Op, tensors: Tensors) -> Op:
    return _with(op, dtype=_result(op, tensors).dtype)


def _pairs(op: Op, tensors: Tensors) -> Op:
    """Window sizes as one number per spatial dim; a stride not given is the kernel's size."""
    rank = int(op.target[-2])
    sizes = {n: v for n, v in op.attributes if n in _WINDOWS and isinstance(v, tuple | int)}
    full = {name: _repeated(value, rank) for name, value in sizes.items()}
    if full.get("stride") == ():
        full["stride"] = full["kernel_size"]
    return _with(op, **full)


def _repeated(value: Attribute, rank: int) -> tuple[Attribute, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return values * rank if len(values) == 1 else values


def _random(kind: str, first: float, second: float, names: tuple[str, str]) -> Rule:
    """A random tensor, of whose shape nothing else depends. `names` are the arguments in place of first and second."""

    def rule(op: Op, tensors: Tensors) -> Op:
        arguments, result = dict(op.attributes), _result(op, tensors)
        if any(name is not None and n for n, name in enumerate(op.operands)):
            return op
        values = [arguments.get(name, default) for name, default in zip(names, (first, second), strict=True)]
        attributes = (
            ("size", result.shape),
            ("kind", kind),
            ("first", values[0]),
            ("second", values[1]),
            ("dtype", result.dtype),
        )
        return replace(op, target="autoshard.random", operands=(), attributes=attributes)

    return rule


def _bernoulli(op: Op, tensors: Tensors) -> Op:
    """Drop the operand of a Bernoulli draw with one probability for all."""
    return _random("bernoulli", 0.5, 0.0, ("p", ""))(op, tensors) if "p" in dict(op.attributes) else op


def _dropout(op: Op, tensors: Tensors) -> Op:
    """Make dropout that draws no number an alias: in evaluation, with p = 0, or of no elements."""
    active = op.attribute("train") and op.attribute("p") != 0 and 0 not in _operand(op, tensors).shape
    return op if active else replace(op, target="aten.alias", attributes=())


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


_NAMES = """
    __and__ bitwise_and, __or__ bitwise_or, __xor__ bitwise_xor, clone alias, contiguous alias, lift_fresh alias,
    lift_fresh_copy alias, expand_copy expand, concat cat, concatenate cat, row_stack vstack, moveaxis movedim,
    true_divide div, divide div, multiply mul, subtract sub, negative neg, absolute abs, clip clamp, fix trunc,
    ger outer, linalg_matmul matmul, arccos acos, arcsin asin, arctan atan, arctan2 atan2,
    greater gt, greater_equal ge, less lt, less_equal le, not_equal ne,
    special_expit sigmoid, special_exp2 exp2, special_expm1 expm1, special_log1p log1p, special_logit logit,
    special_erf erf, special_erfc erfc, special_erfinv erfinv, special_gammaln lgamma, special_xlogy xlogy,
    special_softmax softmax, special_log_softmax log_softmax, special_logsumexp logsumexp
"""
RENAMED = {f"aten.{old}": f"aten.{name}" for old, name in (pair.split() for pair in _NAMES.split(","))}
_WINDOWS = ("kernel_size", "stride", "padding", "dilation", "output_padding")
_WINDOWED = ("conv", "max_pool", "avg_pool", "conv_transpose")
_RULES: dict[str, Rule] = {
    **_each("reshape _unsafe_view flatten unflatten view_as reshape_as", _reshape),
    **_each("to type_as _to_copy", _to),
    "aten.t": _transpose,
    "aten.numpy_T": _reversed,
    "aten.movedim": _movedim,
    "aten.fliplr": _flipped(1),
    "aten.flipud": _flipped(0),
    "aten.tile": _tile,
    "aten.hstack": _hstack,
    "aten.vstack": _stacked(2, 0),
    "aten.column_stack": _stacked(2, 1),
    "aten.dstack": _stacked(3, 2),
    **_each("swapaxes swapdims", _swap),
    "aten.transpose": _exchange,
    "aten.einsum": _einsum,
    "aten.scaled_dot_product_attention": _attention,
    **_each("expand expand_as broadcast_to", _expand),
    **_each("split chunk split_with_sizes tensor_split", _split),
    **_each("dropout feature_dropout alpha_dropout", _dropout),
    **{f"aten.{name}{rank}d": _pairs for name in _WINDOWED for rank in (1, 2, 3)},
    **_each("rand rand_like", _random("uniform", 0.0, 1.0, ("", ""))),
    **_each("randn randn_like", _random("normal", 0.0, 1.0, ("", ""))),
    **_each("randint randint_like", _random("integers", 0, 1, ("low", "high"))),
    **_each("normal normal_functional", _random("normal", 0.0, 1.0, ("mean", "std"))),
    "aten.exponential": _random("exponential", 1.0, 0.0, ("lambd", "")),
    "aten.uniform": _random("uniform", 0.0, 1.0, ("from", "to")),
    "aten.bernoulli": _bernoulli,
    "aten.view": _view,
    "aten.squeeze": _squeeze,
    "aten.slice": _slice,
    "aten.repeat_interleave": _repeat_interleave,
    **_each("max min", _of_two),
    "aten.arange": _arange,
    "aten.full": _explicit_dtype,
}  # fmt: skip


def _positive_dims(op: Op, tensors: Tensors) -> Op:
    """Dims counted from 0, where it is known in which tensor they count."""
    known = record(op.target)
    if known.dims_of_result:
        names, counted = known.dims_of_result.split(), op.results[0]
    elif known.dims and op.operands and op.operands[0] is not None:
        names, counted = known.dims.split(), op.operands[0]
    else:
        return op
    rank = len(tensors[counted].shape)
    return _with(op, **{name: _positive(value, rank) for name, value in op.attributes if name in names})


def _positive(value: Attribute, rank: int) -> Attribute:
    if isinstance(value, tuple):
        return tuple(_positive(item, rank) for item in value)
    return value % rank if isinstance(value, int) and rank else value


def _with(op: Op, **changed: Attribute) -> Op:
    return replace(op, attributes=tuple((name, changed.get(name, value)) for name, value in op.attributes))


def _operand(op: Op, tensors: Tensors) -> Tensor:
    return tensors[cast(str, op.operands[0])]


def _result(op: Op, tensors: Tensors) -> Tensor:
    return tensors[op.results[0]]
