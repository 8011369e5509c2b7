"""Losses: a mean over sharded rows is the local sum over the global count (or the weights of labels), by a variant."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

from autoshard.ir.graph import DTYPE_BYTES, Op, Tensor
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    NoRule,
    OperatorCall,
    term,
)
from autoshard.rules.algebra.operator_record import Operator, TensorParallel, each
from autoshard.rules.algebra.saved_for_backward import Kept, Operands, keeps
from autoshard.rules.algebra.variant_record import (
    ACCUMULATED,
    Formulas,
    Holds,
    Inside,
    KeptTensors,
    Layouts,
    LocalTensors,
    OperatorVariant,
    Temporary,
    WholeShapes,
    bytes_of,
    first,
    shards,
    temporaries,
    wide_bytes,
)

NONE, MEAN, SUM = range(3)  # torch's reduction argument
REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(call: OperatorCall) -> str:
    """Rule in which sharded classes exchange maximum and sum; a mean counts labels not ignored, over all devices."""
    if _probabilities(call):
        return soft_labels(call)
    return _classes(call, "joined", "parallel_cross_entropy")


def nll(call: OperatorCall) -> str:
    """Rule in which only the device that holds a label's class adds to the loss."""
    return _classes(call, "sum", "parallel_nll_loss")


def _classes(call: OperatorCall, classes: str, variant: str) -> str:
    """Rule of (rows, classes, ...), labels, class weights. Without a mean, only sharded classes need `variant`."""
    rows = ["rows"] * (call.rank > 1) + [f"d{i}" for i in range(call.rank - 2)]
    dims = [*rows[:1], "vocabulary", *rows[1:]]
    reduction = call.integer("reduction", MEAN)
    operands = [term(dims), term(rows), *("-" if shape is None else "vocabulary" for shape in call.shapes[2:])]
    summed = ([] if reduction == NONE else rows) + ["vocabulary"] * (classes == "sum")
    options = [f"sum: {' '.join(summed)}"] * bool(summed) + ["joined: vocabulary"] * (classes == "joined")
    options += ["empty: vocabulary", "plain: vocabulary"]
    factors = dims if reduction == MEAN else ["vocabulary"]
    result = term(rows) if reduction == NONE else "()"
    return " | ".join([f"{', '.join(operands)} -> {result}", *options, f"variant: {variant} {' '.join(factors)}"])


def soft_labels(call: OperatorCall) -> str:
    """Rule for labels that are probabilities: (rows, classes, ...) both; classes whole; a mean is over rows."""
    rows = ["rows"] * (call.rank > 1) + [f"d{i}" for i in range(call.rank - 2)]
    dims = term([*rows[:1], "c", *rows[1:]])
    reduction = call.integer("reduction", MEAN)
    operands = [dims, dims, *("-" if shape is None else "c" for shape in call.shapes[2:])]
    if reduction == NONE:
        return f"{', '.join(operands)} -> {term(rows)} | whole: c"
    summed = f" | sum: {' '.join(rows)}" if rows else ""
    variant = f" | variant: parallel_loss {' '.join(rows)}" if rows and reduction == MEAN else ""
    return f"{', '.join(operands)} -> ()  | whole: c{summed}{variant}"


def _probabilities(call: OperatorCall) -> bool:
    return "int" not in (call.dtypes[1] or "")


def mse(call: OperatorCall) -> str:
    return {
        NONE: "..., ... -> ...",
        MEAN: "..., ... -> () | sum: ... | variant: parallel_mse_loss ...",
        SUM: "..., ... -> () | sum: ...",
    }[call.integer("reduction", MEAN)]


def elementwise(call: OperatorCall) -> str:
    """Rule for one number an element, weights broadcast."""
    if any(len(shape or ()) > call.rank for shape in call.shapes):
        raise NoRule
    operands = ", ".join("-" if shape is None else "..." for shape in call.shapes)
    return {
        NONE: f"{operands} -> ...",
        MEAN: f"{operands} -> () | sum: ... | variant: parallel_loss ...",
        SUM: f"{operands} -> () | sum: ...",
    }[call.integer("reduction", MEAN)]


