"""Recurrent layers and cells.

A layer is one operator over all its steps: only samples can be sharded. A cell is one step: its hidden units can be
sharded, alike in each gate's block of the weights, and every device reads the whole previous state.
"""

from __future__ import annotations

from autoshard.ir.graph import Op, Tensor
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    NoRule,
    OperatorCall,
    term,
)
from autoshard.rules.algebra.operator_record import Operator, each
from autoshard.rules.algebra.saved_for_backward import Kept, Operands
from autoshard.rules.algebra.variant_record import OperatorVariant

STATES = {"aten.gru": 1, "aten.lstm": 2, "aten.rnn_relu": 1, "aten.rnn_tanh": 1}


def recurrent(call: OperatorCall) -> str:
    """Rule of x, states, then weights; packed sequences and dropout between layers have none."""
    if call.rank != 3 or call.get("batch_first") is None or (call.get("dropout") and call.get("train")):
        raise NoRule
    batch, states = 0 if call.get("batch_first") else 1, STATES[call.op.target]
    shapes = [shape for shape in call.shapes if shape is not None]
    operands = [_side(shapes[0], batch), *(_side(shape, 1) for shape in shapes[1 : 1 + states])]
    weights = [term([str(size) for size in shape]) for shape in shapes[1 + states :]]
    results = [_side(call.results[0], batch), *(_side(shape, 1) for shape in call.results[1:])]
    return f"{', '.join(operands + weights)} -> {', '.join(results)}"


def _side(shape: tuple[int, ...], batch: int) -> str:
    return term(["b" if dim == batch else str(size) for dim, size in enumerate(shape)])


def localise_lstm_cell(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {}, ()


def localise_gru_cell(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {"size": local.instance.size["n"]}, (("units", local.axes("n")),)


def localise_rnn_cell(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {"activation": local.op.target.split("_")[1]}, ()


_ONE_GATE = "b i, b k, n i, n k, n?, n? -> b n | whole: i k | plain: n | variant: parallel_rnn_cell n"


def cell_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Operands but for the biases, the gates, and the values between them and the new state."""
    matrices = tuple(i for i, operand in enumerate(operands) if operand is not None and len(operand.shape) == 2)
    gates = 1 if "rnn" in op.target else 5
    return matrices, (), gates * results[0].bytes


OPERATORS: dict[str, Operator] = {
    **each("gru lstm rnn_relu rnn_tanh", Operator(rule=recurrent, autocast="low", in_torch=True)),
    "aten.gru_cell": Operator(
        rule="b i, b k, (3 n) i, (3 n) k, (3 n)?, (3 n)? -> b n | whole: i k | plain: n | variant: parallel_gru_cell n",
        saves=cell_saves,
        autocast="low",
        cell_weights=2,
        split_words={(2, 0): "hidden units split"},
    ),
    "aten.lstm_cell": Operator(
        rule="b i, b k, b n, (4 n) i, (4 n) k, (4 n)?, (4 n)? -> b n, b n | whole: i k | plain: n "
        "| variant: parallel_lstm_cell n",
        saves=cell_saves,
        autocast="low",
        cell_weights=3,
        split_words={(3, 0): "hidden units split"},
    ),
    "aten.rnn_relu_cell": Operator(rule=_ONE_GATE, saves=cell_saves, autocast="low", cell_weights=2),
    "aten.rnn_tanh_cell": Operator(rule=_ONE_GATE, saves=cell_saves, autocast="low", cell_weights=2),
    "aten._thnn_fused_gru_cell": Operator(autocast="low"),
    "aten._thnn_fused_lstm_cell": Operator(autocast="low"),
}
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_gru_cell": OperatorVariant(localise=localise_gru_cell),
    "parallel_lstm_cell": OperatorVariant(localise=localise_lstm_cell),
    "parallel_rnn_cell": OperatorVariant(localise=localise_rnn_cell),
}
