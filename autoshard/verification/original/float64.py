"""Runs any torch code wholly in float64, whatever casts and dtypes it names."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_WIDE = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
_REINTERPRETS = {torch.ops.aten.view.dtype}  # a dtype here names the bits, not a precision
_FROM_PYTHON_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_CAST_BY_NAME = {
    torch.float32: torch.Tensor.float, torch.float16: torch.Tensor.half, torch.bfloat16: torch.Tensor.bfloat16,
}  # fmt: skip


def widen(value: Any) -> Any:
    """`value` with every narrow floating dtype in it (in lists and mappings too) replaced by float64."""
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, Mapping):
        return {key: widen(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(widen(item) for item in value)
    return value


@cache
def _names_a_dtype(func: Any) -> bool:
    takes = any("dtype" in argument.name for argument in func._schema.arguments)
    return (takes and func not in _REINTERPRETS) or func is torch.ops.aten.lift_fresh.default


class _WidenOperators(TorchDispatchMode):
    """Widens operators below autograd, where the casts made in C++ are visible too, in forward and backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call is wrapped once more, which takes longer than most operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped_mm(*args, **(kwargs or {}))
        if not _names_a_dtype(func):
            return func(*args, **(kwargs or {}))
        result = func(*widen(args), **widen(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            return result.to(_WIDE.get(result.dtype, result.dtype))
        return result


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Grouped matrix product in float64, which the kernel lacks: rows of `left` in groups that end at `offs`, each
    times its matrix of `right`; if both are matrices, a product for each group of the summed dim."""
    ends = offs.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if left.dim() == right.dim() == 2:
        return torch.stack([left[:, start:stop] @ right[start:stop] for start, stop in groups])
    products = [left[start:stop] @ matrix for (start, stop), matrix in zip(groups, right, strict=True)]
    return torch.cat([*products, left.new_zeros((left.shape[0] - ends[-1], right.shape[-1]))])


class _WidenData(TorchFunctionMode):
    """Numbers written in the code become tensors of the model's own dtype before any operator runs: only visible here.

    A capture holds them rounded to that dtype, so they are rounded here too, and then widened. `literal` is the dtype
    if they follow the tensor next to them. A cast to it makes no copy: a write in place into its result is seen in its
    operand, as it is in the model.
    """

    def __init__(self, literal: torch.dtype, aliases: bool = True) -> None:
        super().__init__()
        self.literal, self.aliases = literal, aliases

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__setitem__ and isinstance(args[2], float):
            return func(*args[:2], _rounded(torch.tensor(args[2]), self.literal).item())
        if self.aliases and func is _CAST_BY_NAME.get(self.literal):
            return torch.Tensor.double(*args, **kwargs)
        if self.aliases and func in (torch.Tensor.to, torch.Tensor.type):
            return func(*map(self._cast, args), **{key: self._cast(value) for key, value in kwargs.items()})
        if func not in _FROM_PYTHON_DATA:
            return func(*args, **kwargs)
        tensor = func(*args, **widen(kwargs))
        data = args[1] if func is torch.Tensor.new_tensor else args[0] if args else None
        if not isinstance(data, bool | int | float | complex | list | tuple) or tensor.dtype not in _NARROW:
            return tensor
        return _rounded(tensor, self._unwidened_dtype(func, kwargs.get("dtype"), tensor.dtype))

    def _cast(self, value: Any) -> Any:
        return torch.float64 if value is self.literal else value

    def _unwidened_dtype(self, func: Any, requested: torch.dtype | None, wide: torch.dtype) -> torch.dtype:
        """Dtype without widening. float64 is what `dtype=x.dtype` gives here."""
        if requested is not None and requested not in _NARROW:
            return requested
        follows = requested is not None or func is torch.Tensor.new_tensor
        return self.literal if follows and wide == torch.float64 else _NARROW[wide]


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _WIDE:
        return tensor
    with torch.no_grad(), _disable_current_modes():
        return tensor.to(dtype).to(_WIDE[dtype]).requires_grad_(tensor.requires_grad)


class _DefaultDtype:
    """Sets torch's default dtype, which is one per process, to float64 while any thread is inside."""

    def __init__(self) -> None:
        self.lock, self.users, self.before = threading.Lock(), 0, torch.float32

    def enter(self) -> None:
        with self.lock:
            if self.users == 0:
                self.before = torch.get_default_dtype()
                torch.set_default_dtype(torch.float64)
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                torch.set_default_dtype(self.before)


_DEFAULT = _DefaultDtype()


@contextmanager
def exact_precision(literal: torch.dtype = torch.float32, aliases: bool = True) -> Iterator[None]:
    """Everything run inside, by this thread, is float64: floating casts, creations and `dtype` arguments are rewritten.

    `literal`: dtype that the model computes in if the code names none. `aliases`: a cast to it is no copy. Under
    autocast this is unknown: the cast tensor may be in another dtype there.

    Tensors made before must be widened by the caller (`widened`, `module.double()`). Modes belong to a thread: enter it
    in each one. Backward on CPU runs in the calling thread, so it is covered.
    """
    _DEFAULT.enter()
    try:
        with _WidenData(literal, aliases), _WidenOperators():
            yield
    finally:
        _DEFAULT.leave()


@contextmanager
def limits_of(literal: torch.dtype) -> Iterator[None]:
    """Makes `torch.finfo` of float64 return that of `literal`, which a capture holds, in this thread."""
    finfo, thread = torch.finfo, threading.get_ident()

    def limits(dtype: torch.dtype | None = None) -> torch.finfo:
        wide = (dtype or torch.get_default_dtype()) == torch.float64 and threading.get_ident() == thread
        return finfo(literal if wide else dtype or torch.get_default_dtype())

    torch.finfo = limits
    try:
        yield
    finally:
        torch.finfo = finfo


def widened(tensors: Sequence[Any]) -> list[Any]:
    """Copies of the values, floating tensors in float64 (copies, so that two runs never share storage)."""
    return [t.detach().to(_WIDE.get(t.dtype, t.dtype)).clone() if isinstance(t, torch.Tensor) else t for t in tensors]


def literal_dtype(module: torch.nn.Module) -> torch.dtype:
    """Floating dtype that all the module's parameters have in common, else float32."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.dtype in _WIDE}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
