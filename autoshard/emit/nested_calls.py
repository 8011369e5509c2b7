"""Operators that are written within the statement of the one that reads them: what the model's code does not name.

They stand right before their reader, in the order in which Python evaluates its arguments, so that nothing runs in
another order than the program says; and a value that has no variable is freed as soon as it was read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from autoshard.ir.program import Compute, Program
from autoshard.program.module_scopes import RANDOM, reads_of, results_of
from autoshard.program.module_tree import Definition, Loop, ModuleCall
from autoshard.rules.algebra.operator_record import Product, Work
from autoshard.rules.operators import record

Spelled = Callable[[Compute], str | None]
LENGTH = 88  # of an expression that others are written into
OPERAND = "some_operand"  # stands for a variable, which is as long, about


def nested_calls(program: Program, definition: Definition, weights: frozenset[str], spelled: Spelled) -> dict[int, int]:
    """Position in the body -> that of the statement which it is written into. `weights`: what is gathered or cast.
    `spelled`: the expression of an operator, of operands of that name; None where it is no tensor but a list of one."""
    return _Nesting(program, definition, weights, spelled).run()


class _Nesting:
    def __init__(self, program: Program, definition: Definition, weights: frozenset[str], spelled: Spelled) -> None:
        self.program, self.body, self.weights, self.spelled = program, definition.body, weights, spelled
        self.outputs = {*definition.outputs, *(new for _, new in definition.updates)}
        self.uses: dict[str | None, int] = {}
        for item in definition.body:
            for value in item.arguments if isinstance(item, ModuleCall | Loop) else reads_of(item):
                self.uses[value] = self.uses.get(value, 0) + 1
        self.nested: dict[int, int] = {}
        self.alone: set[int] = set()  # positions that stay statements
        self.maker = {
            value: i for i, item in enumerate(self.body) if isinstance(item, Compute) for value in item.results
        }

    def run(self) -> dict[int, int]:
        while True:
            self.nested = {}
            self._nest()
            holding = {i for i in self.nested if self._holds(i)}
            if not holding:
                return self.nested
            self.alone |= holding

    def _nest(self) -> None:
        for root in reversed(range(len(self.body))):
            item = self.body[root]
            if root not in self.nested and isinstance(item, Compute) and not item.variant:
                self.position, self.length, self.root = root - 1, len(self.spelled(item) or ""), root
                self._take_in(item)

    def _take_in(self, reader: Compute) -> None:
        for operand in reversed(reader.operands):
            item = self.body[self.position] if self.position >= 0 else None
            if not isinstance(item, Compute) or results_of(item) != (operand,) or not self._fits(item, reader):
                continue
            expression = self.spelled(item)
            length = self.length + len(expression or "") - len(OPERAND)
            if self.position in self.alone or expression is None or length > LENGTH:
                return
            self.nested[self.position] = self.root
            self.length, self.position = length, self.position - 1
            self._take_in(item)

    def _fits(self, item: Compute, reader: Compute) -> bool:
        """True if nothing else reads it, the model's code does not name it, and no reader looks for it as a step."""
        value = item.results[0]
        moved = {*reads_of(item), value} & self.weights
        if self.uses[value] != 1 or value in self.outputs or item.variant or item.regathered or moved:
            return False
        chain = record(item.target).keeps_name and record(reader.target).keeps_name
        if self._is_named(item) and not chain:
            return False
        return not _is_large(item) or sum(operand is not None for operand in reader.operands) == 1

    def _is_named(self, item: Compute) -> bool:
        return self.program.value(item.results[0]).variable not in ("", item.module.rpartition(".")[2])

    def _holds(self, position: int) -> bool:
        """True if the rest of the statement would run while it holds an operand that the model's code frees before."""
        item = self.body[position]
        assert isinstance(item, Compute)
        if record(item.target).keeps_name or record(item.target).work is Work.VIEW:
            return False
        makers = [self.maker[value] for value in item.operands if value in self.maker and self.uses[value] == 1]
        pending = [(i, self.body[i]) for i in makers if i not in self.nested]
        return any(isinstance(maker, Compute) and not self._is_named(maker) for _, maker in pending)


def _is_large(item: Compute) -> bool:
    work = record(item.target).work
    return isinstance(work, Product) or work is Work.ATTENTION or item.variant in RANDOM


def with_brackets(expression: str, inner: Mapping[str, str]) -> str:
    """`expression` with `inner` (name -> expression) in the place of its names, in brackets where they need them."""
    if not inner:
        return expression
    tree = ast.parse(expression, mode="eval")
    parents = {id(child): parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in inner]
    code = expression.encode()  # which positions are counted in
    for node in sorted(names, key=lambda node: node.col_offset, reverse=True):
        text = inner[node.id]
        if _needs(ast.parse(text, mode="eval").body, parents[id(node)], node):
            text = f"({text})"
        code = code[: node.col_offset] + text.encode() + code[node.end_col_offset :]
    return code.decode()


def _needs(inner: ast.expr, parent: ast.AST, place: ast.expr) -> bool:
    if isinstance(inner, ast.Call | ast.Name | ast.Subscript | ast.Constant):
        return False
    if isinstance(parent, ast.Attribute | ast.UnaryOp | ast.Subscript | ast.Compare):
        return place is not getattr(parent, "slice", None)
    if isinstance(parent, ast.BinOp) and isinstance(inner, ast.BinOp):
        rank, outer = _RANKS.get(type(inner.op), 0), _RANKS.get(type(parent.op), 0)
        return rank == 0 or outer == 0 or rank < outer + (place is parent.right)
    return isinstance(parent, ast.BinOp)


_RANKS: dict[type[ast.operator], int] = {ast.Add: 1, ast.Sub: 1, ast.Mult: 2, ast.Div: 2, ast.MatMult: 2}
