"""Recurrent layers and cells.

A layer is all its steps in one operator: samples stand alone, everything else is whole. A cell is one step: its hidden
units can be cut, each gate's block of the weights alike; every device then reads the whole last state.
"""

from __future__ import annotations

from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    Localise,
    LocaliseVariant,
    NoRule,
    OperatorCall,
    RuleFor,
    term,
)

STATES = {"aten.gru": 1, "aten.lstm": 2, "aten.rnn_relu": 1, "aten.rnn_tanh": 1}


def recurrent(call: OperatorCall) -> str:
    """x, states, then weights; packed sequences and dropout between layers have no rule."""
    if call.rank != 3 or call.get("batch_first") is None or (call.get("dropout") and call.get("train")):
        raise NoRule
    batch, states = 0 if call.get("batch_first") else 1, STATES[call.op.target]
    given = [shape for shape in call.shapes if shape is not None]
    operands = [_side(given[0], batch), *(_side(shape, 1) for shape in given[1 : 1 + states])]
    weights = [term([str(size) for size in shape]) for shape in given[1 + states :]]
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
RULES: dict[str, str | RuleFor] = {
    **dict.fromkeys(STATES, recurrent),
    "aten.gru_cell": "b i, b k, (3 n) i, (3 n) k, (3 n)?, (3 n)? -> b n | whole: i k | plain: n "
    "| variant: parallel_gru_cell n",
    "aten.lstm_cell": "b i, b k, b n, (4 n) i, (4 n) k, (4 n)?, (4 n)? -> b n, b n | whole: i k | plain: n "
    "| variant: parallel_lstm_cell n",
    "aten.rnn_relu_cell": _ONE_GATE,
    "aten.rnn_tanh_cell": _ONE_GATE,
}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {
    "parallel_gru_cell": localise_gru_cell,
    "parallel_lstm_cell": localise_lstm_cell,
    "parallel_rnn_cell": localise_rnn_cell,
}
