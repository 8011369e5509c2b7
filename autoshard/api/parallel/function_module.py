"""A function as a module that can be captured: what it refers to comes in as arguments, too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from autoshard.errors import UsageError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class FunctionModule(nn.Module):
    """Calls `fn` on (args, kwargs, tensors), the latter in the place of those that it refers to."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.modules_of = fn, list(_modules_of(fn))  # in a list: their parameters come as inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionModule:
        return FunctionModule(self.fn)  # a copied function would still refer to the same modules

    def referred(self) -> dict[str, Tensor]:
        """The parameters and other tensors that `fn` uses without being given them, by name."""
        tensors: dict[str, Tensor] = {}
        for prefix, module in self.modules_of:
            for name, buffer in module.named_buffers():
                what = (
                    f"the function refers to {type(module).__name__} and its buffer {name} ({buffer.numel()} numbers)"
                )
                raise UsageError(what, "shard that module instead of a function")
            tensors |= {f"{prefix}{name}": parameter for name, parameter in module.named_parameters()}
        direct = {name: value for name, value in _values_of(self.fn).items() if isinstance(value, Tensor)}
        return tensors | direct

    def constants(self) -> tuple[tuple[str, Any], ...]:
        """The numbers and texts that `fn` refers to: with others it computes something else."""
        return tuple((name, value) for name, value in _values_of(self.fn).items() if isinstance(value, _PLAIN))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        with contextlib.ExitStack() as stack:
            for prefix, module in self.modules_of:
                parameters = {name: tensors[f"{prefix}{name}"] for name, _ in module.named_parameters()}
                stack.enter_context(_reparametrize_module(module, parameters))
            stack.enter_context(_referring(self.fn, tensors))
            return self.fn(*args, **kwargs)


def _modules_of(fn: Callable[..., Any]) -> Iterator[tuple[str, nn.Module]]:
    """(prefix of the names, module): what `fn` is bound to, closes over, or reads among the globals."""
    if isinstance(fn, functools.partial):
        yield from _modules_of(fn.func)
        bound = {**{f"argument{i}": x for i, x in enumerate(fn.args)}, **fn.keywords}
        yield from ((f"{name}.", value) for name, value in bound.items() if isinstance(value, nn.Module))
        return
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        yield "", owner
    seen = {id(owner)}
    for name, value in _values_of(fn).items():
        if isinstance(value, nn.Module) and id(value) not in seen and any(True for _ in value.parameters()):
            seen.add(id(value))
            yield ("" if name == "self" else f"{name}."), value


def _values_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """What a Python function closes over or reads among the globals, by name."""
    func = _function(fn)
    if func is None:
        return {}
    cells = zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
    named = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    return {name: func.__globals__[name] for name in func.__code__.co_names if name in func.__globals__} | named


def _function(fn: Callable[..., Any]) -> FunctionType | None:
    fn = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__func__", fn)
    return fn if isinstance(fn, FunctionType) else None


@contextlib.contextmanager
def _referring(fn: Callable[..., Any], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """While `fn` refers to these tensors instead of its own."""
    func = _function(fn)
    before = {name: value for name, value in _values_of(fn).items() if isinstance(value, Tensor)}
    if func is None or not before:
        yield
        return
    cells = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))

    def put(values: Mapping[str, Tensor]) -> None:
        for name in before:
            if name in cells:
                cells[name].cell_contents = values[name]
            else:
                func.__globals__[name] = values[name]

    put(tensors)
    try:
        yield
    finally:
        put(before)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
