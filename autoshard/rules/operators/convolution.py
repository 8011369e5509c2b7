"""Convolutions and pooling. If windows reach beyond a shard of height or width, a variant exchanges halos; otherwise (a
patch embedding, pooling by its own stride) shards are independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autoshard.ir.graph import DTYPE_BYTES, Op, Tensor
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    NoRule,
    OperatorCall,
    integers,
    term,
)
from autoshard.rules.algebra.halo_exchange import halo_collectives, halo_holds, halo_keeps
from autoshard.rules.algebra.operator_record import Operator, Product, TensorParallel, each
from autoshard.rules.algebra.saved_for_backward import FIRST, Kept, Operands, keeps
from autoshard.rules.algebra.variant_record import OperatorVariant

ROLES = ("depth", "height", "width")


@dataclass(frozen=True)
class _Windows:
    """The spatial dims of an operator: terms of image and result, and the factors whose windows cross a cut."""

    image: list[str]
    result: list[str]
    crossed: list[str]
    resized: list[str]

    def options(self, variant: str) -> str:
        """Options of the rule that these windows need, each with its bar."""
        if not self.crossed:
            return ""
        resized = f" | resized: {' '.join(self.resized)}" if self.resized else ""
        factors = " ".join(self.crossed)
        return f" | plain: {factors}{resized} | variant: {variant} {factors}"


def _windows(sizes: Sequence[int], results: Sequence[int], apart: Sequence[int]) -> _Windows:
    """Windows of the spatial dims. `apart`: lengths of the image blocks, one per position; 0 if windows cross."""
    image, result, crossed, resized = [], [], [], []
    for i, (size, length, block) in enumerate(zip(sizes, results, apart, strict=True)):
        name = f"y{i}"
        if block:
            image.append(name if block == 1 else f"({name} {block})")
            result.append(name)
        elif 1 in (size, length):
            image.append(str(size))
            result.append(str(length))
        else:
            image.append(name)
            result.append(name)
            crossed.append(name)
            resized += [name] if size != length else []
    return _Windows(image, result, crossed, resized)


def numbers(call: OperatorCall, name: str, count: int, default: int) -> tuple[int, ...]:
    """Window argument for each spatial dim; `padding="same"` in numbers. Raises NoRule if it is lopsided."""
    value = call.get(name, default)
    if isinstance(value, str):
        return _same(call, count) if value == "same" else (0,) * count
    listed = ((value,) if isinstance(value, int) else integers(value)) or (default,)
    return listed * count if len(listed) == 1 else listed


def _same(call: OperatorCall, count: int) -> tuple[int, ...]:
    spans = [span - 1 for span in _spans(call, count)]
    if any(span % 2 for span in spans):
        raise NoRule
    return tuple(span // 2 for span in spans)


def _kernel(call: OperatorCall, count: int) -> tuple[int, ...]:
    weight = call.shapes[1] if len(call.shapes) > 1 else None
    return weight[2:] if weight is not None else numbers(call, "kernel_size", count, 1)


def _spans(call: OperatorCall, count: int) -> tuple[int, ...]:
    """Lengths of the windows, dilation counted."""
    dilation = numbers(call, "dilation", count, 1)
    return tuple(d * (k - 1) + 1 for k, d in zip(_kernel(call, count), dilation, strict=True))


def _stride(call: OperatorCall, count: int, pool: bool) -> tuple[int, ...]:
    return numbers(call, "stride", count, 1) if not pool or call.get("stride") else _kernel(call, count)


def _sliding(call: OperatorCall, count: int, pool: bool = False) -> _Windows:
    sizes, results = call.shape[-count:], call.results[0][-count:]
    stride, padding = _stride(call, count, pool), numbers(call, "padding", count, 0)
    spans = _spans(call, count)
    apart = [
        s if p == 0 and span <= s and size == s * length else 0
        for size, length, s, p, span in zip(sizes, results, stride, padding, spans, strict=True)
    ]
    return _windows(sizes, results, apart)


def convolution(call: OperatorCall) -> str:
    """Rule with (g c) input channels, (g o) output channels in g groups; the kernel's dims k are whole."""
    weight, spatial = _weight(call)
    try:
        windows = _sliding(call, spatial)
    except NoRule:
        windows = _uncut(call.shape[2:], call.results[0][2:])
    return _convolved(call, "o c", weight, windows, "halo_convolution")


