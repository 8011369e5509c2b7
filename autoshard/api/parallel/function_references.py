"""Modules, tensors and numbers that a Python function uses without being given them.

Found in closures, defaults, `functools.partial` arguments, the globals that code names, the objects of methods, and in
lists, dicts, objects and files of the user's among these; in functions and methods that the code calls, too. Of an
object only attributes count that some code on the way names: a counter that nothing reads is no reason to plan again.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from autoshard.errors import UsageError

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BY_NAME = frozenset({"getattr", "vars", "__dict__", "asdict"})  # read attributes that the code does not name
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (*_PATHS, f"{Path(__file__).parents[2]}{os.sep}")  # files whose state is not followed; the last: autoshard
_WRAPPED = {staticmethod: "__func__", classmethod: "__func__", property: "fget", functools.cached_property: "func"}


def references(fn: Callable[..., Any]) -> dict[str, Any]:
    """Path (`config.scale`, `layers.0`) -> module, tensor, array or plain value that `fn` refers to.

    A value that several paths reach stands under the first. UsageError for a set of anything else, whose order differs
    between ranks.
    """
    function = function_of(fn)
    names = frozenset() if function is None else _code_names(function.__code__)
    while True:  # names that are met late may be of attributes passed before
        walk = _ReferenceWalk(names)
        walk.visit("", fn)
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
    """Values of the closure, and, outside of libraries, of the globals that the code names."""
    scope = {} if function.__code__.co_filename.startswith(_LIBRARIES) else function.__globals__
    closed = {name: cell.cell_contents for name, cell in cells_of(function).items()}
    return {name: scope[name] for name in _global_names(function.__code__) if name in scope} | closed


class _ReferenceWalk:
    """`values` met so far, each once; `names` grows by those of functions and methods on the way."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.values: dict[str, Any] = {}
        self.seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no id is used twice

    def visit(self, path: str, value: Any) -> None:
        if not isinstance(value, PLAIN):
            if id(value) in self.seen:
                return
            self.seen[id(value)] = value
        if isinstance(value, (*PLAIN, nn.Module, Tensor, np.ndarray, np.generic)):
            self._note(path, value)
        elif isinstance(value, set | frozenset):
            if not all(isinstance(item, PLAIN) for item in value):
                raise UsageError(
                    f"the function refers to the set {path}", "a list: a set has another order on each rank"
                )
            self._note(path, str(sorted(map(repr, value))))
        else:
            for name, part in self._parts(value).items():
                self.visit(".".join(filter(None, (path, name))), part)

    def _note(self, path: str, value: Any) -> None:
        while path in self.values:  # another value's
            path += "'"
        self.values[path] = value
        if isinstance(value, nn.Module):
            for name, part in value.named_modules():
                code = getattr(type(part).forward, "__code__", None)
                if code is not None and not code.co_filename.startswith(_LIBRARIES):
                    numbers = {key: x for key, x in vars(part).items() if key in _code_names(code)}
                    numbers = {key: x for key, x in numbers.items() if isinstance(x, PLAIN) and key != "training"}
                    self.values |= {".".join(filter(None, (path, name, key))): x for key, x in numbers.items()}

    def _parts(self, value: Any) -> dict[str, Any]:
        """Values that a value refers to, by name."""
        if isinstance(value, list | tuple):
            return {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping):
            return {str(key): item for key, item in value.items()}
        if isinstance(value, functools.partial):
            return {**{f"argument{i}": x for i, x in enumerate(value.args)}, **value.keywords, "": value.func}
        if isinstance(value, MethodType):
            return {"": value.__self__, "__func__": value.__func__}
        if type(value) in _WRAPPED:
            return {"": getattr(value, _WRAPPED[type(value)])}
        if isinstance(value, FunctionType):
            if not value.__code__.co_filename.startswith(_LIBRARIES):
                self.names |= _code_names(value.__code__)
            return {**_defaults(value), **named_values(value)}
        everything = _attributes(value)
        return {
            name: item
            for name, item in everything.items()
            if name in self.names or (self.names & _BY_NAME and not name.startswith("__"))
        }


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of a file, a class, or an object with those of its classes, but for libraries' files and classes."""
    if isinstance(value, ModuleType):
        return {} if (getattr(value, "__file__", None) or "").startswith(_LIBRARIES) else vars(value)
    bases = (value if isinstance(value, type) else type(value)).__mro__[::-1]
    bases = tuple(base for base in bases if not _is_library(base.__module__))
    inherited = {name: item for base in bases for name, item in vars(base).items()}
    slots = [name for base in bases for name in getattr(base, "__slots__", ())]
    held = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    return {**inherited, **{name: getattr(value, name) for name in slots if hasattr(value, name)}, **held}


@functools.lru_cache(maxsize=1024)
def _is_library(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (file is None or file.startswith(_LIBRARIES))


def _defaults(function: FunctionType) -> dict[str, Any]:
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return {**dict(zip(names[len(names) - len(values) :], values, strict=True)), **(function.__kwdefaults__ or {})}


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
