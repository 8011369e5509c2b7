"""Functions that return one constant, and attributes that hold one, whoever sets them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from autoshard.emit.pruning.constant_folding import GIVEN, UNKNOWN, Empty, Known, value_of
from autoshard.emit.pruning.source_edits import parsed, walk


@lru_cache(maxsize=1024)
def constant_functions(text: str) -> tuple[tuple[str, Any], ...]:
    """Functions of a module that return one constant, or their argument, and do nothing else."""
    functions = [node for node in parsed(text).tree.body if isinstance(node, ast.FunctionDef)]
    return tuple((node.name, value) for node in functions if (value := _constant_function(node)) is not UNKNOWN)


def _constant_function(node: ast.FunctionDef) -> Any:
    """Constant that a function returns if it does nothing else, or UNKNOWN."""
    body = (
        node.body[1:]
        if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        else node.body
    )
    if node.decorator_list or len(body) > 1 or any(isinstance(part, ast.Yield | ast.YieldFrom) for part in walk(node)):
        return UNKNOWN
    if not body or isinstance(body[0], ast.Pass):
        return None
    if isinstance(body[0], ast.Return):
        value = None if body[0].value is None else value_of(body[0].value, Known())
        if isinstance(body[0].value, ast.Name) and [arg.arg for arg in node.args.args] == [body[0].value.id]:
            return GIVEN
        return value if value is None or isinstance(value, bool | Empty) else UNKNOWN
    return UNKNOWN


def constant_attributes(texts: Iterable[str]) -> dict[str, Any]:
    """Attributes that hold None, False or True, whoever sets them: of objects of classes without bases."""
    values: dict[str, set[Any]] = {}
    owned: set[str] = set()
    for stored, of_classes in map(_attributes, texts):
        for name, value in stored:
            values.setdefault(name, set()).add(value)
        owned |= of_classes
    return {
        name: next(iter(constants))
        for name, constants in values.items()
        if name in owned and UNKNOWN not in constants and len(constants) == 1
    }


@lru_cache(maxsize=1024)
def _attributes(text: str) -> tuple[frozenset[tuple[str, Any]], frozenset[str]]:
    """Attributes that a module stores, with values, and the names of those that its classes without bases set."""
    source = parsed(text)
    stored, owned = {*_stored(source.nodes)}, set[str]()
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef):
            declared = {name for part in node.body for name in _declared(part)}
            stored |= {(name, UNKNOWN) for name in declared}
            owned |= {name for name, _ in _stored(walk(node))} - declared if not node.bases else set()
    return frozenset(stored), frozenset(owned)


def _declared(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name) | ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
            yield name


def _stored(nodes: list[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Attributes and what is assigned to them, where that is None, False or True; else UNKNOWN."""
    known: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part, value in _pairs(target, node.value):
                    if isinstance(part, ast.Attribute):
                        known.add(part)
                        constant = value_of(value, Known())
                        yield part.attr, constant if constant is None or isinstance(constant, bool) else UNKNOWN
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node not in known:
            yield node.attr, UNKNOWN
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            match node.args:
                case [_, ast.Constant(str(name)), _]:
                    yield name, UNKNOWN


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Tuple):
        same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        values = value.elts if same and isinstance(value, ast.Tuple) else [None] * len(target.elts)
        yield from zip(target.elts, values, strict=True)
    else:
        yield target, value
