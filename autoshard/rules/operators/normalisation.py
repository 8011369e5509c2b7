"""Softmax and the norms: the normalised dims are whole, or sharded if a variant joins the statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod

from autoshard.ir.graph import DTYPE_BYTES, Op, Tensor
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    NoRule,
    OperatorCall,
    integers,
    letters,
    term,
)
from autoshard.rules.algebra.operator_record import CodeWriter, Given, Names, Operator
from autoshard.rules.algebra.saved_for_backward import RESULT, Kept, Operands, accumulator_bytes
from autoshard.rules.algebra.variant_record import (
    ACCUMULATED,
    Holds,
    Inside,
    KeptTensors,
    Layouts,
    LocalTensors,
    OperatorVariant,
    Temporary,
    bytes_of,
    first,
    passes,
    shards,
    wide_bytes,
)


def over_dim(call: OperatorCall) -> str:
    """Rule with one whole dim: cumulative sums, sorts."""
    dims = letters(call.rank)
    if not dims:
        return "() -> " + ", ".join("()" for _ in call.results)
    results = ", ".join(term(dims) for _ in call.results)
    return f"{term(dims)} -> {results} | whole: {dims[call.dim()]}"


def softmax(call: OperatorCall) -> str:
    """Rule of softmax: along a sharded dim the maxima and sums of all devices are joined."""
    dims = letters(call.rank)
    if not dims:
        return "() -> ()"
    factor = dims[call.dim()]
    name = "parallel_log_softmax" if "log_softmax" in call.op.target else "parallel_softmax"
    return f"{term(dims)} -> {term(dims)} | plain: {factor} | variant: {name} {factor}"


def batch_norm(call: OperatorCall) -> str:
    """Rule: with running statistics channels are independent; with the batch's, a sharded batch joins them."""
    present = ["c?" if shape is None else "c" for shape in call.shapes[1:]]
    statistics = ", c" * (len(call.results) - 1)
    batch = bool(call.get("training")) or (len(call.shapes) > 3 and call.shapes[3] is None)
    spatial = " d*" if call.rank > 2 else ""
    factors = "b" + spatial.replace("*", "")
    joined = f" | joined: {factors}" if statistics else ""
    variant = f"{joined} | plain: {factors} | variant: synchronised_batch_norm {factors}" if batch else ""
    return f"b c{spatial}, {', '.join(present)} -> b c{spatial}{statistics}{variant}"


def group_norm(call: OperatorCall) -> str:
    """Rule with independent samples and groups; sharded positions, or channels of the only group, join statistics."""
    groups = call.integer("num_groups", 1)
    channels = f"(g {call.shape[1] // groups})" if groups > 1 else "c"
    weights = ["-" if shape is None else channels for shape in call.shapes[1:]]
    spatial = " d*" if call.rank > 2 else ""
    factors = ("c" if groups == 1 else "") + spatial.replace("*", "")
    variant = f" | plain: {factors.strip()} | variant: parallel_group_norm {factors.strip()}" if factors else ""
    return f"{', '.join([f'b {channels}{spatial}', *weights])} -> b {channels}{spatial}{variant}"


