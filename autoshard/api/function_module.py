"""A function as a module that can be captured: what it refers to comes in as arguments, too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from autoshard.errors import UsageError


class FunctionModule(nn.Module):
    """Calls `fn` on (args, kwargs, parameters), the latter in the place of those of the modules that it refers to."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.modules_of = fn, list(_modules_of(fn))  # in a list: their parameters come as inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionModule:
        return FunctionModule(self.fn)  # a copied function would still refer to the same modules

    def referred(self) -> dict[str, Tensor]:
        """The parameters that `fn` uses without being given them, by name."""
        found: dict[str, Tensor] = {}
        for prefix, module in self.modules_of:
            for name, buffer in module.named_buffers():
                what = (
                    f"the function refers to {type(module).__name__}, whose buffer {name} has {buffer.numel()} numbers"
                )
                raise UsageError(what, "shard that module instead of a function")
            found |= {f"{prefix}{name}": parameter for name, parameter in module.named_parameters()}
        return found

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Mapping[str, Tensor]) -> Any:
        with contextlib.ExitStack() as stack:
            for prefix, module in self.modules_of:
                own = {name: parameters[f"{prefix}{name}"] for name, _ in module.named_parameters()}
                stack.enter_context(_reparametrize_module(module, own))
            return self.fn(*args, **kwargs)


def _modules_of(fn: Callable[..., Any]) -> Iterator[tuple[str, nn.Module]]:
    """(prefix of the names, module): what `fn` is bound to, closes over, or reads among the globals."""
    if isinstance(fn, functools.partial):
        yield from _modules_of(fn.func)
        given = {**{f"argument{i}": x for i, x in enumerate(fn.args)}, **fn.keywords}
        yield from ((f"{name}.", value) for name, value in given.items() if isinstance(value, nn.Module))
        return
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        yield "", owner
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    cells = zip(code.co_freevars, getattr(fn, "__closure__", None) or (), strict=True)
    named = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    named |= {name: fn.__globals__[name] for name in code.co_names if name in getattr(fn, "__globals__", {})}
    seen = {id(owner)}
    for name, value in named.items():
        if isinstance(value, nn.Module) and id(value) not in seen and any(True for _ in value.parameters()):
            seen.add(id(value))
            yield ("" if name == "self" else f"{name}."), value


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
