"""Modules, tensors and numbers that a Python function uses without being given them.

Found in its closure, defaults, `functools.partial` arguments and the globals that its code names, in the object that it
is a method of, and in lists, dicts and plain objects among these. Of an object only attributes count that some code on
the way names: a counter that the function does not read is no reason to plan it again.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BY_NAME = frozenset({"getattr", "vars", "__dict__", "asdict"})  # read attributes that the code does not name


def references(fn: Callable[..., Any]) -> dict[str, Any]:
    """Path (`config.scale`, `layers.0`) -> module, tensor, array or plain value that `fn` refers to.

    A value that several paths reach stands under the first.
    """
    names = _names(fn)
    while True:
        walk = _ReferenceWalk(names, _globals(fn))
        for path, value in _roots(fn):
            walk.visit(path, value)
        if walk.names == names:
            return walk.values
        names = walk.names


def function_of(fn: Callable[..., Any]) -> FunctionType | None:
    """The Python function behind a partial, a method or a callable object; None for a built-in."""
    if isinstance(fn, functools.partial):
        return function_of(fn.func)
    function: Any = fn.__func__ if isinstance(fn, MethodType) else fn
    if not isinstance(function, FunctionType | nn.Module | type):
        function = type(function).__call__
    return function if isinstance(function, FunctionType) else None


def cells_of(function: FunctionType) -> dict[str, Any]:
    """Closure variables by name; those without a value yet are left out."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if _is_filled(cell)}


def named_values(function: FunctionType) -> dict[str, Any]:
    """Values of the closure, and of the globals that the code names."""
    scope = function.__globals__
    closed = {name: cell.cell_contents for name, cell in cells_of(function).items()}
    return {name: scope[name] for name in _global_names(function.__code__) if name in scope} | closed


class _ReferenceWalk:
    """`values` met so far, each once; `names` grows by those of functions and methods on the way."""

    def __init__(self, names: frozenset[str], scope: Mapping[str, Any]) -> None:
        self.names, self.scope = names, scope
        self.values: dict[str, Any] = {}
        self.seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no id is used twice

    def visit(self, path: str, value: Any) -> None:
        while path in self.values:  # another value's
            path += "'"
        if isinstance(value, PLAIN):
            self.values[path] = value
            return
        if id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if isinstance(value, nn.Module):
            self.values[path] = value
            self._module(path, value)
        elif isinstance(value, Tensor | np.ndarray | np.generic):
            self.values[path] = value
        elif isinstance(value, list | tuple | set | frozenset):
            for i, item in enumerate(value):
                self.visit(f"{path}.{i}", item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.visit(f"{path}.{key}", item)
        elif isinstance(value, FunctionType):
            self._function(path, value)
        elif not isinstance(value, ModuleType | type) or getattr(value, "__module__", "") == self.scope.get("__name__"):
            self._attributes(path, value)

    def _function(self, path: str, function: FunctionType) -> None:
        """A helper of the same file, or one that was made by a function: what it refers to counts, too."""
        if function.__globals__ is self.scope or function.__closure__:
            self.names |= _code_names(function.__code__)
            for name, value in {**_defaults(function), **named_values(function)}.items():
                self.visit(name if function.__globals__ is self.scope else f"{path}.{name}", value)

    def _attributes(self, path: str, value: Any) -> None:
        """Attributes that the code names, with those of its class; methods that it calls."""
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__ == "builtins" or kind.__module__.partition(".")[0] == "torch":
            return
        everything = {**vars(kind), **getattr(value, "__dict__", {})}
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        everything |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
        for name, item in everything.items():
            if name in self.names or (self.names & _BY_NAME and not name.startswith("__")):
                self.visit(f"{path}.{name}" if path else name, item)

    def _module(self, path: str, module: nn.Module) -> None:
        """Numbers on modules that their forwards name."""
        for name, part in module.named_modules():
            if type(part).__module__.startswith("torch."):
                continue
            code_names = _code_names(type(part).forward.__code__) if hasattr(type(part).forward, "__code__") else set()
            for key, value in vars(part).items():
                if key in code_names and isinstance(value, PLAIN) and key != "training":
                    self.values[".".join(filter(None, (path, name, key)))] = value


def _roots(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, functools.partial):
        yield from ((f"argument{i}", value) for i, value in enumerate(fn.args))
        yield from fn.keywords.items()
        yield from _roots(fn.func)
        return
    function = function_of(fn)
    owner = getattr(fn, "__self__", None if isinstance(fn, FunctionType) else fn)
    if owner is not None and not isinstance(owner, ModuleType):
        yield "", owner
    if function is not None:
        yield from {**_defaults(function), **named_values(function)}.items()


def _defaults(function: FunctionType) -> dict[str, Any]:
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return {**dict(zip(names[len(names) - len(values) :], values, strict=True)), **(function.__kwdefaults__ or {})}


def _names(fn: Callable[..., Any]) -> frozenset[str]:
    function = function_of(fn)
    return frozenset() if function is None else _code_names(function.__code__)


def _globals(fn: Callable[..., Any]) -> Mapping[str, Any]:
    function = function_of(fn)
    return {} if function is None else function.__globals__


@functools.lru_cache(maxsize=1024)
def _code_names(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes in the code, and in that of functions within it."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*map(_code_names, inner))


@functools.lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Names that the code, and that of functions within it, looks up among the globals."""
    read = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _global_names(part)]
    return tuple(dict.fromkeys([*read, *inner]))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
