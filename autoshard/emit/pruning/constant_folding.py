"""Fold what is known of a plan into a module: conditions that it decides, and the branches that it never takes.

Partial evaluation in the sense of Jones, Gomard and Sestoft: names of known values (the constants of model_parallel.py)
decide `if`, `and`, `or`, `... if ... else ...`, `with nullcontext()` and loops over nothing. Values that stay are not
written in place of their names, so that a package reads as its templates do.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.emit.pruning.source_edits import Edit, Source, blocks, parsed, walk

UNKNOWN: Any = object()
GIVEN = "what it is given"  # the result of a function that returns its first argument
NO_CONTEXT = "contextlib.nullcontext()"


@dataclass(frozen=True)
class Empty:
    """A list, dict or tuple without anything, as written."""

    text: str

    def __len__(self) -> int:
        return 0

    def __contains__(self, _: Any) -> bool:
        return False


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {"bool": bool, "len": len, "max": max, "min": min}
_MAKERS = frozenset({"dict", "list", "tuple", "zip", "len"})
_COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp)
_CLOSED = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict)
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Known:
    """Values by name in one module, by attribute anywhere, and of modules: all constants that these have."""

    names: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    calls: Mapping[str, Any] = field(default_factory=dict)  # functions that return one constant, or what they are given


def value_of(node: ast.expr | None, known: Known) -> Any:
    """The value of an expression, or UNKNOWN."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return known.names.get(name, UNKNOWN)
        case ast.Attribute(ast.Name(name), attribute) if name in known.modules:
            return known.modules[name].get(attribute, UNKNOWN)
        case ast.Attribute(_, attribute):
            return known.attributes.get(attribute, UNKNOWN)
        case ast.UnaryOp(ast.Not(), operand):
            value = value_of(operand, known)
            return value if value is UNKNOWN else not value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -value
        case ast.BoolOp(kind, values):
            return _joined(isinstance(kind, ast.And), [value_of(part, known) for part in values])
        case ast.IfExp(test, body, other):
            value = value_of(test, known)
            return value if value is UNKNOWN else value_of(body if value else other, known)
        case ast.Compare(left, [kind], [right]):
            pair = value_of(left, known), value_of(right, known)
            return UNKNOWN if UNKNOWN in pair else _COMPARISONS[type(kind)](*pair)
        case ast.Tuple(items) | ast.List(items):
            values = [value_of(item, known) for item in items]
            empty = Empty("()" if isinstance(node, ast.Tuple) else "[]")
            return UNKNOWN if UNKNOWN in values else tuple(values) if values else empty
        case ast.Dict([], []):
            return Empty("{}")
        case ast.Call(ast.Name("getattr"), [ast.Name(name), ast.Constant(str(attribute)), default], []):
            if name in known.modules:
                constants = known.modules[name]
                return constants[attribute] if attribute in constants else value_of(default, known)
        case ast.Call(ast.Name(name), [operand], []) if name in _CALLS:
            value = value_of(operand, known)
            return UNKNOWN if value is UNKNOWN or isinstance(value, int) else _CALLS[name](value)
        case ast.Call(ast.Name(name), operands, keywords) if name in known.calls:
            harmless = all(map(_is_harmless, [*operands, *(keyword.value for keyword in keywords)]))
            if known.calls[name] in (GIVEN, NO_CONTEXT):
                return UNKNOWN
            return known.calls[name] if harmless else UNKNOWN
    return UNKNOWN


def _is_harmless(node: ast.expr) -> bool:
    match node:
        case ast.Name() | ast.Constant() | ast.Attribute():
            return True
        case ast.List(parts) | ast.Tuple(parts) | ast.BoolOp(_, parts) | ast.Compare(_, _, parts):
            return all(map(_is_harmless, [node.left, *parts] if isinstance(node, ast.Compare) else parts))
        case ast.Starred(part) | ast.UnaryOp(_, part):
            return _is_harmless(part)
    return False


def _joined(both: bool, values: list[Any]) -> Any:
    """Value of operands joined by `and` (`both`) or `or`."""
    for value in values:
        if value is UNKNOWN:
            return UNKNOWN
        if bool(value) != both:
            return value
    return values[-1]


def folded(text: str, known: Known) -> str:
    """The module's text after all that is known."""
    while True:
        source = parsed(text)
        edits = [*_edits(source, known)]
        if not edits:
            return text
        text = source.applied(edits)


