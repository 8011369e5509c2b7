"""Placement of a constructor's tensors: on meta; or only large ones on meta, if it reads values; or all on the CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard.graph_capture.tracing import LARGE_ELEMENTS
from autoshard.graph_capture.tracing.source_lines import is_visible

LARGE_ON_META = "large on meta"
# A constructor that needs more values than it finds has these.
WITH_MORE_VALUES = {"meta": LARGE_ON_META, LARGE_ON_META: "cpu"}


@contextlib.contextmanager
def placed(where: str) -> Iterator[Callable[[], bool]]:
    """Context that makes new tensors at `where`: "meta", "cpu" or `LARGE_ON_META`. Yields a test: did the model's code
    ask a tensor whether it has values? Then it builds another model without them."""
    if where == LARGE_ON_META:
        with _LargeOnMeta():
            yield lambda: False
        return
    with torch.device(where), _Questions() as questions:
        yield lambda: questions.is_meta_read and where == "meta"


def needs_values(error: BaseException) -> bool:
    """True if a constructor failed for something that a tensor on meta lacks."""
    return isinstance(error, NotImplementedError | RuntimeError | TypeError) and "meta" in str(error).lower()


class _Questions(TorchFunctionMode):
    """Notes `x.is_meta`."""

    is_meta_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and is_visible(sys._getframe(1).f_code.co_filename):
            self.is_meta_read = True
        return func(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__


class _LargeOnMeta(TorchFunctionMode):
    """Small tensors have values; those that are computed of a large one have none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in _device_constructors() and keywords.get("device") is None:
            large = func(*args, **{**keywords, "device": "meta"})
            return large if large.numel() > LARGE_ELEMENTS else func(*args, **keywords)
        try:
            return func(*args, **keywords)
        except (RuntimeError, NotImplementedError) as error:
            if not needs_values(error) or _writes(func, keywords) or not _is_mixed((args, keywords)):
                raise
            args, keywords = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, keywords))
            return func(*args, **keywords)


def _writes(func: Any, kwargs: Any) -> bool:
    """Does the call write in place? What it writes into a copy on meta would be lost."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__")
    return name.endswith("_") or kwargs.get("out") is not None


def _is_mixed(values: Any) -> bool:
    return len({x.device.type for x in tree_leaves(values) if isinstance(x, torch.Tensor)}) > 1
