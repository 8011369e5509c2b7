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
        names = set()
        for node in walk(self.node):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.Lambda) and node is not self.node:
                args = node.args
                names.update(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))
        return frozenset(names)

    @cached_property
    def shown(self) -> frozenset[str]:
        """Names in formatted texts, whose places in the source are not known."""
        texts = [node for node in walk(self.node) if isinstance(node, ast.JoinedStr)]
        return frozenset(node.id for text in texts for node in walk(text) if isinstance(node, ast.Name))

    @cached_property
    def positional(self) -> list[ast.arg]:
        args = self.node.args
        return [*args.posonlyargs, *args.args][self.bound :]

    @cached_property
    def defaults(self) -> dict[str, ast.expr | None]:
        """Default of each parameter."""
        args = self.node.args
        every = [*args.posonlyargs, *args.args]
        values: list[ast.expr | None] = [None] * (len(every) - len(args.defaults)) + [*args.defaults]
        defaults = {arg.arg: value for arg, value in zip(every, values, strict=True)}
        defaults |= {arg.arg: value for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
        return {name: value for name, value in defaults.items() if name not in ("self", "cls")}


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
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        match arg.annotation:
            case ast.Name(kind) | ast.BinOp(ast.Name(kind), ast.BitOr(), ast.Constant(None)) if arg.arg == name:
                return kind
    return ""


@lru_cache(maxsize=2048)
def call_sites(text: str) -> CallSites:
    source = parsed(text)
    tree = source.tree
    functions = [*_functions(tree)]
    inside = {}
    for function in functions:
        for node in walk(function.node):
            inside[node] = function.name
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
    passed = [ref for ref in every if ref not in called]
    return CallSites(
        tuple(functions), tuple(calls), frozenset(ref.id if isinstance(ref, ast.Name) else ref.attr for ref in passed)
    )


def _types(tree: ast.Module) -> set[ast.AST]:
    """Nodes that call nothing: annotations, and the types of `isinstance` and `cast`."""
    nodes: set[ast.AST] = set()
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
        nodes.update(inner for root in roots if root is not None for inner in walk(root))
    return nodes


def _functions(tree: ast.Module) -> Iterator[Function]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield Function(node, node.name, False, _plain(node))
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    bound = not any(ast.unparse(mark) == "staticmethod" for mark in method.decorator_list)
                    plain = _plain(method) and not node.bases and not node.keywords
                    yield Function(method, f"{node.name}.{method.name}", bound, plain)


def _plain(node: ast.FunctionDef) -> bool:
    return all(ast.unparse(mark) in _TRANSPARENT for mark in node.decorator_list)


@lru_cache(maxsize=65536)
def bound_arguments(function: Function, call: ast.Call) -> dict[str, Argument] | None:
    """Parameter -> what is passed, or its default. Those that may be passed by `*` or `**` are left out. None where the
    call does not fit."""
    arguments = dict(function.defaults)
    names = [arg.arg for arg in function.positional]
    for place, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            for name in names[place:]:
                arguments.pop(name, None)
            break
        if place < len(names):
            arguments[names[place]] = argument
        elif function.node.args.vararg is None:
            return None
    for keyword in call.keywords:
        if keyword.arg is None:
            passed = {named.arg for named in call.keywords} | {*names[: len(call.args)]}
            for name in {*arguments} - passed:
                arguments.pop(name)
        elif keyword.arg in function.defaults:
            arguments[keyword.arg] = keyword.value
        elif function.node.args.kwarg is None:
            return None
    return arguments