def embedding_pairs(call: OperatorCall) -> str:
    """Rule for one number a row of (rows, d), whose size d is whole."""
    if call.rank != 2 or len(call.shapes[2] or ()) != 1:
        raise NoRule
    return {
        NONE: "rows d, rows d, rows -> rows | whole: d",
        MEAN: "rows d, rows d, rows -> () | sum: rows | whole: d | variant: parallel_loss rows",
        SUM: "rows d, rows d, rows -> () | sum: rows | whole: d",
    }[call.integer("reduction", MEAN)]


def localise_classes(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    facts = local.instance.operands[0]
    assert facts is not None
    attributes = dict(local.op.attributes)
    reduction = attributes.get("reduction", MEAN)
    assert isinstance(reduction, int)
    values: dict[str, LocalAttribute] = {
        "size": facts.shape[min(1, len(facts.shape) - 1)],
        "ignore_index": attributes.get("ignore_index", -100),
    }
    if reduction != MEAN:
        values["reduction"] = REDUCTIONS[reduction]
    if local.op.target == "aten.cross_entropy_loss":
        values["label_smoothing"] = attributes.get("label_smoothing", 0.0)
    rows = tuple(factor for factor in local.instance.rule.factors if factor != "vocabulary")
    cut = local.axes(*rows) if reduction == MEAN else ()
    return values, (("rows", cut), ("vocabulary", local.axes("vocabulary")))


def localise_mse(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {"count": prod(size for _, size in local.instance.sizes)}, ()


def localise_loss(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    """Local arguments: `loss` and the `count` of the mean: all elements, or all rows if a loss is one number a row."""
    attributes = {name: value for name, value in local.op.attributes if name != "reduction"}
    count = prod(local.instance.size[factor] for factor in local.instance.rule.sum)
    return {"loss": local.op.target.removeprefix("aten."), "count": count, **attributes}, ()


def cross_entropy_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Labels, class weights, the log-probabilities, and the total weight."""
    logits = operands[0]
    assert logits is not None
    return (1, 2), (), logits.bytes + DTYPE_BYTES[logits.dtype]


def cross_entropy_traffic(op: LocalOp) -> tuple[float, float]:
    """Log-softmax reads and writes the logits; backward fills a gradient, then reads it and the log-probabilities."""
    return 2 * op.operand(0).bytes, 4 * op.operand(0).bytes


def parallel_cross_entropy_traffic(op: LocalOp) -> tuple[float, float]:
    """The runtime's own kernels in float32: maximum, difference, exponential, sum, quotient; backward two passes. See
    `of_whole_classes` for where they run."""
    logits = op.operand(0)
    cast = 0 if logits.dtype in ("float32", "float64") else logits.bytes + 4 * logits.numel
    wide = max(logits.bytes, 4 * logits.numel)
    return 8 * wide + cast, 4 * wide + cast


def of_whole_classes(local: LocalOp, whole: WholeShapes) -> LocalOp:
    """Local op; the operator itself, without variant, if a device has all classes in the precision of the sums."""
    logits = local.operand(0)
    cut = whole[0] is None or logits.shape[_class_dim(logits)] != whole[0][_class_dim(logits)]
    return local if cut or logits.dtype not in _SUMMED_AS_THEY_ARE else replace(local, variant="")


def _by_operator(operands: LocalTensors, layouts: Layouts) -> bool:
    """True if `of_whole_classes` runs the operator itself, by these layouts."""
    logits = first(operands)
    cut = any(dim == _class_dim(logits) for _, dim in shards(layouts[0]))
    return not cut and logits.dtype in _SUMMED_AS_THEY_ARE


def _class_dim(logits: LocalTensor) -> int:
    return min(1, len(logits.shape) - 1)


_SUMMED_AS_THEY_ARE = ("float32", "float64")
COUNT_BYTES = DTYPE_BYTES["int64"]  # of labels that are not ignored
KEPT_OF_A_ROW = sum(  # bytes: column, whether it is here and counts, two weights
    DTYPE_BYTES[dtype] for dtype in ("int64", "bool", "bool", "float32", "float32")
)
USED_OF_A_ROW = 36


def cross_entropy_collectives(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Inside:
    """Collectives over the vocabulary: row maxima, then row sums, stacked. Over rows: the count of labels."""
    logits = operands[0]
    assert logits is not None
    class_dim = _class_dim(logits)
    rows = math.prod(size for dim, size in enumerate(logits.shape) if dim != class_dim)
    vocabulary = [axis for axis, dim in shards(layouts[0]) if dim == class_dim]
    smoothed, weighted = bool(dict(op.attributes).get("label_smoothing")), len(operands) > 2 and bool(operands[2])
    sums = 2 + smoothed + weighted * (1 + smoothed)
    calls = [(axis, "all_reduce", float(stacked * rows * ACCUMULATED)) for stacked in (1, sums) for axis in vocabulary]
    counts = [(axis, "all_reduce", float(COUNT_BYTES)) for axis, dim in shards(layouts[0]) if dim != class_dim]
    return Inside((*calls, *counts) if _is_mean(op) else tuple(calls))


def nll_collectives(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Inside:
    """All-reduce of the count of labels."""
    counts = [(axis, "all_reduce", float(COUNT_BYTES)) for axis, _ in shards(layouts[0])]
    return Inside(tuple(counts) if _is_mean(op) else ())


def _is_mean(op: Op) -> bool:
    return dict(op.attributes).get("reduction", 1) == 1


def cross_entropy_holds(
    mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors
) -> Temporary:
    """Temporary bytes: backward goes by way of the gradient of the log-probabilities."""
    return Temporary(0.0, bytes_of(operands[0]))


def _rows(op: Op, logits: LocalTensor) -> int:
    return logits.numel // max(logits.shape[1 if len(logits.shape) > 1 else 0], 1)


def parallel_cross_entropy_holds(
    mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors
) -> Temporary:
    """Bytes of logits less their maximum, and the softmax kept; both in float32. Backward: twice the gradient."""
    if _by_operator(operands, layouts):
        return cross_entropy_holds(mesh, op, operands, layouts, results)
    logits = first(operands)
    rounded = logits.bytes != wide_bytes(logits)  # the softmax, as it is kept
    size = wide_bytes(logits) * (2 if rounded else 1)
    return Temporary(size + USED_OF_A_ROW * _rows(op, logits), size + ACCUMULATED * _rows(op, logits))


def parallel_cross_entropy_keeps(
    mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors
) -> KeptTensors:
    if _by_operator(operands, layouts):
        return KeptTensors()
    logits = first(operands)
    return KeptTensors((1,), float(logits.bytes + KEPT_OF_A_ROW * _rows(op, logits)))


def loss_holds(formulas: Formulas, forward: float = 0.0) -> Holds:
    """`temporaries`; one tensor more in the forward of a loss that is reduced, which is made whole first."""

    def rule(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
        return temporaries(formulas, forward + _is_reduced(op))(mesh, op, operands, layouts, results)

    return rule


def _is_reduced(op: Op) -> bool:
    return dict(op.attributes).get("reduction", MEAN) != NONE


def logistic_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes; `pos_weight`: backward multiplies it by the labels, and by their sigmoids."""
    weighted = len(operands) > 3 and operands[3] is not None
    return loss_holds({0: 2 if weighted else 0}, 1)(mesh, op, operands, layouts, results)


def resized_keeps(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> KeptTensors:
    """A result that torch makes as large as the operands, then resizes to one number: its storage stays as large."""
    largest = max(bytes_of(x) for x in operands)
    return KeptTensors(more_bytes=largest if _is_reduced(op) else 0.0)


def parallel_loss_holds(
    mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors
) -> Temporary:
    """Temporary bytes of the loss; of a result that is resized, its storage, too: it is divided by the count."""
    known = OPERATORS[op.target]
    held = known.holds(mesh, op, operands, layouts, results) if known.holds else Temporary()
    resized = resized_keeps(mesh, op, operands, layouts, results).more_bytes if known.keeps else 0.0
    return replace(held, forward=held.forward + resized)


_NLL = "F.nll_loss({0}, {1}<weight:2><ignore_index=-100><reduction='mean'>)"
OPERATORS: dict[str, Operator] = {
    "aten.binary_cross_entropy": Operator(
        rule=elementwise,
        autocast="high",
        keeps=resized_keeps,
        spelling="F.binary_cross_entropy({0}, {1}<weight:2><reduction='mean'>)",
    ),
    "aten.binary_cross_entropy_with_logits": Operator(
        rule=elementwise,
        autocast="high",
        holds=logistic_holds,
        spelling="F.binary_cross_entropy_with_logits({0}, {1}<weight:2><reduction='mean'><pos_weight:3>)",
    ),
    "aten.cosine_embedding_loss": Operator(rule=embedding_pairs, autocast="high"),
    "aten.cross_entropy_loss": Operator(
        rule=cross_entropy,
        saves=cross_entropy_saves,
        autocast="high",
        bandwidth="loss",
        traffic=cross_entropy_traffic,
        holds=cross_entropy_holds,
        spelling="F.cross_entropy({0}, {1}<weight:2><ignore_index=-100><reduction='mean'><label_smoothing=0.0>)",
        operand_names=("logits", "labels"),
        tensor_parallel=TensorParallel(("vocabulary",), (), True),
        split_words={(0, 1): "vocabulary-parallel"},
        chooses="classes",
    ),
    **each("hinge_embedding_loss margin_ranking_loss", Operator(rule=elementwise, autocast="high")),
    "aten.kl_div": Operator(rule=elementwise, autocast="high", holds=loss_holds({0: 2, 1: 3.75}, 2)),
    "aten.huber_loss": Operator(
        rule=elementwise,
        autocast="high",
        holds=loss_holds({}),
        spelling="F.huber_loss({0}, {1}<reduction='mean'><delta=1.0>)",
    ),
    "aten.l1_loss": Operator(
        holds=loss_holds({0: 2, 1: 0}, 1),
        rule=elementwise,
        autocast="high",
        spelling="F.l1_loss({0}, {1}<reduction='mean'>)",
    ),
    "aten.mse_loss": Operator(
        rule=mse,
        saves=keeps(0, 1),
        autocast="high",
        holds=loss_holds({}),
        keeps=resized_keeps,
        spelling="F.mse_loss({0}, {1}<reduction='mean'>)",
    ),
    **each("multi_margin_loss multilabel_margin_loss triplet_margin_loss", Operator(autocast="high")),
    "aten.nll_loss": Operator(rule=nll, autocast="high", spelling=_NLL, chooses="classes"),
    "aten.nll_loss2d": Operator(autocast="high", chooses="classes"),
    "aten.nll_loss_nd": Operator(
        rule=nll, autocast="high", spelling=_NLL, operand_names=("log_probabilities", "labels"), chooses="classes"
    ),
    "aten.poisson_nll_loss": Operator(rule=elementwise, autocast="high", in_torch=True),
    "aten.smooth_l1_loss": Operator(
        rule=elementwise,
        autocast="high",
        holds=loss_holds({}),
        keeps=resized_keeps,
        spelling="F.smooth_l1_loss({0}, {1}<reduction='mean'><beta=1.0>)",
    ),
    "aten.soft_margin_loss": Operator(
        rule=elementwise,
        autocast="high",
        holds=temporaries({0: 2}),
        keeps=resized_keeps,
        spelling="F.soft_margin_loss({0}, {1}<reduction='mean'>)",
    ),
}
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_cross_entropy": OperatorVariant(
        localise=localise_classes,
        collectives=cross_entropy_collectives,
        holds=parallel_cross_entropy_holds,
        keeps=parallel_cross_entropy_keeps,
        bandwidth="parallel_loss",
        traffic=parallel_cross_entropy_traffic,
        widened=of_whole_classes,
    ),
    "parallel_nll_loss": OperatorVariant(localise=localise_classes, collectives=nll_collectives),
    "parallel_loss": OperatorVariant(localise=localise_loss, holds=parallel_loss_holds),
    "parallel_mse_loss": OperatorVariant(localise=localise_mse, holds=parallel_loss_holds),
}
