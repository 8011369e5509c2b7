"""Watches a model being built, to know how each parameter starts: ("normal", mean, std), ("uniform", low, high), …"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.graph_capture.constructor.call_recorder import CallRecorder, is_whole
from autoshard.graph_capture.constructor.strided import refuse_sparse
from autoshard.graph_capture.tracing.source_lines import here
from autoshard.ir.graph import RecipeCall

Init = tuple[str | float, ...]
_STARTS: dict[str, Callable[[dict[str, Any]], Init]] = {
    "normal_": lambda a: ("normal", float(a["mean"]), float(a["std"])),
    "uniform_": lambda a: ("uniform", float(a["from"]), float(a["to"])),
    "fill_": lambda a: ("constant", float(a["value"])) if isinstance(a["value"], int | float) else (),
    "zero_": lambda a: ("constant", 0.0),
    "zeros": lambda a: ("constant", 0.0),
    "zeros_like": lambda a: ("constant", 0.0),
    "ones": lambda a: ("constant", 1.0),
    "ones_like": lambda a: ("constant", 1.0),
    "full": lambda a: ("constant", float(a["fill_value"])),
    "full_like": lambda a: ("constant", float(a["fill_value"])),
    "randn": lambda a: ("normal", 0.0, 1.0),
    "randn_like": lambda a: ("normal", 0.0, 1.0),
    "rand": lambda a: ("uniform", 0.0, 1.0),
    "rand_like": lambda a: ("uniform", 0.0, 1.0),
}


class InitWatcher(TorchDispatchMode):
    """Remembers per storage the last whole-tensor initialisation; anything it does not understand makes it unknown.

    `recorder` has all calls, for what no name says; `partly` are storages that were changed in part afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        # The storage is kept alive, so that its id stays its own; copies have the number of the draw that they copy.
        self.known: dict[int, tuple[Any, Init, int]] = {}
        self.draws = count(1)
        self.partly: set[int] = set()
        self.recorder = CallRecorder()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            refuse_sparse(result, here())
        self.recorder.note(func, args, kwargs or {}, result)
        if isinstance(result, torch.Tensor):
            self._note(func, args, kwargs or {}, result)
        return result

    def __enter__(self) -> Any:
        """Record, too, what leaves no trace on meta (trunc_normal_, numbers given to torch.tensor)."""
        self.original = torch.nn.init._no_grad_trunc_normal_
        torch.nn.init._no_grad_trunc_normal_ = self._trunc_normal
        self.literals = _Literals(self)
        self.literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.literals.__exit__(*error)
        torch.nn.init._no_grad_trunc_normal_ = self.original

    def literal(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Note that `tensor` was made from these values, and has none itself."""
        self.recorder.note_values(tensor, values)
        if values.numel() == 1 and not values.is_complex():
            self.known[_storage(tensor)] = (tensor.untyped_storage(), ("constant", float(values)), 0)

    def _trunc_normal(self, tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        filled = self.original(tensor, mean, std, a, b, generator)
        init = ("trunc_normal", float(mean), float(std), float(a), float(b))
        self.recorder.forget(tensor)
        self.partly.discard(_storage(tensor))
        self.known[_storage(tensor)] = (tensor.untyped_storage(), init, next(self.draws))
        return filled

    def init_of(self, tensor: torch.Tensor) -> Init:
        """How `tensor` starts, () where that is not known."""
        return self.known.get(_storage(tensor), (None, (), 0))[1]

    def draw_of(self, tensor: torch.Tensor) -> object:
        """Equal for two tensors of one shape with the same random numbers; None for constants, or if not known."""
        _, init, draw = self.known.get(_storage(tensor), (None, (), 0))
        if init and _storage(tensor) not in self.partly:
            return (draw, tensor.stride()) if init[0] != "constant" and is_whole(tensor) else None
        numbers, reference = self.recorder.origin(tensor)
        return (tuple(numbers), reference) if numbers else None

    def calls(self, tensor: torch.Tensor) -> tuple[RecipeCall, ...]:
        """Calls that make `tensor`, if its initialisation has no name or a part starts otherwise; else ()."""
        if self.init_of(tensor) and _storage(tensor) not in self.partly:
            return ()
        return self.recorder.calls(tensor)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        schema = func._schema
        mutates = schema.is_mutable
        if not mutates and any(r.alias_info is not None for r in schema.returns):
            return  # a view: same storage, nothing new
        if mutates and not is_whole(result):
            self.partly.add(_storage(result))  # such as an embedding's padding row
            return
        name = func.overloadpacket.__name__
        arguments = {a.name: a.default_value for a in schema.arguments} | dict(
            zip((a.name for a in schema.arguments), args, strict=False)
        ) | kwargs  # fmt: skip
        start = _STARTS.get(name)
        before: tuple[Any, Init, int] = (None, (), 0)
        source = result
        if args and isinstance(args[0], torch.Tensor):
            source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
            before = before if _storage(source) in self.partly else self.known.get(_storage(source), before)
        init = start(arguments) if start else _changed(name.rstrip("_"), before[1], arguments)
        copied = name.rstrip("_") in _COPIES and is_whole(source) and source.stride() == result.stride()
        draw = before[2] if copied else next(self.draws)  # a part of a tensor, or its transpose, is no copy
        self.partly.discard(_storage(result))
        self.known[_storage(result)] = (result.untyped_storage(), init, draw)


_COPIES = ("copy", "clone", "detach", "_to_copy")
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)


class _Literals(TorchFunctionMode):
    """Tells the watcher the numbers of tensors that are made on meta from Python's."""

    def __init__(self, watcher: InitWatcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FROM_NUMBERS and result.is_meta and args and not isinstance(args[0], torch.Tensor):
            self.watcher.literal(result, torch.tensor(args[0], dtype=result.dtype, device="cpu"))
        return result


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed(name: str, before: Init, arguments: Mapping[str, Any]) -> Init:
    """The initialisation after one more operation on it, () where that has no name here."""
    if not before:
        return ()
    kind, *numbers = before
    values = [float(number) for number in numbers]
    if name in _COPIES:
        return before
    other = arguments.get("other")
    if name == "mul" and isinstance(other, int | float):
        return _scaled(str(kind), values, float(other))
    if name in ("add", "sub") and isinstance(other, int | float) and arguments.get("alpha", 1) == 1:
        return _shifted(str(kind), values, float(other) if name == "add" else -float(other))
    return ()


def _scaled(kind: str, values: list[float], factor: float) -> Init:
    if kind == "normal":
        return (kind, values[0] * factor, values[1] * abs(factor))
    scaled = [value * factor for value in values]
    return (kind, *sorted(scaled)) if kind in ("uniform", "constant") else ()


def _shifted(kind: str, values: list[float], offset: float) -> Init:
    if kind == "normal":
        return (kind, values[0] + offset, values[1])
    return (kind, *(value + offset for value in values)) if kind in ("uniform", "constant") else ()


def watch_library_init(model: torch.nn.Module, watcher: InitWatcher) -> None:
    """Runs the initialisation that transformers leaves out on meta: its models one by one, inner ones first. What the
    constructor copied before stays a copy."""
    firsts: dict[object, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for parameter in (p for p in model.parameters() if p.is_meta):
        if (draw := watcher.draw_of(parameter)) is not None:
            first = firsts.setdefault((draw, parameter.shape, parameter.dtype), parameter)
            copies += [(parameter, first)] if first is not parameter else []
    with watcher, torch.no_grad():
        for module in reversed(list(model.modules())):
            run = getattr(module, "initialize_weights", None)
            if callable(run) and hasattr(module, "_init_weights") and any(p.is_meta for p in module.parameters()):
                run()
        for parameter, first in copies:
            parameter.copy_(first)
