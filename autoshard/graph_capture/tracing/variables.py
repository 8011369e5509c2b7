"""What the model's own code calls a value: the variable that the statement which makes it assigns."""

from __future__ import annotations

import ast
import itertools
import linecache
import operator
from collections.abc import Iterator
from functools import cache

from torch import fx

from autoshard.graph_capture.tracing.source_lines import node_frames

_RETURNED = ("",)  # of a statement that hands its value to the caller


def variables_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """The exported nodes with a name, in order.

    What a statement hands on has the name that it assigns, or, of several targets, each the next one; of what a
    function returns, the caller's. What it makes on the way is called as the module of torch that makes it, if any.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    for _, group in itertools.groupby(nodes, key=_statement):
        made = list(group)
        _, targets = _statement(made[0])
        ends = [node for node in made if _escapes(node, set(made))]
        names = targets * len(ends) if len(targets) == 1 else targets if len(targets) >= len(ends) else ()
        named = dict(zip(ends, names, strict=False))
        for node in made:
            name = named.get(node, "") if node in ends else _library_module(node)
            parts = [user for user in node.users if user.target is operator.getitem]
            if parts and ends == [node] and len(targets) > 1:
                yield from ((part, name) for part, name in _parts(parts, targets) if name.strip("_"))
            elif name.strip("_"):
                yield node, name


def _parts(parts: list[fx.Node], targets: tuple[str, ...]) -> Iterator[tuple[fx.Node, str]]:
    for part in parts:
        position = part.args[1]
        if isinstance(position, int) and 0 <= position < len(targets):
            yield part, targets[position]


def _statement(node: fx.Node) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """The frames down to the statement that assigns what the node is a part of, and its targets."""
    frames = node_frames(node)
    while frames:
        targets = _assigned(frames[-1][0]).get(frames[-1][1], ())
        if targets != _RETURNED:
            return tuple(frames), targets
        frames = frames[:-1]
    return (), ()


def _escapes(node: fx.Node, group: set[fx.Node]) -> bool:
    return any(_escapes(user, group) if user.target is operator.getitem else user not in group for user in node.users)


def _library_module(node: fx.Node) -> str:
    """`fc1` of a linear layer that the model calls so."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    name = str(path.partition("@")[0].rpartition(".")[2])
    of_torch = str(kind if isinstance(kind, str) else kind.__module__).startswith("torch.nn.modules.")
    return name if of_torch and name.isidentifier() else ""


@cache
def _assigned(filename: str) -> dict[int, tuple[str, ...]]:
    """Line -> the names that the statement there assigns."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, tuple[str, ...]] = {}
    for statement in ast.walk(tree):
        names = _names(statement)
        if names and isinstance(statement, ast.stmt):
            found |= dict.fromkeys(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1), names)
    return found


def _names(statement: ast.AST) -> tuple[str, ...]:
    if isinstance(statement, ast.Return):
        return _RETURNED
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.AST = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        target = statement.target
    else:
        return ()
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return tuple(part.id if isinstance(part, ast.Name) else "_" for part in parts)