def transposed(call: OperatorCall) -> str:
    """Rule of the mirror of a convolution: its weight holds (in, out / groups), so the output is summed over `c`."""
    weight, spatial = _weight(call)
    sizes, results = call.shape[2:], call.results[0][2:]
    stride, padding = numbers(call, "stride", spatial, 1), numbers(call, "padding", spatial, 0)
    spans = _spans(call, spatial)
    apart = [
        s if p == 0 and span <= s and length == s * size else 0
        for size, length, s, p, span in zip(sizes, results, stride, padding, spans, strict=True)
    ]
    windows = _windows(results, sizes, apart)  # the blocks are the result's
    mirrored = _Windows(windows.result, windows.image, windows.crossed, windows.resized)
    return _convolved(call, "c o", weight, mirrored, "halo_transposed_convolution")


def _weight(call: OperatorCall) -> tuple[tuple[int, ...], int]:
    weight = call.shapes[1]
    assert weight is not None
    if call.rank != len(weight):
        raise NoRule
    return weight, len(weight) - 2


def _convolved(call: OperatorCall, dims: str, weight: tuple[int, ...], windows: _Windows, variant: str) -> str:
    channels, out = ("c", "o") if call.integer("groups", 1) == 1 else ("(g c)", "(g o)")
    first, second = (out, "c") if dims == "o c" else (channels, "o")
    k = [f"k{i}" for i in range(len(weight) - 2)]
    bias = f"+{out}" if len(call.shapes) > 2 and call.shapes[2] is not None else f"+{out}?"
    operands = f"b {channels} {term(windows.image)}, {first} {second} {term(k)}, {bias}"
    return f"{operands} -> b {out} {term(windows.result)} | sum: c | whole: {term(k)}{windows.options(variant)}"


def _uncut(sizes: Sequence[int], results: Sequence[int]) -> _Windows:
    """Windows of an image that can't be sharded at all."""
    return _Windows([str(size) for size in sizes], [str(size) for size in results], [], [])


def spatial_dims(call: OperatorCall) -> int:
    return int(call.op.target.partition("pool")[2][0])


def pooling(call: OperatorCall) -> str:
    """Rule of pooling: batch and channels are independent; with positions of maxima in the image, it is whole."""
    spatial = spatial_dims(call)
    if len(call.results) > 1:
        windows = _uncut(call.shape[-spatial:], call.results[0][-spatial:])
    else:
        windows = _sliding(call, spatial, pool=True)
    return _pooled(call, windows, "halo_max_pool" if "max" in call.op.target else "halo_avg_pool")


def adaptive(call: OperatorCall) -> str:
    """Rule in which windows of equal length are independent; a mean over the image is a sum over its parts."""
    spatial = spatial_dims(call)
    sizes, results = call.shape[-spatial:], call.results[0][-spatial:]
    if len(call.results) > 1:
        return _pooled(call, _uncut(sizes, results), "")
    if prod(results) == 1:
        names = [f"y{i}" for i in range(spatial)]
        ones = " ".join("1" * spatial)
        factors = " ".join(names)
        return f"... {factors} -> ... {ones} | sum: {factors} | linear: 0 | variant: parallel_global_pool {factors}"
    apart = [
        size // length if size % length == 0 and length > 1 else 0 for size, length in zip(sizes, results, strict=True)
    ]
    pairs = zip(sizes, results, apart, range(spatial), strict=True)
    image = [(f"(y{i} {block})" if block > 1 else f"y{i}") if block else str(size) for size, _, block, i in pairs]
    result = [f"y{i}" if block else str(length) for i, (length, block) in enumerate(zip(results, apart, strict=True))]
    return _pooled(call, _Windows(image, result, [], []), "")