def _edits(source: Source, known: Known) -> Iterator[Edit]:
    for holder, block in blocks(source.nodes):
        for place, node in enumerate(block):
            if isinstance(node, _ENDS) and place + 1 < len(block):
                for later in block[place + 1 :]:
                    yield source.removed(later)
                break
            yield from _of_statement(source, node, holder, block, known)
    for function, nodes in source.functions:
        yield from _settled_locals(source, function, nodes)
    for expr in source.nodes:
        if expr in source.in_texts:
            continue
        if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name) and expr.func.id in known.calls:
            value = value_of(expr, known)
            if (
                known.calls[expr.func.id] is GIVEN
                and expr.args
                and not expr.keywords
                and all(map(_is_harmless, expr.args[1:]))
            ):
                text = source.segment(expr.args[0])
                yield source.replaced(expr, text if isinstance(expr.args[0], _CLOSED) else f"({text})")
            elif value is not UNKNOWN and (value is None or isinstance(value, bool | Empty)):
                yield source.replaced(expr, value.text if isinstance(value, Empty) else repr(value))
        if isinstance(expr, ast.Call) and source.segment(expr) == "tuple(())":
            yield source.replaced(expr, "()")
        if isinstance(expr, _COMPREHENSIONS) and _is_empty(expr.generators[0].iter, known):
            yield source.replaced(expr, {ast.ListComp: "[]", ast.DictComp: "{}", ast.SetComp: "set()"}[type(expr)])
        if isinstance(expr, ast.IfExp) and (value := value_of(expr.test, known)) is not UNKNOWN:
            yield _instead(source, expr, expr.body if value else expr.orelse)
        if isinstance(expr, ast.UnaryOp) and isinstance(value := value_of(expr, known), bool):
            yield source.replaced(expr, repr(value))
        if isinstance(expr, ast.BoolOp):
            yield from _of_operands(source, expr, known)
        for test in _tests(expr):
            for part in _joined_parts(test):
                yield from _of_test(source, part, known)


def _instead(source: Source, node: ast.expr, chosen: ast.expr) -> Edit:
    text = source.segment(chosen)
    return source.replaced(node, f"({text})" if "\n" in text and isinstance(chosen, ast.BoolOp | ast.IfExp) else text)


def _of_statement(
    source: Source, node: ast.stmt, holder: ast.AST, block: list[ast.stmt], known: Known
) -> Iterator[Edit]:
    alone = len(block) == 1 and not isinstance(holder, ast.Module)
    match node:
        case ast.If(test, body, other) if (value := value_of(test, known)) is not UNKNOWN:
            yield _taken(source, node, body if value else other, alone)
        case ast.Assert(test, _) if not alone and value_of(test, known) not in (UNKNOWN, False, None):
            yield source.removed(node)
        case ast.For(_, iterated, _, []) if not alone and _is_empty(iterated, known):
            yield source.removed(node)
        case ast.Expr(ast.Constant(value)) if not isinstance(value, str) and not alone and value is not ...:
            yield source.removed(node)
        case ast.If(test, [ast.Expr(ast.Constant(None)) | ast.Pass()], []) if not alone and _is_harmless(test):
            yield source.removed(node)
        case ast.With(items, body):
            yield from _contexts(source, node, items, body, known)


def _is_empty(iterated: ast.expr, known: Known) -> bool:
    match iterated:
        case ast.Call(ast.Attribute(own, "items" | "values" | "keys"), [], []) | ast.Call(ast.Name("enumerate"), [own]):
            return isinstance(value_of(own, known), Empty)
    return isinstance(value_of(iterated, known), Empty)


def _taken(source: Source, node: ast.If, block: list[ast.stmt], alone: bool) -> Edit:
    """Edit of an `if` whose branch is known."""
    assert node.end_lineno is not None
    first = source.lines[node.lineno - 1]
    is_elif = source.data[source.start(node) :].startswith(b"elif")
    start, end = source.lines[source.first_line(node)] if not is_elif else first, source.lines[node.end_lineno]
    pad = " " * node.col_offset
    chained = len(block) == 1 and isinstance(block[0], ast.If) and block[0].col_offset == node.col_offset
    if is_elif:
        if not block:
            return Edit(start, end, "")
        if chained:
            return Edit(start, source.lines[block[0].lineno - 1], "")
        body_line = source.first_line(block[0])
        return Edit(start, end, f"{pad}else:\n" + source.data[source.lines[body_line] : _end(source, block)].decode())
    if chained:
        text = source.data[source.start(block[0]) : end].decode()
        return Edit(start, end, pad + text.removeprefix("el"))
    if not block and alone:
        return Edit(start, end, f"{pad}pass\n")
    return source.without(node, block, start, end)


def _end(source: Source, block: list[ast.stmt]) -> int:
    last = block[-1].end_lineno
    assert last is not None
    return source.lines[last]


def _contexts(
    source: Source, node: ast.With, items: list[ast.withitem], body: list[ast.stmt], known: Known
) -> Iterator[Edit]:
    """`with` without the contexts that do nothing."""
    idle = {NO_CONTEXT, *(f"{name}()" for name, value in known.calls.items() if value is NO_CONTEXT)}
    empty = [item for item in items if item.optional_vars is None and source.segment(item.context_expr) in idle]
    if not empty:
        return
    if len(empty) == len(items):
        assert node.end_lineno is not None
        yield source.without(node, body, source.lines[node.lineno - 1], source.lines[node.end_lineno])
        return
    left = [item for item in items if item not in empty]
    texts = [
        source.segment(item.context_expr)
        + (f" as {source.segment(item.optional_vars)}" if item.optional_vars is not None else "")
        for item in left
    ]
    last = items[-1].optional_vars or items[-1].context_expr
    yield Edit(source.start(items[0].context_expr), source.end(last), ", ".join(texts))