def localise_parallel_group_norm(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    x = local.instance.operands[0]
    assert x is not None
    groups = local.op.attribute("num_groups")
    assert isinstance(groups, int)
    cut = local.instance.rule.variant_factors
    values: dict[str, LocalAttribute] = {
        "groups": local.factor("g") if local.axes("g") else groups,
        "count": prod(x.shape[1:]) // groups,
        "eps": local.op.attribute("eps"),
    }
    return values, (("features", local.axes(*cut)),)


def localise_norm(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    sizes = integers(local.op.attribute("normalized_shape"))
    values: dict[str, LocalAttribute] = {"dims": len(sizes), "count": prod(sizes)}
    eps = dict(local.op.attributes).get("eps")
    return {**values, "eps": eps}, (("features", local.axes(*local.instance.rule.variant_factors)),)


def localise_softmax(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    attributes, x = dict(local.op.attributes), local.instance.operands[0]
    assert x is not None and isinstance(attributes["dim"], int)
    wide = "float32" if attributes.get("half_to_float") else attributes.get("dtype")
    classes = local.axes(*local.instance.rule.variant_factors)
    return {"dim": attributes["dim"] % len(x.shape), "dtype": wide}, (("classes", classes),)


def localise_batch_norm(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    x, attributes = local.instance.operands[0], dict(local.op.attributes)
    assert x is not None
    values: dict[str, LocalAttribute] = {"count": x.shape[0] * prod(x.shape[2:])}
    values |= {"momentum": attributes.get("momentum", 0.1), "eps": attributes.get("eps", 1e-5)}
    return values, (("batch", local.axes(*local.instance.rule.variant_factors)),)


def localise_group_norm(local: Local) -> dict[str, LocalAttribute]:
    return {"num_groups": local.factor("g")} if local.axes("g") else {}


def weight_norm(call: OperatorCall) -> str:
    """Rule of (direction, magnitude): each index along the dim has a norm of its own, over all other dims."""
    names, dim = letters(call.rank), call.get("dim")
    if not isinstance(dim, int) or dim == -1 or call.shapes[1] is None or len(call.shapes[1]) != call.rank:
        raise NoRule  # -1 is one norm over everything
    factor = names[dim % call.rank]
    whole = [name for name in names if name != factor]
    magnitude = [factor if name == factor else "1" for name in names]
    return f"{term(names)}, {term(magnitude)} -> {term(names)} | whole: {' '.join(whole)} | linear: 1"


def layer_norm_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """The input, weight, bias, and a mean and a reciprocal deviation per row."""
    return (0, 1, 2), (), 2 * _rows(op, results[0]) * accumulator_bytes(operands[0])


def rms_norm_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Tensors that fused accelerator kernels keep: input, weight, and a reciprocal root mean square per row."""
    return (0, 1), (), _rows(op, results[0]) * accumulator_bytes(operands[0])


def _rows(op: Op, result: Tensor) -> int:
    return result.numel // max(prod(integers(op.attribute("normalized_shape"))), 1)


def batch_norm_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """The input, weight, running statistics, and the batch's mean and reciprocal deviation per channel."""
    operand = operands[0]
    assert operand is not None
    return (0, 1, 3, 4), (), 2 * operand.shape[1] * accumulator_bytes(operand) if op.attribute("training") else 0


def spell_batch_norm(writer: CodeWriter, operands: Names, arguments: Given) -> str:
    """Code for input, weight, bias, mean, variance. In training its results hold the new statistics too."""
    x, weight, bias, mean, variance = (operands[i] if i < len(operands) else None for i in range(5))
    training = bool(arguments.get("training"))
    numbers = f"{training}, {writer.literal(arguments.get('momentum'))}, {writer.literal(arguments.get('eps'))}"
    if training and mean is not None:
        # Autograd keeps the statistics that it is given, and the new ones are written over the buffers.
        inputs = f"{x}, {weight}, {bias}, {mean}.clone(), {variance}.clone()"
        return f"torch.ops.aten._native_batch_norm_legit_functional({inputs}, {numbers})"
    return f"F.batch_norm({x}, {mean}, {variance}, {weight}, {bias}, {numbers})"


def statistics(op: Op, x: LocalTensor) -> tuple[set[int], int]:
    """Dims that a norm or softmax goes over, and how many of its results a device has (a group norm: at most)."""
    attributes, rank = dict(op.attributes), len(x.shape)
    shape, groups, dim = attributes.get("normalized_shape"), attributes.get("num_groups"), attributes.get("dim")
    if isinstance(shape, tuple):
        over = set(range(rank - len(shape), rank))
    elif isinstance(groups, int):
        return set(range(1, rank)), x.shape[0] * groups
    elif isinstance(dim, int):
        over = {dim % rank}
    else:
        over = {0, *range(2, rank)}
    return over, math.prod(size for i, size in enumerate(x.shape) if i not in over)


def norm_collectives(
    gathered: int, reduced: tuple[int, ...], backward: int
) -> Callable[[Mesh, Op, LocalTensors, Layouts], Inside]:
    """All-gather of `gathered` numbers per device and result, or all-reduces of `reduced` ones; in backward one
    all-reduce of `backward` numbers."""

    def inside(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Inside:
        x = operands[0]
        assert x is not None
        over, count = statistics(op, x)
        size = float(count * max(ACCUMULATED, DTYPE_BYTES[x.dtype]))
        axes = [axis for axis, dim in shards(layouts[0]) if dim in over]
        calls = [(axis, "all_gather", gathered * size * mesh.sizes[axis]) for axis in axes if gathered]
        calls += [(axis, "all_reduce", numbers * size) for numbers in reduced for axis in axes]
        return Inside(tuple(calls), tuple((axis, "all_reduce", backward * size) for axis in axes))

    return inside


def norm_holds(affine: bool, passes: int) -> Holds:
    """Temporary bytes: in half precision the input and its result, in float32. Backward: the gradient before the
    weight, and `passes` products of its size."""

    def rule(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
        x = first(operands)
        wide = wide_bytes(x) if wide_bytes(x) != x.bytes else 0.0
        there = max(0.0, 2 * (wide - x.bytes)) if wide else 0.0
        between = x.bytes if affine and len(operands) > 1 and operands[1] is not None else 0.0
        return Temporary(there, between + (passes - 1) * wide_bytes(x) + 3 * wide)

    return rule


def norm_keeps(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> KeptTensors:
    """Standardised input instead of the input, and its scale; no running statistics."""
    x = first(operands)
    return KeptTensors((0, 3, 4), x.bytes + statistics(op, x)[1] * float(max(ACCUMULATED, DTYPE_BYTES[x.dtype])))


def softmax_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes in backward: one product, in half precision three and the operands in float32."""
    x = first(operands)
    wide = wide_bytes(x) if wide_bytes(x) != x.bytes else 0.0
    return Temporary(
        (2 * wide if wide else 0.0) + wide_bytes(x) * (op.target == "aten.log_softmax"), wide_bytes(x) + 3 * wide
    )


def copied_statistics(
    mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors
) -> KeptTensors:
    """Running statistics before the step, as the emitted code copies them."""
    running = operands[3:5] if dict(op.attributes).get("training") else ()
    return KeptTensors((3, 4) if running else (), None, bytes_of(*running))


OPERATORS: dict[str, Operator] = {
    "aten.batch_norm": Operator(
        keeps=copied_statistics,
        rule=batch_norm,
        saves=batch_norm_saves,
        statistics=True,
        first_decides_dtype=True,
        bandwidth="normalisation",
        spelling=spell_batch_norm,
    ),
    "aten.group_norm": Operator(
        rule=group_norm,
        localise=localise_group_norm,
        autocast="high",
        bandwidth="normalisation",
        spelling="F.group_norm({0}, {num_groups}<weight:1><bias:2><eps=1e-05>)",
    ),
    "aten.layer_norm": Operator(
        sequence_parallel=True,
        rule="... d*, d*?, d*? -> ... d* | plain: d | variant: parallel_layer_norm d",
        saves=layer_norm_saves,
        autocast="high",
        bandwidth="normalisation",
        spelling="F.layer_norm({0}, {normalized_shape}<weight:1><bias:2><eps=1e-05>)",
    ),
    "aten._log_softmax": Operator(rule=softmax, autocast="high_by_default", dims="dim"),
    "aten.log_softmax": Operator(
        rule=softmax,
        saves=RESULT,
        autocast="high_by_default",
        bandwidth="softmax",
        spelling="F.log_softmax({0}, dim={dim}<dtype>)",
        dims="dim",
    ),
    "aten.native_layer_norm": Operator(autocast="high", bandwidth="normalisation"),
    "aten.renorm": Operator(autocast="high", in_torch=True),
    "aten.rms_norm": Operator(
        sequence_parallel=True,
        rule="... d*, d*? -> ... d* | plain: d | variant: parallel_rms_norm d",
        saves=rms_norm_saves,
        autocast="high",
        bandwidth="normalisation",
        spelling="F.rms_norm({0}, {normalized_shape}<weight:1><eps>)",
    ),
    "aten._softmax": Operator(rule=softmax, saves=RESULT, autocast="high_by_default", dims="dim"),
    "aten.softmax": Operator(
        rule=softmax,
        saves=RESULT,
        autocast="high_by_default",
        bandwidth="softmax",
        spelling="F.softmax({0}, dim={dim}<dtype>)",
        result_name="probabilities",
        dims="dim",
    ),
    "aten.softmin": Operator(autocast="high_by_default"),
    "aten._weight_norm": Operator(rule=weight_norm, bandwidth="normalisation"),
}
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_group_norm": OperatorVariant(
        localise=localise_parallel_group_norm,
        collectives=norm_collectives(2, (), 2),
        holds=norm_holds(True, 2),
        keeps=norm_keeps,
        traffic=passes(7, 21),
    ),
    "parallel_layer_norm": OperatorVariant(
        localise=localise_norm,
        collectives=norm_collectives(2, (), 2),
        holds=norm_holds(True, 2),
        keeps=norm_keeps,
        traffic=passes(7, 21),
    ),
    "parallel_log_softmax": OperatorVariant(
        localise=localise_softmax, collectives=norm_collectives(0, (1, 1), 1), holds=softmax_holds, traffic=passes(8, 9)
    ),
    "parallel_rms_norm": OperatorVariant(
        localise=localise_norm,
        collectives=norm_collectives(0, (1,), 1),
        holds=norm_holds(True, 1),
        keeps=norm_keeps,
        traffic=passes(7, 17),
    ),
    "parallel_softmax": OperatorVariant(
        localise=localise_softmax, collectives=norm_collectives(0, (1, 1), 1), holds=softmax_holds, traffic=passes(8, 9)
    ),
    "synchronised_batch_norm": OperatorVariant(
        localise=localise_batch_norm,
        collectives=norm_collectives(2, (), 2),
        holds=norm_holds(True, 2),
        keeps=norm_keeps,
        traffic=passes(7, 21),
    ),
}
