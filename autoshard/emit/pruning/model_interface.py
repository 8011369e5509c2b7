"""Interfaces of the files of a model, as the files around them see it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autoshard.emit.pruning.call_sites import call_sites
from autoshard.emit.pruning.constant_folding import Known, value_of
from autoshard.emit.pruning.module_table import ModuleTable, Name, defined, module_table
from autoshard.emit.pruning.source_edits import parsed, walk

VARIED = frozenset({"PLAN", "DEVICES_PER_NODE"})  # constants that decide nothing, of another value in each package


@dataclass(frozen=True)
class ModelInterface:
    """Interface of a file of the model: its constants, what it imports, and its calls, as code."""

    name: str
    constants: tuple[tuple[str, Any], ...]
    imported: tuple[Name, ...]
    calls: str


def model_interfaces(files: Mapping[str, str], models: Mapping[str, str]) -> tuple[ModelInterface, ...]:
    """Interface of each of `models`, which are used with `files`; both by name."""
    methods = _method_names(tuple(text for name, text in sorted(files.items()) if name.endswith(".py")))
    return tuple(
        ModelInterface(name, _constants(text), _imported(name, text), _calls(text, methods))
        for name, text in sorted(models.items())
    )


_Value = bool | int | str | None | tuple[Any, ...]


@lru_cache(maxsize=256)
def _constants(text: str) -> tuple[tuple[str, _Value], ...]:
    """Module-level constants: short ones with their value, others as UNKNOWN."""
    constants: list[tuple[str, Any]] = []
    for node in parsed(text).tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = [name for name in defined(node) if name.isupper() and name not in VARIED]
            value = value_of(node.value, Known())
            pairs = zip(
                names, value if len(names) > 1 and isinstance(value, tuple) else [value] * len(names), strict=True
            )
            constants += pairs
    return tuple(constants)


@lru_cache(maxsize=256)
def _imported(name: str, text: str) -> tuple[Name, ...]:
    """Names that a file of the model imports from others."""
    table = module_table(name, text)
    inner = {
        imported
        for references in (*(d.references for d in table.definitions), *table.effects)
        for imported in references.imported
    }
    return tuple(sorted({*table.imports.values(), *inner}))


@lru_cache(maxsize=256)
def _calls(text: str, methods: frozenset[str]) -> str:
    """The calls of a file that may be of the package's functions or methods, each once, with no more of their arguments
    than whether these are constants."""
    source = parsed(text)
    table = module_table("", text)
    lines = set()
    called = {node.func for node in walk(source.tree) if isinstance(node, ast.Call)}
    for node in walk(source.tree):
        if isinstance(node, ast.Call) and (name := _called(node.func, table, methods)):
            arguments = ["*_" if isinstance(argument, ast.Starred) else _word(argument) for argument in node.args]
            arguments += [f"{keyword.arg}={_word(keyword.value)}" for keyword in node.keywords]
            lines.add(f"{name}({', '.join(arguments)})")
        elif isinstance(node, ast.Attribute) and node.attr in methods and node not in called:
            lines.add(f"_.{node.attr}")
    imports = [source.segment(stmt) for stmt in source.tree.body if isinstance(stmt, ast.ImportFrom)]
    return "\n".join([*imports, *sorted(lines)]) + "\n"


@lru_cache(maxsize=4)
def _method_names(texts: tuple[str, ...]) -> frozenset[str]:
    """The names of all methods."""
    return frozenset(function.name.partition(".")[2] for text in texts for function in call_sites(text).functions)


def _called(node: ast.expr, table: ModuleTable, methods: frozenset[str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"_.{node.attr}" if node.attr in methods else ""
    return node.id if isinstance(node, ast.Name) and node.id in table.imports else ""


def _word(node: ast.expr) -> str:
    return repr(node.value) if isinstance(node, ast.Constant) and node.value in (None, True, False) else "_"


@lru_cache(maxsize=256)
def read_of_model(text: str) -> frozenset[str]:
    """Names and attributes that a file of the model reads, its own or another's."""
    nodes = [node for node in walk(parsed(text).tree) if isinstance(node, ast.Name | ast.Attribute)]
    return frozenset(
        node.id if isinstance(node, ast.Name) else node.attr for node in nodes if isinstance(node.ctx, ast.Load)
    )