def _pooled(call: OperatorCall, windows: _Windows, variant: str) -> str:
    results = ", ".join(f"... {term(windows.result)}" for _ in call.results)
    return f"... {term(windows.image)} -> {results}{windows.options(variant)}"


# --- on a shard ---


def localise_groups(local: Local) -> dict[str, LocalAttribute]:
    """Local groups: with the groups sharded, each device convolves its own; the weight holds (g o) of them."""
    return {"groups": local.factor("g")} if local.axes("g") else {}


def localise_adaptive(local: Local) -> dict[str, LocalAttribute]:
    """Local size of the result."""
    spatial = spatial_dims(_call(local))
    return {"output_size": local.result()[-spatial:]}


def _image(local: Local) -> tuple[int, ...]:
    call = _call(local)
    return call.shape[-spatial_dims(call) :]


def _call(local: Local) -> OperatorCall:
    facts = [(None, None) if f is None else (f.shape, f.dtype) for f in local.instance.operands]
    results = tuple(facts.shape for facts in local.instance.results)
    return OperatorCall(local.op, tuple(shape for shape, _ in facts), tuple(dtype for _, dtype in facts), results)


def _cut(local: Local, count: int) -> Axes:
    """Axes on the dims whose windows cross, by role."""
    roles = zip(ROLES[3 - count :], range(count), strict=True)
    crossed = local.instance.rule.variant_factors
    cut = [(role, local.axes(f"y{i}") if f"y{i}" in crossed else ()) for role, i in roles]
    return tuple((role, axes) for role, axes in cut if axes)


def _window_values(call: OperatorCall, count: int, pool: bool) -> dict[str, LocalAttribute]:
    return {
        "sizes": call.shape[-count:],
        "stride": _stride(call, count, pool),
        "padding": numbers(call, "padding", count, 0),
    }


