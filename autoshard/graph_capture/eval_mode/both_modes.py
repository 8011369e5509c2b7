"""Whether a model in evaluation is its training forward without dropout: both run on tensors without values, and every
result is numbered by the function that made it and the numbers that went in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autoshard.graph_capture.tracing.call_caches import attributes_put_back
from autoshard.graph_capture.tracing.exporting import fake_stand_ins, quiet
from autoshard.graph_capture.tracing.python_state import hooks_put_back
from autoshard.graph_capture.tracing.source_lines import here
from autoshard.graph_capture.tracing.unchanged_model import guarded

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
    made: dict[Any, int] = {}
    modes = [(module, module.training) for module in model.modules()]
    with fake_stand_ins(model, inputs, always=True) as arguments, quiet(), guarded():
        named = {f"given {i}": x for i, x in enumerate(arguments)}
        named |= dict([*model.named_parameters(), *model.named_buffers()])
        found = []
        try:
            for training in (True, False):
                model.train(training)
                numbering = _Numbering(made, named, training)
                with attributes_put_back(model), hooks_put_back(model), numbering:
                    results = tree_leaves(model(*arguments))
                found.append([numbering.key(x) for x in results])
        except (Exception, SystemExit):  # of the model's own code, or a question for values
            return False
        finally:
            for module, mode in modes:
                module.training = mode
    return found[0] == found[1] or numbering.written_through


class _Numbering(TorchFunctionMode):
    """Of one run. `made`: the number of what is made so, of all runs."""

    def __init__(self, made: dict[Any, int], named: Mapping[str, Tensor], training: bool) -> None:
        super().__init__()
        self.made, self.training = made, training
        self.tensors: dict[int, tuple[Tensor, int]] = {}  # alive, so that no other gets its id
        self.writes: dict[int, int] = {}  # storage -> the last write to it
        self.handed_on: set[int] = set()  # storages that are operand and result of a dropout at once
        self.written_through = ""  # the line that wrote to one: to both
        for name, tensor in named.items():
            self._note(tensor, ("named", name))

    def _number(self, key: Any) -> int:
        return self.made.setdefault(key, len(self.made))

    def _note(self, tensor: Tensor, key: Any) -> None:
        self.tensors[id(tensor)] = tensor, self._number(key)

    def key(self, value: Any) -> Any:
        """Equal for what is computed alike."""
        if isinstance(value, Tensor):
            if id(value) not in self.tensors:  # made out of sight: itself alone
                self._note(value, ("object", id(value)))
            return self.tensors[id(value)][1], self.writes.get(_storage(value), -1)
        if isinstance(value, list | tuple):
            return (type(value).__name__, *map(self.key, value))
        if isinstance(value, dict):
            return ("dict", *((name, self.key(item)) for name, item in value.items()))
        if isinstance(value, slice):
            return ("slice", self.key(value.start), self.key(value.stop), self.key(value.step))
        try:
            hash(value)
        except TypeError:
            return ("object", id(value))
        return type(value), value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        operands = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        before = [(x, x._version) for x in operands]
        key = None
        if not (passes := _passes(func, args, options, self.training)):
            key = (func, *self.key(_as_compared(func, args, options, self.training)))
        result = func(*args, **options)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in self.tensors]
        if passes:
            for x in made:
                self.tensors[id(x)] = x, self.tensors[id(operands[0])][1]
                self.writes[_storage(x)] = self.writes.get(_storage(operands[0]), -1)
            self.handed_on |= {_storage(x) for x in tree_leaves(result) if func in _DROPS} & {_storage(operands[0])}
            return result
        for position, x in enumerate(made):
            self._note(x, (*(key or ()), position))
        for position, (x, version) in enumerate(before):
            if x._version != version:
                self.writes[_storage(x)] = self._number((*(key or ()), "written", position))
                if _storage(x) in self.handed_on:
                    self.written_through = self.written_through or here()
        return result


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _passes(func: Any, args: tuple[Any, ...], options: dict[str, Any], training: bool) -> bool:
    """Has it the values of its operand? So dropout has when the model is evaluated."""
    if func is Tensor.contiguous:  # a copy or none, by the kernel before
        return True
    if func not in _DROPS:
        return False
    given = dict(zip(("input", "p", "training"), args, strict=False)) | options
    trains = given.get("training", given.get("train", True))
    return training or not trains or given.get("p", 0.5) == 0


def _as_compared(func: Any, args: tuple[Any, ...], options: dict[str, Any], training: bool) -> Any:
    """The arguments, without the dropout that only training has."""
    if func in _RECURRENT and len(args) > _TRAINS and (training or args[_RATE] == 0):
        args = (*args[:_TRAINS], False, *args[_TRAINS + 1 :])
    if func is F.scaled_dot_product_attention and training:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        options = options | ({"dropout_p": 0.0} if "dropout_p" in options else {})
    return [list(args), options]
