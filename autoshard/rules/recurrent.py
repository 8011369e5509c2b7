"""Recurrent layers, all steps and layers in one operator: samples stand alone, everything else is whole."""

from __future__ import annotations

from autoshard.rules.kinds import Call, Localise, LocaliseVariant, NoRule, RuleFor, term

STATES = {"aten.gru": 1, "aten.lstm": 2, "aten.rnn_relu": 1, "aten.rnn_tanh": 1}


def recurrent(call: Call) -> str:
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


RULES: dict[str, str | RuleFor] = dict.fromkeys(STATES, recurrent)
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {}