def localise_convolution(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    call = _call(local)
    count = call.rank - 2
    values = _window_values(call, count, pool=False) | {"dilation": numbers(call, "dilation", count, 1)}
    return values | _groups(local, call), _cut(local, count)


def localise_transposed(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    values, axes = localise_convolution(local)
    call = _call(local)
    return values | {"output_padding": numbers(call, "output_padding", call.rank - 2, 0)}, axes


def _groups(local: Local, call: OperatorCall) -> dict[str, LocalAttribute]:
    groups = call.integer("groups", 1)
    return {"groups": local.factor("g") if local.axes("g") else groups} if groups != 1 else {}


def localise_max_pool(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    call = _call(local)
    count = spatial_dims(call)
    values = _window_values(call, count, pool=True)
    values |= {"kernel_size": _kernel(call, count), "dilation": numbers(call, "dilation", count, 1)}
    return values | ({"ceil_mode": True} if call.get("ceil_mode") else {}), _cut(local, count)


def localise_avg_pool(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    call = _call(local)
    count = spatial_dims(call)
    values = _window_values(call, count, pool=True) | {"kernel_size": _kernel(call, count)}
    defaults = {"ceil_mode": False, "count_include_pad": True, "divisor_override": None}
    options = {name: call.get(name, default) for name, default in defaults.items()}
    return values | {name: value for name, value in options.items() if value != defaults[name]}, _cut(local, count)


def max_pool_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Input, and the position of each maximum."""
    return (0,), (), results[0].numel * DTYPE_BYTES["int64"]


CONVOLUTION = Product((0, 1), 2, (1, 1))
_CONV = "({0}, {1}<2><stride=1><padding=0><dilation=1><groups=1>)"
_CONV_TRANSPOSE = "({0}, {1}<2><stride=1><padding=0><output_padding=0><groups=1><dilation=1>)"
_POOL = "({0}, {kernel_size}<stride=()><padding=0>"


OPERATORS: dict[str, Operator] = {
    "aten.adaptive_avg_pool1d": Operator(
        rule=adaptive, localise=localise_adaptive, spelling="F.adaptive_avg_pool1d({0}, {output_size})"
    ),
    "aten.adaptive_avg_pool2d": Operator(
        rule=adaptive, localise=localise_adaptive, saves=FIRST, spelling="F.adaptive_avg_pool2d({0}, {output_size})"
    ),
    **each(
        "adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d",
        Operator(rule=adaptive, localise=localise_adaptive),
    ),
    "aten.adaptive_max_pool1d": Operator(rule=adaptive, localise=localise_adaptive, in_torch=True),
    "aten.avg_pool1d": Operator(rule=pooling, in_torch=True),
    "aten.avg_pool2d": Operator(
        rule=pooling,
        saves=FIRST,
        spelling="F.avg_pool2d" + _POOL + "<ceil_mode=False><count_include_pad=True><divisor_override>)",
    ),
    **each("avg_pool3d max_pool2d_with_indices max_pool3d_with_indices", Operator(rule=pooling)),
    "aten.conv1d": Operator(
        rule=convolution,
        localise=localise_groups,
        saves=keeps(0, 1),
        autocast="low",
        work=CONVOLUTION,
        spelling="F.conv1d" + _CONV,
    ),
    "aten.conv2d": Operator(
        rule=convolution,
        localise=localise_groups,
        saves=keeps(0, 1),
        autocast="low",
        work=CONVOLUTION,
        spelling="F.conv2d" + _CONV,
        tensor_parallel=TensorParallel(("o", "c"), (), False),
        split_words={
            (1, 0): "output channels split",
            (1, 1): "input channels split",
            (0, 2): "height split",
            (0, 3): "width split",
        },
    ),
    "aten.conv3d": Operator(
        rule=convolution,
        localise=localise_groups,
        saves=keeps(0, 1),
        autocast="low",
        work=CONVOLUTION,
        spelling="F.conv3d" + _CONV,
    ),
    "aten.conv_tbc": Operator(autocast="low"),
    "aten.conv_transpose1d": Operator(
        rule=transposed, localise=localise_groups, autocast="low", spelling="F.conv_transpose1d" + _CONV_TRANSPOSE
    ),
    "aten.conv_transpose2d": Operator(
        rule=transposed, localise=localise_groups, autocast="low", spelling="F.conv_transpose2d" + _CONV_TRANSPOSE
    ),
    "aten.conv_transpose3d": Operator(
        rule=transposed, localise=localise_groups, autocast="low", spelling="F.conv_transpose3d" + _CONV_TRANSPOSE
    ),
    "aten._convolution": Operator(autocast="low"),
    "aten.convolution": Operator(saves=keeps(0, 1), autocast="low", work=CONVOLUTION),
    "aten.max_pool1d": Operator(rule=pooling, saves=max_pool_saves, in_torch=True),
    "aten.max_pool2d": Operator(
        rule=pooling, saves=max_pool_saves, spelling="F.max_pool2d" + _POOL + "<dilation=1><ceil_mode=False>)"
    ),
    "aten.max_pool3d": Operator(rule=pooling, saves=max_pool_saves, in_torch=True),
}
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_global_pool": OperatorVariant(localise=lambda local: ({"sizes": _image(local)}, ())),
    "halo_convolution": OperatorVariant(
        localise=localise_convolution, collectives=halo_collectives, exchanges=True, holds=halo_holds, keeps=halo_keeps
    ),
    "halo_transposed_convolution": OperatorVariant(
        localise=localise_transposed, collectives=halo_collectives, exchanges=True, holds=halo_holds
    ),
    "halo_max_pool": OperatorVariant(
        localise=localise_max_pool, collectives=halo_collectives, exchanges=True, holds=halo_holds
    ),
    "halo_avg_pool": OperatorVariant(
        localise=localise_avg_pool, collectives=halo_collectives, exchanges=True, holds=halo_holds
    ),
}
