"""Results of expensive operators, kept for the second forward of a block that backward computes again.

As torch's selective checkpointing, but for what a block itself writes over (the gates of an LSTM on the CPU, products
that torch adds to in place): that is no longer what the product gave, so it is computed again.
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
        """A compiled part of the block decides itself what it keeps."""
        return True


class KeepingProducts(_OnOperators):
    """Around the first forward. `found`: per operator, what each of its calls gave, None where that is not kept."""

    def __init__(self, keeps: Keeps) -> None:
        super().__init__()
        self.keeps, self.found = keeps, dict[Any, list[Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        kept = self.keeps(func)
        if kept or func in self.found:
            self.found.setdefault(func, []).append(_noted(made) if kept else None)
        return made

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for calls in self.found.values():
            calls[:] = [None if call is not None and _is_written(call) else call for call in calls]


class FindingProducts(_OnOperators):
    """Around the second forward: what was kept, each once."""

    def __init__(self, kept: KeepingProducts) -> None:
        super().__init__()
        self.kept, self.met = kept, dict[Any, int]()

    def __enter__(self) -> Any:
        self.met.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls = self.kept.found.get(func)
        if calls is None:
            return func(*args, **(kwargs or {}))
        place = self.met[func] = self.met.get(func, -1) + 1
        found, calls[place] = calls[place], None
        if found is None:
            return func(*args, **(kwargs or {}))
        return tree_map_only(_Noted, lambda one: unchanged(one.x, one.version), found)


class _Noted:
    def __init__(self, x: Tensor) -> None:
        # Autograd would hang on the result itself; its version is also that of what is detached here.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.x = x.detach()
        self.version = self.x._version


def _noted(made: Any) -> Any:
    return tree_map_only(Tensor, _Noted, made)


def _is_written(call: Any) -> bool:
    return any(isinstance(one, _Noted) and one.x._version != one.version for one in tree_leaves(call))
