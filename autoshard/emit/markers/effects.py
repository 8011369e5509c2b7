"""Calls with an effect: those that an instruction asks for, and those of an expression as it is written.

An effect is the function, what it is called on, and its other arguments: `("counted", "F.cross_entropy")`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoshard import redistribute
from autoshard.ir.program import Collective, Compute, Instruction
from autoshard.program.early_reductions import ALONE, SHARED, ColumnParallel
from autoshard.program.module_scopes import RANDOM, random_index
from autoshard.program.weights import careful_casts
from autoshard.rules.host_tables import TABLE
from autoshard.rules.operators import VARIANTS

if TYPE_CHECKING:
    from autoshard.emit.classes import ClassWriter

Effect = tuple[object, ...]
_COLUMN_PARALLEL = (ALONE, SHARED)
_AROUND = frozenset({"counted", "to_device"})  # what an operator makes


def instruction_effects(writer: ClassWriter, item: Instruction, within: frozenset[str]) -> Iterator[Effect]:
    """Effects of an instruction, in order. `within`: values without a variable, as they are made in the statement."""
    if isinstance(item, Collective):
        yield _collective(item)
        return
    program = writer.package.program
    operands = tuple(None if value in within else value for value in item.operands)
    if item.results[0] in program.once(careful_casts):
        yield "cast_weight", operands[0], f"torch.{program.value(item.results[0]).dtype}"
        return
    sent = [i for i, value in enumerate(item.operands) if item.host and i != TABLE and value is not None]
    yield from (("to_host", operands[i]) for i in sent)
    if item.variant:
        moves = item.moves if isinstance(item, ColumnParallel) else None
        keeps = moves is not None and moves.reused
        values = tuple(value for value in operands if value is not None)
        yield item.variant, values, frozenset(axis for axis in item.axes if axis[1]), random_index(item), keeps
    if item.host:
        yield "to_device", _spelled_head(writer, item)
    if any(item.op == count.op for count in program.label_counts):
        yield "counted", "to_device" if item.host else _spelled_head(writer, item)


def _collective(step: Collective) -> Effect:
    if step.forward in redistribute.BY_INDEX:
        return "exchange", step.operand, step.axes, None, step.reused and not step.regathered, step.regathered
    name, grad = redistribute.runtime_call(step.before[0], step.after[0], step.regathered, step.once)
    return name, step.operand, step.axes, grad, step.reused, False


def _spelled_head(writer: ClassWriter, item: Compute) -> str:
    if item.variant:
        return item.variant
    names = [value and f"operand_{i}" for i, value in enumerate(item.operands)]
    text = writer.speller.spell(item.target, names, writer.attributes(item))
    return _head(ast.parse(text, mode="eval").body)


@dataclass(frozen=True)
class Written:
    """Effects of expressions of one class. `value` is that of a variable, parameter or buffer; `axes` by attribute."""

    value: Callable[[Any], str | None]
    axes: Mapping[str, tuple[str, ...]]
    random_base: int  # the number of the class's first random operator

    def effects(self, node: ast.expr) -> Iterator[Effect]:
        """Effects in the order in which Python runs them."""
        for inner in _postorder(node):
            name = inner.func.id if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) else ""
            if name in _AROUND:
                yield name, _head(inner.args[0])
            elif name == "cast_weight":
                yield name, self.value(inner.args[0]), ast.unparse(inner.args[1])
            elif name in ("to_host", "recomputed", "regather_before"):
                yield name, self.value(inner.args[0])
            elif name in redistribute.CALLS:
                yield self._moved(name, inner)
            elif name in VARIANTS or name in _COLUMN_PARALLEL:
                yield self._varied(name, inner)

    def _moved(self, name: str, call: Any) -> Effect:
        options = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in call.keywords
            if keyword.arg in ("grad", "kept", "again")
        }
        axes, grad = self.axes.get(ast.unparse(call.args[1])), options.get("grad", redistribute.CALLS[name])
        return name, self.value(call.args[0]), axes, grad, options.get("kept", False), options.get("again", False)

    def _varied(self, name: str, call: Any) -> Effect:
        values = tuple(value for argument in call.args if (value := self.value(_unwrapped(argument))) is not None)
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        roles = {(role, names) for role, node in options.items() if (names := self._axes(node))}
        if name in _COLUMN_PARALLEL:
            roles = {("axis", self.axes.get(ast.unparse(call.args[1]), ()))}
        number = self._number(options["index"]) if name in RANDOM else None
        return name, values, frozenset(roles), number, "kept" in options

    def _axes(self, node: Any) -> tuple[str, ...]:
        items = node.elts if isinstance(node, ast.Tuple) else []
        return tuple(name for item in items for name in self.axes.get(ast.unparse(item), ()))

    def _number(self, node: Any) -> int:
        """Number in the first module of this class: `7`, `self.first_random`, `self.first_random + 2`."""
        if isinstance(node, ast.Constant):
            return int(ast.literal_eval(node))
        offset = ast.literal_eval(node.right) if isinstance(node, ast.BinOp) else 0
        return self.random_base + int(offset)


def axes_of(init: ast.FunctionDef | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """`self.tp` -> its axes, as __init__ sets it."""
    for node in init.body if init is not None else ():
        if not isinstance(node, ast.Assign):
            continue
        target: Any = node.targets[0]
        value: Any = node.value
        pairs = zip(target.elts, value.elts, strict=True) if isinstance(target, ast.Tuple) else [(target, value)]
        for attribute, assigned in pairs:
            text = ast.unparse(assigned)
            if text.startswith("mesh["):
                yield ast.unparse(attribute), (ast.literal_eval(assigned.slice),)
            elif text.startswith("mesh.joint("):
                yield ast.unparse(attribute), ast.literal_eval(assigned.args[0])


def _postorder(node: ast.AST) -> Iterator[Any]:
    for inner in ast.iter_child_nodes(node):
        yield from _postorder(inner)
    yield node


def _head(node: Any) -> str:
    """The function that an expression calls last, or its operator."""
    if not isinstance(node, ast.Call):
        return type(getattr(node, "op", node)).__name__
    text = ast.unparse(node.func)
    of_module = not isinstance(node.func, ast.Attribute) or text.partition(".")[0] in ("F", "torch")
    return text if of_module else "." + text.rpartition(".")[2]


def _unwrapped(node: Any) -> Any:
    """`x` of `to_host(x)` and `x.t()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "to_host":
        return node.args[0]
    turned = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "t"
    return node.func.value if turned else node