def _tests(node: ast.AST) -> list[ast.expr]:
    """Expressions of which only the truth counts."""
    match node:
        case ast.If() | ast.IfExp() | ast.While() | ast.Assert():
            return [node.test]
        case ast.comprehension():
            return node.ifs
        case ast.Call(ast.Name("bool"), operands) | ast.BoolOp(_, operands) if isinstance(node, ast.Call):
            return operands
    return []


def _joined_parts(node: ast.expr) -> Iterator[ast.BoolOp]:
    """`a and (b or c)` and what is joined within it."""
    if isinstance(node, ast.BoolOp):
        yield node
        for operand in node.values:
            yield from _joined_parts(operand)


def _of_operands(source: Source, node: ast.BoolOp, known: Known) -> Iterator[Edit]:
    """Edits of operands: `True and x` is x, and `False or x`; `False and x` is False wherever it stands."""
    both = isinstance(node.op, ast.And)
    values = [value_of(operand, known) for operand in node.values]
    if values[0] is not UNKNOWN:
        if bool(values[0]) == both:
            yield _folded_operands(source, node, node.values[1:])
        elif value_of(node, known) is UNKNOWN:
            yield _instead(source, node, node.values[0])
        return
    for place, value in enumerate(values[1:-1], 1):
        if value is not UNKNOWN and bool(value) == both:
            yield _folded_operands(source, node, [operand for at, operand in enumerate(node.values) if at != place])
            return


def _of_test(source: Source, node: ast.BoolOp, known: Known) -> Iterator[Edit]:
    """Edits where only truth counts: `x and True` is x, and `x and False` is False where x does nothing."""
    value, both = value_of(node.values[-1], known), isinstance(node.op, ast.And)
    if value is UNKNOWN:
        return
    if bool(value) == both:
        yield _folded_operands(source, node, node.values[:-1])
    elif all(map(_is_harmless, node.values[:-1])):
        yield source.replaced(node, repr(bool(value)))


def _folded_operands(source: Source, node: ast.BoolOp, values: list[ast.expr]) -> Edit:
    word = " and " if isinstance(node.op, ast.And) else " or "
    texts = [source.segment(operand) for operand in values]
    wrapped = [
        f"({text})" if isinstance(operand, ast.IfExp | ast.BoolOp) else text
        for operand, text in zip(values, texts, strict=True)
    ]
    return source.replaced(node, texts[0] if len(values) == 1 else word.join(wrapped))


def _settled_locals(source: Source, function: ast.FunctionDef, nodes: list[ast.AST]) -> Iterator[Edit]:
    """Edits of variables that are always None, False, True or a context that does nothing, and of those that nothing
    reads any more."""
    stores: dict[str, list[ast.Assign]] = {}
    for _, block in blocks(nodes):
        for node in block if _has_more(block) else ():
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                stores.setdefault(node.targets[0].id, []).append(node)
    if not stores:
        return
    counts: dict[str, int] = {}
    loads: dict[str, list[ast.Name]] = {}
    fixed: set[str] = set()
    for element in nodes:
        if isinstance(element, ast.Name) and isinstance(element.ctx, ast.Load):
            loads.setdefault(element.id, []).append(element)
        elif isinstance(element, ast.Name):
            counts[element.id] = counts.get(element.id, 0) + 1
        elif isinstance(element, ast.arg):
            fixed.add(element.arg)
        elif isinstance(element, ast.Nonlocal | ast.Global):
            fixed.update(element.names)
        elif isinstance(element, ast.JoinedStr):
            fixed.update(inner.id for inner in walk(element) if isinstance(inner, ast.Name))
    for name, assigns in stores.items():
        node = assigns[0]
        if len(assigns) != 1 or counts[name] != 1 or name in fixed:
            continue
        text = source.segment(node.value)
        if text in ("None", "True", "False", NO_CONTEXT):
            yield source.removed(node)
            yield from (source.replaced(load, text) for load in loads.get(name, []))
        elif name not in loads and _does_nothing(node.value):
            yield source.removed(node)
        elif name not in loads and isinstance(node.value, ast.Call):
            yield source.replaced(node, source.segment(node.value))


def _has_more(block: list[ast.stmt]) -> bool:
    """True for a block from which all assignments may go: one without statements is no Python."""
    return any(not isinstance(node, ast.Assign) for node in block)


def _does_nothing(node: ast.expr) -> bool:
    """True if it only makes a value."""
    return all(
        isinstance(call.func, ast.Name) and call.func.id in _MAKERS
        for call in walk(node) if isinstance(call, ast.Call)
    ) and not any(isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield) for inner in walk(node))  # fmt: skip
