"""The calls of torch that one run of a forward makes, numbered: what is computed alike has one number in all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class CallNumbers(TorchFunctionMode):
    """Call numbers of one run. `numbers`: key -> number, shared by all runs. `named`: tensors that the run is given."""

    def __init__(self, numbers: dict[Any, int], named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.numbers = numbers
        self.tensors: dict[int, tuple[Tensor, int]] = {}  # alive, so that no other gets its id
        self.writes: dict[int, int] = {}  # storage -> the last write to it
        for name, tensor in named.items():
            self._note(tensor, ("named", name))

    def called(self, number: int) -> None:
        """Note that a call with this number was made."""

    def wrote(self, tensor: Tensor) -> None:
        """Note that the last call wrote to `tensor`."""

    def passes(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Does the call hand on its first operand?"""
        return False

    def passed(self, func: Any, operand: Tensor, result: Any) -> None:
        """Note that the call handed on its operand: its result has the operand's number."""
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and id(x) not in self.tensors:
                self.tensors[id(x)] = x, self.tensors[id(operand)][1]
                self.writes[storage(x)] = self.writes.get(storage(operand), -1)

    def compared(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Arguments of the call, without those in which two runs may differ."""
        return [list(args), options]

    def _number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _note(self, tensor: Tensor, key: Any) -> None:
        self.tensors[id(tensor)] = tensor, self._number(key)

    def key(self, value: Any) -> Any:
        """Key that is equal for what is computed alike."""
        if isinstance(value, Tensor):
            if id(value) not in self.tensors:  # made out of sight: itself alone
                self._note(value, ("object", id(value)))
            return self.tensors[id(value)][1], self.writes.get(storage(value), -1)
        if isinstance(value, list | tuple):
            return (type(value).__name__, *map(self.key, value))
        if isinstance(value, dict):
            return ("dict", *((name, self.key(item)) for name, item in value.items()))
        if isinstance(value, slice):
            return ("slice", self.key(value.start), self.key(value.stop), self.key(value.step))
        if isinstance(value, np.ndarray):
            return "array", value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, Number) and value != value:  # NaN, which equals nothing
            return type(value), "nan"
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
        if self.passes(func, args, options):
            result = func(*args, **options)
            self.passed(func, operands[0], result)
            return result
        before = [(x, x._version) for x in operands]
        key = (func, *self.key(self.compared(func, args, options)))
        result = func(*args, **options)
        self.called(self._number(key))
        created = [x for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in self.tensors]
        for position, x in enumerate(created):
            self._note(x, (*key, position))
        for position, (x, version) in enumerate(before):
            if x._version != version:
                self.writes[storage(x)] = self._number((*key, "written", position))
                self.wrote(x)
        return result


def storage(x: Tensor) -> int:
    """Key that is equal for tensors that share their memory."""
    return int(x.untyped_storage()._cdata)
