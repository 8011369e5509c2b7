"""Mixture of experts: t tokens, e experts, f their inner size, k experts a token (capture folds a block into this
operator).

With only experts sharded, every device has all tokens and adds its part. With tokens and experts sharded by one
axis (`t+e`), all-to-alls send tokens to their experts and back. `imbalance` (priced only): the pairs of token and
expert on the fullest device, over the average."""

from __future__ import annotations

import math

from autoshard.ir.graph import DTYPE_BYTES, Op, Tensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    OperatorCall,
)
from autoshard.rules.algebra.operator_record import Operator
from autoshard.rules.algebra.saved_for_backward import Kept, Operands
from autoshard.rules.algebra.variant_record import (
    Inside,
    KeptTensors,
    Layouts,
    LocalTensors,
    OperatorVariant,
    shards,
)


def experts(call: OperatorCall) -> str:
    if call.present == 7:
        options = "sum: e f | whole: m k | plain: e | variant: parallel_experts | together: t+e dispatched_experts"
        return f"t m, e m (f 2), e f n, t k, t k, e (f 2), +e n -> t n | {options}"
    up = "e (2 f) m" if call.get("gated") else "e f m"
    options = "sum: e f | whole: m k | plain: e | variant: parallel_experts | together: t+e dispatched_experts"
    return f"t m, {up}, e n f, t k, t k -> t n | {options}"


def imbalance(op: Op) -> float:
    """Imbalance of an op; 1 if tokens are spread evenly."""
    return float(dict(op.attributes).get("imbalance", 1.0))  # type: ignore[arg-type]


def localise_experts(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    dispatch = local.axes("t+e")
    cut = local.axes("e", "t+e")
    roles = (("cut", cut), ("dispatch", dispatch))
    return dict(local.op.attributes), tuple((role, axes) for role, axes in roles if axes)


def inner_widths(op: Op) -> int:
    """Number of values of an expert's inner width that autograd keeps of a pair of token and expert.

    Of emit/runtime/experts.py: the operands or results of the activation and the second product's operand; with a gate
    both halves of the first product, the activation and their product; with a clipped one its seven steps. A kernel
    that recomputes gate and activation in its backward (`fused_gate`, of an operator that is priced and never run)
    keeps the first product and the second's operand: Megatron-Core's bias_swiglu_impl saves its input alone.
    """
    options = dict(op.attributes)
    if options.get("activation") == "clipped":
        return 7
    if options.get("gated"):
        return 3 if options.get("fused_gate") else 4
    return 1 if options.get("activation") in _KEEPS_RESULT else 2


_KEEPS_RESULT = ("relu", "tanh")  # their backward reads the result, which the second product keeps


def experts_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Operands, and for each pair of token and expert its row, the values between the two products, and its result."""
    x, up, down, chosen, _ = operands[:5]
    assert x is not None and up is not None and down is not None and chosen is not None
    inner, outer = _widths(op, down.shape)
    return (1, 2, 3, 4), (), chosen.numel * (x.shape[1] + inner + outer) * DTYPE_BYTES[x.dtype]


def _widths(op: Op, down: tuple[int, ...]) -> tuple[int, int]:
    """Number of elements of a pair between the products, and of its result, by the shape of the second weight: with
    biases, seven operands, it is (experts, in, out), else (experts, out, in)."""
    width, outer = down[1:] if len(op.operands) > 5 else down[:0:-1]
    return inner_widths(op) * width, outer


def experts_keep(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> KeptTensors:
    """Tensors kept on one device. Rows and values between the products: of the pairs whose experts are here, which are
    those of its tokens if these travel; between the products the local part of the inner dim. Results, which the pairs'
    weights multiply: of all pairs of its tokens; and once more of those worked on if they are put among others'
    (index_copy keeps its source)."""
    x, _, down, chosen, _ = operands[:5]
    assert x is not None and down is not None and chosen is not None
    tokens, experts = ({axis for axis, dim in shards(layout) if dim == 0} for layout in layouts[:2])
    inner, outer = _widths(op, down.shape)
    pairs = float(x.shape[0] * chosen.shape[1])
    worked = pairs / math.prod(mesh.sizes[axis] for axis in experts - tokens)
    worked *= imbalance(op) if experts else 1.0  # of the fullest device
    results_kept = pairs * outer + (worked * outer if experts - tokens else 0.0)
    return KeptTensors(extra_bytes=DTYPE_BYTES[x.dtype] * (worked * (x.shape[1] + inner) + results_kept))


def dispatch_collectives(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Inside:
    """All-to-alls of pairs of token and expert to the experts, results back; backward the gradients, the same ways."""
    x, _, down, chosen, _ = operands[:5]
    assert x is not None and down is not None and chosen is not None
    tokens, experts = ({axis for axis, dim in shards(layout) if dim == 0} for layout in layouts[:2])
    pairs = x.shape[0] * chosen.shape[1] * imbalance(op)
    width = x.bytes / max(x.numel, 1)
    axes = sorted(tokens & experts)
    there = [(axis, "all_to_all", float(pairs * x.shape[1] * width)) for axis in axes]
    back = [
        (axis, "all_to_all", float(pairs * down.shape[2 if len(operands) > 5 else 1] * width))
        for axis in reversed(axes)
    ]
    return Inside((*there, *back), (*reversed(back), *(reversed(there) if x.requires_grad else ())))


OPERATORS: dict[str, Operator] = {
    "autoshard.experts": Operator(
        rule=experts,
        saves=experts_saves,
        keeps=experts_keep,
        low_operands=(0, 1, 2),
        split_words={(1, 0): "experts split", (1, 1): "experts' inner dim split"},
        factor_words={"t+e": "experts split, tokens sent to them"},
    ),
}
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_experts": OperatorVariant(localise=localise_experts, keeps=experts_keep),
    "dispatched_experts": OperatorVariant(
        localise=localise_experts, collectives=dispatch_collectives, exchanges=True, keeps=experts_keep
    ),
}
