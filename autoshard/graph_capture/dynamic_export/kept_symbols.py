"""Keeps sizes symbolic in a trace where Python, or torch's own Python code, would make numbers of them."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._decomp import decompositions

_LOOPS = ("one_layer_rnn", "one_layer_lstm", "mkldnn_one_layer_lstm")  # over the steps of a sequence


@contextmanager
def keeping_symbols() -> Iterator[None]:
    """Within, `len(x)` of a tensor is `x.shape[0]`, and recurrent layers have any length."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(builtins, "len", _length))
        for name in _LOOPS:
            stack.enter_context(mock.patch.object(decompositions, name, _one_step(getattr(decompositions, name))))
        yield


def as_if_traced() -> AbstractContextManager[Any]:
    """Context in which `torch.jit.is_tracing()` is true: of two ways to compute the same, one for the size of the
    weights and one for any size, models of transformers then take the second."""
    return mock.patch.object(torch.jit, "is_tracing", lambda: True)


_USUAL = len


def _length(value: Any, /) -> Any:
    """`len` that takes symbols, which Python's does not."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else _USUAL(value)


def _one_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The shapes of `layer`, which a trace asks of it, by its first step: it is in the trace as an operator."""

    def shaped(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        steps = inputs.shape[0]
        if not isinstance(steps, torch.SymInt):
            return layer(inputs, *args, **kwargs)
        out, last = layer(inputs[:1], *args, **kwargs)
        return out.repeat(steps, *[1] * (out.dim() - 1)), last

    return shaped
