"""Names of values in the model's own code: the variable that the statement which makes a value assigns."""

from __future__ import annotations

import ast
import linecache
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import fx

from autoshard.graph_capture.tracing.source_lines import node_calls, node_frames


@dataclass(frozen=True)
class _Returned:
    """Statement that hands its value to the caller: at which `positions` of how many values; None for a single one.
    `name`: the variable that it assigns before."""

    positions: tuple[int, ...] | None = None
    count: int = 1
    name: str = ""

    def of(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        if self.positions is None:
            return targets
        if len(targets) != self.count:  # the caller does not take them apart
            return (self.name,) if self.name else targets
        return tuple(targets[position] for position in self.positions)


_Statement = tuple[tuple[tuple[str, int], ...], tuple[str, ...]]  # frames, targets
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def variables_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """The exported nodes with a name, in order.

    What a statement hands on has the name that it assigns, or, of several targets, each the next one; of what a
    function returns, the caller's. What it makes on the way is called as the module of torch that makes it, if any.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    for (_, targets), group in _statements(nodes):
        ends = [node for node in group if _escapes(node, set(group))]
        names = targets * len(ends) if len(targets) == 1 else targets if len(targets) >= len(ends) else ()
        named = dict(zip(ends, names, strict=False))
        for node in group:
            name = named.get(node, "") if node in ends else _library_module(node)
            parts = [user for user in node.users if user.target is operator.getitem]
            if parts and ends == [node] and len(targets) > 1:
                yield from ((part, name) for part, name in _parts(parts, targets) if name.strip("_"))
            elif name.strip("_"):
                yield node, name


def _statements(nodes: list[fx.Node]) -> list[tuple[_Statement, list[fx.Node]]]:
    """Nodes of one run of a statement together, whatever functions that it calls make in between."""
    statements: list[tuple[_Statement, list[fx.Node]]] = []
    open_: list[tuple[_Statement, list[fx.Node]]] = []
    for node in nodes:
        statement = _statement(node)
        while open_ and open_[-1][0] != statement and _is_called(statement[0], open_[-1][1][0]):
            open_.pop()
        if open_ and open_[-1][0] == statement:
            open_[-1][1].append(node)
        else:
            open_.append((statement, [node]))
            statements.append(open_[-1])
    return statements


def _parts(parts: list[fx.Node], targets: tuple[str, ...]) -> Iterator[tuple[fx.Node, str]]:
    for part in parts:
        position = part.args[1]
        if isinstance(position, int) and 0 <= position < len(targets):
            yield part, targets[position]


def _statement(node: fx.Node) -> _Statement:
    """The frames down to the statement that assigns what the node is a part of, and its targets."""
    frames, returned = node_frames(node), _Returned()
    while frames:
        assigned = _assigned(frames[-1][0]).get(frames[-1][1], ())
        if not isinstance(assigned, _Returned):
            return tuple(frames), returned.of(assigned)
        frames, returned = frames[:-1], returned if assigned.positions is None else assigned
    return (), ()


def _escapes(node: fx.Node, group: set[fx.Node]) -> bool:
    return any(
        _escapes(user, group) if user.target is operator.getitem else user not in group and not _is_argument(node, user)
        for user in node.users
    )


def _is_argument(node: fx.Node, user: fx.Node) -> bool:
    """Does a function read it that the statement calls? Of a module, which is a class of its own, it is a value."""
    return _is_called(tuple(node_frames(node)), user)


def _is_called(frames: tuple[tuple[str, int], ...], node: fx.Node) -> bool:
    """Does a function make it that is no forward, and that the statement at `frames` calls?"""
    caller, calls = [*frames], node_calls(node)
    return [frame for frame, _ in calls[: len(caller)]] == caller and any(
        name != "forward" for _, name in calls[len(caller) :][:1]
    )


def _library_module(node: fx.Node) -> str:
    """Name, in the model, of the torch module that makes the node: `fc1` for a linear layer of that name."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    name = str(path.partition("@")[0].rpartition(".")[2])
    of_torch = str(kind if isinstance(kind, str) else kind.__module__).startswith("torch.nn.modules.")
    return name if of_torch and name.isidentifier() else ""


@cache
def _assigned(filename: str) -> dict[int, tuple[str, ...] | _Returned]:
    """Line -> the names that the statement there assigns, or that it makes what the function returns: but for a
    forward, which is a class of its own in a package, by its last assignment to the variable, too."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    by_line: dict[int, tuple[str, ...] | _Returned] = {}
    for statement in ast.walk(tree):
        names = _names(statement)
        if names and isinstance(statement, ast.stmt):
            by_line |= dict.fromkeys(_lines(statement), names)
    for function in ast.walk(tree):
        if isinstance(function, _Function) and function.name != "forward":
            by_line |= _handed_on(function)
    return by_line


def _lines(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def _handed_on(function: _Function) -> dict[int, _Returned]:
    """The lines of the last assignments to what its one `return` names."""
    returns = [statement for statement in ast.walk(function) if isinstance(statement, ast.Return)]
    if len(returns) != 1 or returns[0].value is None:
        return {}
    value = returns[0].value
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    last: dict[str, ast.stmt] = {}
    for statement in ast.walk(function):
        names = _names(statement)
        if isinstance(statement, ast.stmt) and isinstance(names, tuple) and len(names) == 1:
            before = last.get(names[0])
            last[names[0]] = statement if before is None or before.lineno < statement.lineno else before
    by_line: dict[int, _Returned] = {}
    for position, part in enumerate(parts):
        if isinstance(part, ast.Name) and part.id in last:
            returned = _Returned((position,), len(parts), part.id) if len(parts) > 1 else _Returned()
            by_line |= dict.fromkeys(_lines(last[part.id]), returned)
    return by_line


def _names(statement: ast.AST) -> tuple[str, ...] | _Returned:
    if isinstance(statement, ast.Return):
        values = statement.value.elts if isinstance(statement.value, ast.Tuple) else []
        positions = tuple(position for position, value in enumerate(values) if not isinstance(value, ast.Name))
        return _Returned(positions, len(values)) if positions else _Returned()
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.AST = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        target = statement.target
    else:
        return ()
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return tuple(part.id if isinstance(part, ast.Name) else "_" for part in parts)
