"""Tensors that a module holds as plain attributes become buffers outside the state dict: they move and cast with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.source_lines import blame

_SHARED = "the parameter itself in the forward; an attribute would keep the value that it has now"


def keep_tensors(model: torch.nn.Module) -> None:
    """Make plain tensors buffers, in place. CaptureError for one on a parameter's memory, which a step would change."""
    owners = {_storage(parameter): path for path, parameter in model.named_parameters() if _is_plain(parameter)}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"the module {path or 'itself'} is scripted (torch.jit)", "the module that it was made from"
            )
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            module.sparse = False  # the same gradient, held densely: collectives and AdamW take no sparse ones
        rewritten = set(_written_by_hooks(module))
        for name, value in list(module.__dict__.items()):
            if type(value) is not torch.Tensor or value.grad_fn is not None or name in rewritten:
                continue
            if (owner := owners.get(_storage(value))) is not None:
                what = f"{path}.{name}" if path else name
                raise CaptureError(f"the attribute {what} is a view of the parameter {owner}", _SHARED)
            del module.__dict__[name]
            module.register_buffer(name, value.detach(), persistent=False)
        _pair_buffers(module)


def _pair_buffers(module: torch.nn.Module) -> None:
    """Complex buffers are stored as pairs of real numbers, and read as complex ones: a graph is real."""
    names = [name for name, value in module._buffers.items() if value is not None and value.is_complex()]
    for name in names:
        module._buffers[name] = torch.view_as_real(module._buffers[name].resolve_conj()).clone()
    if names:
        module.__class__ = _reading_pairs(type(module), tuple(names))


def complex_buffers(model: torch.nn.Module) -> frozenset[str]:
    """Names of those that `keep_tensors` stores as pairs."""
    named = model.named_buffers(remove_duplicate=False)
    return frozenset(name for name, value in named if value.is_complex())


def _reading_pairs(kind: type, names: tuple[str, ...]) -> Any:
    """A subclass of the same name whose attributes `names` are complex views of the buffers."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        pair = name in names and isinstance(value, torch.Tensor) and value.is_complex()
        super(subclass, self).__setattr__(name, torch.view_as_real(value) if pair else value)

    def reading(name: str) -> property:
        return property(lambda self: torch.view_as_complex(self._buffers[name]))

    getters = {name: reading(name) for name in names}
    subclass: Any = type(kind.__name__, (kind,), {**getters, "__setattr__": __setattr__, "__module__": kind.__module__})
    subclass.__qualname__ = kind.__qualname__
    return subclass


def materialise(model: torch.nn.Module, inputs: tuple[Any, ...], device: str) -> None:
    """Run the forward once, in place, so that lazy modules learn their sizes."""
    if all(_is_plain(value) for value in (*model.parameters(), *model.buffers())):
        return
    try:
        with torch.device(device), torch.no_grad():
            model(*inputs)
    except Exception as error:
        raise CaptureError(
            f"a lazy module can't learn its size from a run of the forward: {blame(error)}", "run it once before"
        ) from error


def hidden_tensors(model: torch.nn.Module) -> bool:
    """Are there tensors in lists, tuples or dicts among the attributes?"""
    return any(_holds(value) for module in model.modules() for name, value in module.__dict__.items() if name[0] != "_")


def _holds(value: Any, depth: int = 3) -> bool:
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return any(isinstance(item, torch.Tensor) or (depth > 0 and _holds(item, depth - 1)) for item in items)


def _is_plain(value: torch.Tensor) -> bool:
    return not isinstance(value, torch.nn.parameter.UninitializedTensorMixin)


def _storage(value: torch.Tensor) -> Any:
    return value.untyped_storage()._cdata if value.layout is torch.strided else id(value)


def _written_by_hooks(module: torch.nn.Module) -> Iterator[str]:
    """Attributes that a forward pre-hook recomputes each time, as spectral and weight norm and pruning do."""
    for hook in module._forward_pre_hooks.values():
        for key in ("name", "_tensor_name", "tensor_name"):
            if isinstance(attribute := getattr(hook, key, None), str):
                yield attribute
