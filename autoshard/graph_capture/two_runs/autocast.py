"""Accelerators' torch.autocast on the CPU: the operators it casts there, and to what."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.autocast_mode import _cast
from torch.utils._pytree import tree_leaves

from autoshard.graph_capture.training.precision import HIGH, HIGH_UNLESS_TOLD, LOW, PRECISIONS, WIDEST

_KEY = torch._C.DispatchKey.AutocastCPU
Product = Callable[[str, Any, Any], Any]


@contextmanager
def autocast_as_planned(precision: str, product: Product | None = None) -> Iterator[None]:
    """Nothing for fp32. CPU's own autocast has other lists: they are replaced while this lasts. `product`: of an
    operator, its operands and these in low precision, what it gives in another way; None where in none."""
    low = PRECISIONS[precision]
    if not low:
        yield
        return
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")  # taken back below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for target, kernel in _kernels(getattr(torch, low), product):
                _replace(library, target.partition(".")[2], kernel)
        with torch.autocast("cpu", dtype=getattr(torch, low)):
            yield
    finally:
        library._destroy()


_Kernel = Callable[[Any, Any, Any], Any]  # operator, positional and keyword arguments


def _kernels(low: torch.dtype, product: Product | None) -> Iterator[tuple[str, _Kernel]]:
    yield from ((target, _low(target, low, product)) for target in sorted(LOW) if target.startswith("aten."))
    yield from ((target, _casting(torch.float32)) for target in sorted(HIGH) if target.startswith("aten."))
    yield from ((target, _unless_disabled) for target in sorted(HIGH_UNLESS_TOLD))
    yield from ((target, _widening) for target in sorted(WIDEST))


def _casting(dtype: torch.dtype) -> _Kernel:
    return lambda op, args, kwargs: op(*_cast(args, "cpu", dtype), **_cast(kwargs, "cpu", dtype))


def _low(target: str, dtype: torch.dtype, product: Product | None) -> _Kernel:
    def kernel(op: Any, args: Any, kwargs: Any) -> Any:
        lowered = _cast(args, "cpu", dtype), _cast(kwargs, "cpu", dtype)
        result = product(target, args, lowered[0]) if product else None
        return op(*lowered[0], **lowered[1]) if result is None else result

    return kernel


def _unless_disabled(op: Any, args: Any, kwargs: Any) -> Any:
    dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    return op(*args, **kwargs) if dtypes else _casting(torch.float32)(op, args, kwargs)


def _widening(op: Any, args: Any, kwargs: Any) -> Any:
    dtypes = {x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    return _casting(torch.float32)(op, args, kwargs) if torch.float32 in dtypes else op(*args, **kwargs)


def _replace(library: Any, name: str, kernel: _Kernel) -> None:
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        if any(argument.is_out for argument in op._schema.arguments):
            continue
        library.impl(name if overload == "default" else f"{name}.{overload}", _without_autocast(op, kernel))


def _without_autocast(op: Any, kernel: _Kernel) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(_KEY)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return kernel(op, args, kwargs)

    return run
