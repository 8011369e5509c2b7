"""Calls and parameters of a module, as propagation of constant arguments needs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autoshard.emit.pruning.source_edits import parsed, walk

Argument = ast.expr | None
# What wraps a function and calls it with the arguments that it is given.
_TRANSPARENT = frozenset({
    "contextlib.contextmanager", "torch.no_grad()", "torch.no_grad", "staticmethod", "classmethod", "functools.cache",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class Function:
    """A function or method of a module, by its qualified name; `bound`: its first parameter is not passed."""

    node: ast.FunctionDef
    name: str
    bound: bool
    plain: bool  # its callers are known: no decorator changes its arguments, no class outside calls it

    @cached_property
    def changed(self) -> frozenset[str]:
        """Names that it assigns, or that are parameters of a function within it."""
        found = set()
        for own in walk(self.node):
            if isinstance(own, ast.Name) and not isinstance(own.ctx, ast.Load):
                found.add(own.id)
            elif isinstance(own, ast.FunctionDef | ast.Lambda) and own is not self.node:
                args = own.args
                found.update(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))
        return frozenset(found)

    @cached_property
    def shown(self) -> frozenset[str]:
        """Names in formatted texts, whose places in the source are not known."""
        texts = [own for own in walk(self.node) if isinstance(own, ast.JoinedStr)]
        return frozenset(own.id for text in texts for own in walk(text) if isinstance(own, ast.Name))

    @cached_property
    def positional(self) -> list[ast.arg]:
        own = self.node.args
        return [*own.posonlyargs, *own.args][self.bound :]

    @cached_property
    def defaults(self) -> dict[str, ast.expr | None]:
        """Of each parameter."""
        own = self.node.args
        every = [*own.posonlyargs, *own.args]
        values: list[ast.expr | None] = [None] * (len(every) - len(own.defaults)) + [*own.defaults]
        found = {arg.arg: value for arg, value in zip(every, values, strict=True)}
        found |= {arg.arg: value for arg, value in zip(own.kwonlyargs, own.kw_defaults, strict=True)}
        return {name: value for name, value in found.items() if name not in ("self", "cls")}


@dataclass(frozen=True, eq=False)
class Call:
    """`inside`: the qualified name of the function that makes it; "" at the top of a module."""

    node: ast.Call
    inside: str


@dataclass(frozen=True)
class CallSites:
    """`passed_on`: names and attributes that are used without being called, so that their callers are not known."""

    functions: tuple[Function, ...]
    calls: tuple[Call, ...]
    passed_on: frozenset[str]


def annotated_class(function: Function, name: str) -> str:
    """The class of a parameter, as its annotation has it; "" where that is no simple name."""
    args = function.node.args
    for own in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        match own.annotation:
            case ast.Name(kind) | ast.BinOp(ast.Name(kind), ast.BitOr(), ast.Constant(None)) if own.arg == name:
                return kind
    return ""


@lru_cache(maxsize=2048)
def call_sites(text: str) -> CallSites:
    source = parsed(text)
    tree = source.tree
    functions = [*_functions(tree)]
    inside = {}
    for own in functions:
        for node in walk(own.node):
            inside[node] = own.name
    calls, called, every = [], _types(tree), []
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            called.add(node.value)  # a class whose method is called is not passed on
        if isinstance(node, ast.Call):
            calls.append(Call(node, inside.get(node, "")))
            called.add(node.func)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("options"):
            continue  # of the command line
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            every.append(node)
    passed = [own for own in every if own not in called]
    return CallSites(
        tuple(functions), tuple(calls), frozenset(own.id if isinstance(own, ast.Name) else own.attr for own in passed)
    )


def _types(tree: ast.Module) -> set[ast.AST]:
    """What stands in annotations, and in the second place of `isinstance`: it calls nothing."""
    found: set[ast.AST] = set()
    for node in walk(tree):
        match node:
            case ast.arg(_, annotation) | ast.AnnAssign(_, annotation) | ast.FunctionDef(returns=annotation):
                roots = [annotation]
            case ast.Call(ast.Name("isinstance"), [_, kinds]):
                roots = [kinds]
            case ast.Call(ast.Name("cast"), [kind, _]):
                roots = [kind]
            case _:
                continue
        found.update(inner for own in roots if own is not None for inner in walk(own))
    return found


def _functions(tree: ast.Module) -> Iterator[Function]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield Function(node, node.name, False, _plain(node))
        if isinstance(node, ast.ClassDef):
            for own in node.body:
                if isinstance(own, ast.FunctionDef):
                    bound = not any(ast.unparse(mark) == "staticmethod" for mark in own.decorator_list)
                    plain = _plain(own) and not node.bases and not node.keywords
                    yield Function(own, f"{node.name}.{own.name}", bound, plain)


def _plain(node: ast.FunctionDef) -> bool:
    return all(ast.unparse(mark) in _TRANSPARENT for mark in node.decorator_list)


@lru_cache(maxsize=65536)
def bound_arguments(function: Function, call: ast.Call) -> dict[str, Argument] | None:
    """Parameter -> what is passed; those that are not have their default. Those that may be passed by `*` or `**` are
    left out. None where the call does not fit."""
    found = dict(function.defaults)
    names = [own.arg for own in function.positional]
    for place, given in enumerate(call.args):
        if isinstance(given, ast.Starred):
            for name in names[place:]:
                found.pop(name, None)
            break
        if place < len(names):
            found[names[place]] = given
        elif function.node.args.vararg is None:
            return None
    for keyword in call.keywords:
        if keyword.arg is None:
            passed = {own.arg for own in call.keywords} | {*names[: len(call.args)]}
            for name in {*found} - passed:
                found.pop(name)
        elif keyword.arg in function.defaults:
            found[keyword.arg] = keyword.value
        elif function.node.args.kwarg is None:
            return None
    return found
