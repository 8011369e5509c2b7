"""Checks that a model in evaluation is its training forward without dropout: both run on tensors without values, and
every result is numbered by the function that made it and the numbers that went in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autoshard.graph_capture.tracing.call_caches import attributes_put_back, leaves
from autoshard.graph_capture.tracing.exporting import fake_stand_ins, quiet
from autoshard.graph_capture.tracing.python_state import hooks_put_back, modes_put_back
from autoshard.graph_capture.tracing.source_lines import here
from autoshard.graph_capture.tracing.unchanged_model import guarded
from autoshard.graph_capture.two_runs.call_numbers import CallNumbers, storage
from autoshard.graph_capture.two_runs.modes import set_mode

_DROPS: frozenset[Any] = frozenset({
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
})  # fmt: skip
_RECURRENT: frozenset[Any] = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_ARGUMENTS = ("input", "state", "weights", "biases", "layers", "dropout", "train")  # of these
_RATE, _TRAINS = map(_ARGUMENTS.index, ("dropout", "train"))


def quickly_alike(model: torch.nn.Module, inputs: tuple[Any, ...]) -> bool | str:
    """True where both modes were seen to compute the same but for dropout, a line where they surely do not, False where
    it can't be seen so. Leaves the model as it was."""
    numbers: dict[Any, int] = {}
    with modes_put_back(model), fake_stand_ins(model, inputs, always=True) as arguments, quiet(), guarded():
        named = {f"given {i}": x for i, x in enumerate(arguments)}
        named |= dict([*model.named_parameters(), *model.named_buffers()])
        keys = []
        try:
            for training in (True, False):
                set_mode(model, training)
                numbering = _WithoutDropout(numbers, named, training)
                with attributes_put_back(model), hooks_put_back(model), numbering:
                    results = leaves(model(*arguments))
                keys.append([numbering.key(x) for x in results])
        except (Exception, SystemExit):  # of the model's own code, or a question for values
            return False
    return keys[0] == keys[1] or numbering.written_through


class _WithoutDropout(CallNumbers):
    """Call numbers of one run, in training or not, without its dropout."""

    def __init__(self, numbers: dict[Any, int], named: Mapping[str, Tensor], training: bool) -> None:
        super().__init__(numbers, named)
        self.training = training
        self.handed_on: set[int] = set()  # storages that are operand and result of a dropout at once
        self.written_through = ""  # the line that wrote to one: to both

    def passes(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        return _passes(func, args, options, self.training)

    def compared(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _as_compared(func, args, options, self.training)

    def passed(self, func: Any, operand: Tensor, result: Any) -> None:
        super().passed(func, operand, result)
        if func in _DROPS:
            self.handed_on |= {storage(x) for x in tree_leaves(result)} & {storage(operand)}

    def wrote(self, tensor: Tensor) -> None:
        if storage(tensor) in self.handed_on:
            self.written_through = self.written_through or here()


def _passes(func: Any, args: tuple[Any, ...], options: dict[str, Any], training: bool) -> bool:
    """Has it the values of its operand? So dropout has when the model is evaluated."""
    if func is Tensor.contiguous:  # a copy or none, by the kernel before
        return True
    if func not in _DROPS:
        return False
    arguments = dict(zip(("input", "p", "training"), args, strict=False)) | options
    trains = arguments.get("training", arguments.get("train", True))
    return training or not trains or arguments.get("p", 0.5) == 0


def _as_compared(func: Any, args: tuple[Any, ...], options: dict[str, Any], training: bool) -> Any:
    """The arguments, without the dropout that only training has."""
    if func in _RECURRENT and len(args) > _TRAINS and (training or args[_RATE] == 0):
        args = (*args[:_TRAINS], False, *args[_TRAINS + 1 :])
    if func is F.scaled_dot_product_attention and training:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        options = options | ({"dropout_p": 0.0} if "dropout_p" in options else {})
    return [list(args), options]
