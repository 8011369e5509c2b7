"""A function as a module that can be captured: modules and tensors that it refers to become inputs, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from autoshard.api.parallel.function_references import PLAIN, cells_of, function_of, named_values, references
from autoshard.errors import UsageError


class FunctionModule(nn.Module):
    """Calls `fn` on (args, kwargs, tensors), the latter in place of the tensors that it refers to."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.modules_of = list(_modules_of(references(fn)))  # in a list: their parameters come as inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionModule:
        return FunctionModule(self.fn)  # a copied function would still refer to the same modules

    def referred(self) -> dict[str, Tensor]:
        """Parameters and other tensors that `fn` uses without being given them, by name."""
        parameters: dict[str, Tensor] = {}
        for prefix, module in self.modules_of:
            for name, buffer in module.named_buffers():
                what = (
                    f"the function refers to {type(module).__name__} and its buffer {name} ({buffer.numel()} numbers)"
                )
                raise UsageError(what, "shard that module instead of a function")
            parameters |= {f"{prefix}{name}": parameter for name, parameter in module.named_parameters()}
        return parameters | _tensors_of(self.fn)

    def constants(self) -> tuple[tuple[str, Any], ...]:
        """Values that the graph holds as constants: with others `fn` computes something else.

        A tensor within a list, a dict or an object counts by its identity and version, an array by its numbers.
        """
        direct = {id(x) for x in _tensors_of(self.fn).values()}
        return tuple((path, _constant(x)) for path, x in references(self.fn).items() if _is_constant(x, direct))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        with contextlib.ExitStack() as stack:
            for prefix, module in self.modules_of:
                parameters = {name: tensors[f"{prefix}{name}"] for name, _ in module.named_parameters()}
                stack.enter_context(_reparametrize_module(module, parameters))
            stack.enter_context(_referring(self.fn, tensors))
            return self.fn(*args, **kwargs)


def _is_constant(value: Any, direct: set[int]) -> bool:
    return not isinstance(value, nn.Module) and id(value) not in direct


@dataclass(frozen=True, eq=False)
class _SameTensor:
    """Equals the very tensor at this version; holding it keeps its address from another one."""

    tensor: Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameTensor) and (self.tensor is other.tensor and self.version == other.version)


def _constant(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return _SameTensor(value, value._version)
    return value.dtype.str, value.shape, value.tobytes()


def _modules_of(values: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """(prefix of the names, module with parameters), without those within one of the others."""
    modules = {path: x for path, x in values.items() if isinstance(x, nn.Module) and any(True for _ in x.parameters())}
    inner = {id(part) for x in modules.values() for part in x.modules() if part is not x}
    for path, module in modules.items():
        if id(module) not in inner:
            yield ("" if path in ("", "self") else f"{path}."), module


def _tensors_of(fn: Callable[..., Any]) -> dict[str, Tensor]:
    """Tensors that `fn` closes over or reads among the globals: those that `_referring` can replace."""
    function = function_of(fn)
    values = {} if function is None else named_values(function)
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@contextlib.contextmanager
def _referring(fn: Callable[..., Any], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """While `fn` refers to these tensors instead of its own."""
    function, before = function_of(fn), _tensors_of(fn)
    if function is None or not before:
        yield
        return
    cells = cells_of(function)

    def put(values: Mapping[str, Tensor]) -> None:
        for name in before:
            if name in cells:
                cells[name].cell_contents = values[name]
            else:
                function.__globals__[name] = values[name]

    put(tensors)
    try:
        yield
    finally:
        put(before)
