"""Results of expensive operators, kept for the second forward of a block that backward recomputes.

Works like torch's selective checkpointing, except for what a block itself overwrites (the gates of an LSTM on the CPU,
products that torch adds to in place): that is no longer the operator's result, so it is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .weights import unchanged

Keeps = Callable[[Any], bool]  # asked of each operator in turn, by forward alone


class _OnOperators(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a compiled part of the block decides itself what it keeps."""
        return True


class KeepingProducts(_OnOperators):
    """Mode of the first forward. `results`: per operator, the result of each of its calls, None if it is not kept."""

    def __init__(self, keeps: Keeps) -> None:
        super().__init__()
        self.keeps, self.results = keeps, dict[Any, list[Any]]()
        self.places: dict[int, tuple[Any, int]] = {}  # address of a kept storage -> the call that made it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for written in _written(func, args, kwargs):
            target, place = self.places.pop(written.untyped_storage().data_ptr(), (None, 0))
            if target is not None:
                self.results[target][place] = None
        keep, calls = self.keeps(func), self.results.setdefault(func, [])
        calls.append(tree_map_only(Tensor, _Noted, result) if keep else None)
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)] if keep else ()
        self.places |= {x.untyped_storage().data_ptr(): (func, len(calls) - 1) for x in tensors}
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that an operator writes into. Views that split off "unsafely" have separate versions."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    names = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return [x for x in tree_leaves([arguments.get(name) for name in names]) if isinstance(x, Tensor)]


class FindingProducts(_OnOperators):
    """Mode of the second forward: finds the kept results, each once."""

    def __init__(self, keeper: KeepingProducts) -> None:
        super().__init__()
        self.keeper, self.met = keeper, dict[Any, int]()

    def __enter__(self) -> Any:
        self.met.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        saved, calls = None, self.keeper.results.get(func)
        if calls is not None:
            place = self.met[func] = self.met.get(func, -1) + 1
            if place < len(calls):  # views, say, of what a collective gave are made in the second forward alone
                saved, calls[place] = calls[place], None
        if saved is None:
            return func(*args, **(kwargs or {}))
        return tree_map_only(_Noted, lambda one: unchanged(one.x, one.version), saved)


class _Noted:
    def __init__(self, x: Tensor) -> None:
        # Autograd would hang on the result itself; its version is also that of what is detached here.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.x = x.detach()
        self.version = self.x._version
