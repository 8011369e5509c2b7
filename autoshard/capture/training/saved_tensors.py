"""What autograd keeps of each op until its backward, with an accelerator's kernels (fused attention, byte masks)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.capture.training.strides import memory_layout
from autoshard.ir.graph import DTYPE_BYTES, Graph, Op, Saved, Tensor

Kept = tuple[tuple[int, ...], tuple[int, ...], int]  # operand positions, result positions, extra bytes
Rule = Callable[[Op, "list[Tensor | None]", list[Tensor]], Kept]


def note_saved(graph: Graph) -> Graph:
    """`Saved` on every op; needs `requires_grad` on the tensors. An op without a rule keeps its floating operands."""
    aliases = memory_layout(graph).aliases
    return replace(graph, ops=tuple(replace(op, saved=_saved(op, graph, aliases.get(op.name, ()))) for op in graph.ops))


def _saved(op: Op, graph: Graph, aliases: tuple[tuple[int, int], ...]) -> Saved:
    operands = [None if name is None else graph.tensor(name) for name in op.operands]
    results = [graph.tensor(name) for name in op.results]
    if not any(result.requires_grad for result in results):
        return Saved(aliases=aliases)
    kept, kept_results, extra = _RULES.get(op.target, _floating)(op, operands, results)
    return Saved(tuple(i for i in kept if i < len(operands) and operands[i] is not None), kept_results, extra, aliases)


def _floating(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    return tuple(i for i, operand in enumerate(operands) if operand is not None and "float" in operand.dtype), (), 0


def _keeps(operands: tuple[int, ...] = (), results: tuple[int, ...] = ()) -> Rule:
    return lambda op, given, made: (operands, results, 0)


def _product(left: int = 0, right: int = 1) -> Rule:
    """Each factor is kept for the other's gradient."""

    def rule(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
        return tuple(i for i, j in ((left, right), (right, left)) if _needs_grad(operands, j)), (), 0

    return rule


def _quotient(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    return ((0, 1) if _needs_grad(operands, 1) else (1,)), (), 0


def _layer_norm(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    """The input, weight, bias, and a mean and a reciprocal deviation per row."""
    normalised = op.attribute("normalized_shape")
    assert isinstance(normalised, tuple)
    rows = results[0].numel
    for size in normalised:
        assert isinstance(size, int)
        rows //= max(size, 1)
    return (0, 1, 2), (), 2 * rows * _accumulator_bytes(operands[0])


def _batch_norm(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    """The input, weight, running statistics, and the batch's mean and reciprocal deviation per channel."""
    given = operands[0]
    assert given is not None
    return (0, 1, 3, 4), (), 2 * given.shape[1] * _accumulator_bytes(given) if op.attribute("training") else 0


def _cross_entropy(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    """The labels, class weights, the log-probabilities, and the total weight."""
    logits = operands[0]
    assert logits is not None
    return (1, 2), (), logits.bytes + DTYPE_BYTES[logits.dtype]


def _attention(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    """Fused attention: query, key, value, mask, the result, and a logsumexp per query."""
    query = operands[0]
    assert query is not None
    return (0, 1, 2, 3), (0,), query.numel // max(query.shape[-1], 1) * _accumulator_bytes(query)


def _experts(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    """The operands, and for each pair of token and expert its row, what is between the two products, its result."""
    x, up, down, chosen, _ = operands[:5]
    assert x is not None and up is not None and down is not None and chosen is not None
    row = x.shape[1] + (up.shape[1] if len(operands) == 5 else up.shape[2]) + down.shape[2] + down.shape[1]
    return (1, 2, 3, 4), (), chosen.numel * row * DTYPE_BYTES[x.dtype]


def _cell(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    """All but the biases, the gates, and what is between them and the new state."""
    matrices = tuple(i for i, operand in enumerate(operands) if operand is not None and len(operand.shape) == 2)
    gates = 1 if "rnn" in op.target else 5
    return matrices, (), gates * results[0].bytes


def _embedding_bag(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    """Ids, offsets and their weights, the table only for the gradient of these; the bag of each id and its length."""
    ids, bags, eight = operands[1], results[0].shape[0], DTYPE_BYTES["int64"]
    assert ids is not None
    extra = results[0].numel if op.attribute("mode") == "max" else ids.numel
    return (1, 2, 3, *([0] if _needs_grad(operands, 3) else [])), (), (extra + 2 * bags) * eight


def _dropout(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    return (), (), results[0].numel  # a byte an element


def _max_pool(op: Op, operands: list[Tensor | None], results: list[Tensor]) -> Kept:
    return (0,), (), results[0].numel * DTYPE_BYTES["int64"]


def _needs_grad(operands: list[Tensor | None], position: int) -> bool:
    operand = operands[position] if position < len(operands) else None
    return operand is not None and operand.requires_grad


def _accumulator_bytes(operand: Tensor | None) -> int:
    return 8 if operand is not None and operand.dtype == "float64" else 4


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


_RULES: dict[str, Rule] = {
    **_each(
        "add sub neg reshape transpose permute expand slice select split unbind unsqueeze squeeze cat stack sum mean "
        "to detach alias pad constant_pad_nd narrow roll flip full select_scatter slice_scatter repeat cumsum "
        "repeat_interleave",
        _keeps(),
    ),
    **_each("relu tanh sigmoid exp sqrt rsqrt softmax _softmax log_softmax reciprocal", _keeps(results=(0,))),
    **_each(
        "gelu silu log sin cos abs erf leaky_relu clamp avg_pool2d adaptive_avg_pool2d hardtanh softplus", _keeps((0,)),
    ),
    **_each("embedding masked_fill index_select", _keeps((1,))),
    **_each("conv1d conv2d conv3d convolution mse_loss", _keeps((0, 1))),
    **_each("gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell", _cell),
    **_each("linear mm bmm matmul mul", _product()),
    **_each("max_pool2d max_pool1d max_pool3d", _max_pool),
    "autoshard.linear_in_out": _product(),
    "autoshard.embedding_bags": _embedding_bag,
    "autoshard.experts": _experts,
    "aten.addmm": _product(1, 2),
    "aten.baddbmm": _product(1, 2),
    "aten.pow": lambda op, operands, results: ((0,), (), 0) if len(operands) == 1 else ((0, 1), (0,), 0),
    "aten.where": _keeps((0,)),
    "aten.index": lambda op, operands, results: (tuple(range(1, len(operands))), (), 0),
    "aten.gather": _keeps((1,)),
    "aten.div": _quotient,
    "aten.layer_norm": _layer_norm,
    "aten.batch_norm": _batch_norm,
    "aten.cross_entropy_loss": _cross_entropy,
    "aten.scaled_dot_product_attention": _attention,
    "aten.dropout": _dropout,
}  # fmt: skip
