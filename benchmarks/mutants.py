"""Every single small fault of a Python file, as the syntax tree has places for: what `planted_faults.py` draws from."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult, ast.Pow)
_NO_CALLS = {"cast", "isinstance", "hasattr", "TypeVar", "field", "lru_cache", "super", "print"}
_TESTED = (ast.If, ast.IfExp, ast.While)


@dataclass(frozen=True)
class Mutant:
    """One fault: `kind`, the function that has it, the code before and after, and the whole file with it."""

    file: str
    function: str
    kind: str
    before: str
    after: str
    number: int  # of its equals in this function

    @property
    def name(self) -> str:
        """What it is called by; it holds as long as its lines do."""
        suffix = f" #{self.number}" if self.number else ""
        return f"{self.file} {self.function or 'module'}: {self.before} -> {self.after}{suffix}"


def mutants(file: str, source: str) -> list[tuple[Mutant, Callable[[], str]]]:
    """Each with what makes the text of the file that has it; equal ones are numbered in order."""
    counts: dict[tuple[str, ...], int] = {}
    pairs = []
    for place, (node, function) in enumerate(_places(ast.parse(source))):
        for fault, (kind, replacement) in enumerate(_faults(node)):
            key = (function, _text(node), _text(replacement))
            counts[key] = number = counts.get(key, -1) + 1
            mutant = Mutant(file, function, kind, key[1], key[2], number)
            pairs.append((mutant, partial(_planted, source, place, fault)))
    return pairs


def _planted(source: str, place: int, fault: int) -> str:
    """The file with a fault of one of its places."""
    tree = ast.parse(source)
    node, _ = list(_places(tree))[place]
    _, replacement = list(_faults(node))[fault]
    return ast.unparse(ast.fix_missing_locations(_Swap(node, replacement).visit(tree))) + "\n"


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _places(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """All nodes that run, with the names of the functions around them."""
    yield node, function
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".strip(".")
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and _runs(node, name, child):
                yield from _places(child, function)


def _runs(parent: ast.AST, name: str, child: ast.AST) -> bool:
    """Not annotations, decorators, docstrings, imports, messages of errors, or what only a type checker reads."""
    if name in ("annotation", "returns", "decorator_list", "bases"):
        return False
    if isinstance(parent, ast.ClassDef) and name == "keywords":
        return False
    if isinstance(child, ast.Import | ast.ImportFrom) or (isinstance(parent, ast.Raise) and name in ("exc", "cause")):
        return False
    if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
        return False
    if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
        return False
    if isinstance(parent, ast.Assert) and name == "msg":
        return False
    return not (isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(parent, ast.Module) and _alias(child))


def _alias(node: ast.Assign | ast.AnnAssign) -> bool:
    """`__all__`, and names of types."""
    target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    value = node.value
    subscript = isinstance(value, ast.Subscript) and ast.unparse(value.value) in ("tuple", "dict", "list", "Callable")
    return target == "__all__" or subscript or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr))


def _faults(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, _TESTED):
        yield "condition negated", _replaced(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension) and node.ifs:
        yield "condition dropped", _replaced(node, "ifs", node.ifs[:-1])
    if isinstance(node, ast.BoolOp):
        terms = node.values[:-1]
        yield "term dropped", terms[0] if len(terms) == 1 else ast.BoolOp(node.op, terms)
    if isinstance(node, ast.BinOp) and not isinstance(node.left, ast.Constant | ast.JoinedStr):
        yield "term dropped", node.left
        if isinstance(node.op, _ORDERED):
            yield "operands swapped", ast.BinOp(node.right, node.op, node.left)
    if isinstance(node, ast.Constant):
        yield from (("constant", ast.Constant(value)) for value in _other(node.value))
    if isinstance(node, ast.Call):
        yield from _calls(node)
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break):
        yield "statement removed", ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute):
        yield "statement removed", ast.Pass()
    if isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load):
        yield "starred dropped", ast.Starred(ast.Tuple([], ast.Load()), ast.Load())


def _other(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value * 2 or 1.0


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    plain = [a for a in node.args if not isinstance(a, ast.Starred)]
    if name in _NO_CALLS:
        return
    if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        yield "call dropped", node.func.value
    elif plain == node.args and len(plain) == 1 and not node.keywords:
        yield "call dropped", plain[0]
    if plain == node.args and len(plain) > 1 and _text(plain[0]) != _text(plain[1]):
        yield "arguments swapped", ast.Call(node.func, [plain[1], plain[0], *plain[2:]], node.keywords)
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            keywords = [*node.keywords[:index], *node.keywords[index + 1 :]]
            yield "argument dropped", ast.Call(node.func, node.args, keywords)


def _replaced(node: ast.AST, name: str, value: object) -> ast.AST:
    clone = copy.copy(node)
    setattr(clone, name, value)
    return clone


def _text(node: ast.AST) -> str:
    """On one line; of a compound statement its head."""
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {ast.unparse(node.test)}"
    if isinstance(node, ast.comprehension):
        return ast.unparse(node).strip()
    return " ".join(ast.unparse(node).split())
