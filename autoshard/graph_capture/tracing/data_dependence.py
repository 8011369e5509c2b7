"""Answers to what Python asks of a tensor's value while a forward is traced, if sizes decide it or a guard asks.

A guard is `assert`, a branch that only raises, or a question after inf and NaN; its usual answer is assumed, and noted.
"""

from __future__ import annotations

import ast
import dis
import operator
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils._pytree import tree_map_only

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing import LARGEST_ELEMENTS
from autoshard.graph_capture.tracing.fills import op_name
from autoshard.graph_capture.tracing.source_lines import here, short_path

_DRAWN = "x + f(x) * torch.empty(1).bernoulli_(keep) / keep, instead of leaving f(x) out by chance; or a rate of 0"
_FIRST = (
    "call the model once before it is captured, so that what only its first call does is behind it; or turn off what "
    "it does every so many calls, and do that in the training loop"
)
ASKED = ("__bool__", "item", "__int__", "__float__", "__index__", "tolist")


class Answers:
    """`assumed` lists the guards whose usual answer was given: `file.py:12 `code` is False`."""

    def __init__(self, flags: FlagBuffers) -> None:
        self.assumed: dict[str, None] = {}
        self.flags = flags

    def patch(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stands for `Tensor.<name>` while a forward is traced."""

        def answered(x: torch.Tensor) -> Any:
            if not isinstance(x, FakeTensor) or x.constant is not None:
                return original(x)
            known = decided(x, name, self.flags)
            known = certain(x) if known is None and name == "__bool__" else known
            if known is not None:
                return known
            answer = self._assume(sys._getframe(2)) if name in ("__bool__", "item") else None
            if answer is None and _is_drawn(x):
                raise CaptureError(f"the forward decides by a random number at {here()}", _DRAWN)
            return original(x) if answer is None else answer

        return answered

    def check(self, condition: Any, message: Any = "") -> None:
        """Stands for `torch._assert`."""
        if not isinstance(condition, FakeTensor):
            assert condition, message
        elif (value := decided(condition, "__bool__", self.flags)) is not None:
            assert value, message
        else:
            self.assumed[f"{here()} holds"] = None

    def _assume(self, frame: FrameType) -> bool | None:
        usual = usual_answer(frame)
        if usual is None:
            return None
        answer, text = usual
        place = f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        self.assumed[f"{place} `{text}` is {answer}"] = None
        return answer


def is_causal_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for torch.nn's check of a mask: any mask may be used directly, so an unknown one need not be known."""

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and isinstance(mask, FakeTensor) and decided(mask) is None:
            return False
        return bool(original(mask, is_causal, size))

    return detect


# --- what a buffer answers -------------------------------------------------------------------------------------------


class FlagBuffers:
    """Integer and boolean buffers of a model; others may come with trained weights and are asked for in vain.

    `values` are those that they have at capture.
    """

    def __init__(self, model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
        self.model, self.values = model, values
        self.answered: dict[str, str] = {}

    def known(self, tracer: Any) -> dict[fx.Node, str]:
        """The traced graph's inputs that are these buffers and were not written to so far."""
        now = {path: get_proxy_slot(value, tracer, None) for path, value in self.model.named_buffers()}
        nodes = {path: slot.proxy.node for path, slot in now.items() if slot is not None and path in self.values}
        return {node: path for path, node in nodes.items() if node.op == "placeholder"}

    def note(self, paths: Iterable[str]) -> None:
        """The forward's line that is running now was answered by these buffers."""
        self.answered |= dict.fromkeys(paths, here())

    def assumed(self) -> list[str]:
        """Sentences on what was answered."""
        return [
            f"the buffer {path} stays {_shown(self.values[path])}, which {place} asks for"
            for path, place in self.answered.items()
        ]

    def check(self, changed: Iterable[str]) -> None:
        """CaptureError where the forward changes a buffer that it was answered by."""
        for path in changed:
            if path in self.answered:
                name, place = type(self.model).__name__, self.answered[path]
                what = f"the forward decides by the buffer {path}, which it changes, at {place}"
                raise CaptureError(f"{name} can't be captured: {what}", _FIRST)


def _shown(value: torch.Tensor) -> str:
    return str(value.item()) if value.numel() == 1 else "as it is"


# --- what sizes decide ------------------------------------------------------------------------------------------------


def decided(x: torch.Tensor, name: str = "size", flags: FlagBuffers | None = None) -> Any:
    """`x.<name>()` of a traced tensor that depends on no input, parameter or random number; else None.

    `flags`: buffers that count as known; they remember that they were asked for.
    """
    traced = _traced(x)
    if traced is None:
        return None
    node, tracer = traced
    known = flags.known(tracer) if flags is not None else {}
    inputs = [n for n in _ancestors(node) if n.op == "placeholder"]
    if not all(n in known for n in inputs):
        return None
    values = {n: flags.values[known[n]] for n in inputs} if flags is not None else {}
    with ThreadPoolExecutor(1) as fresh:  # outside of the trace: modes belong to a thread
        answer = fresh.submit(_evaluate, node, tracer.root, name, values).result()
    if flags is not None and answer is not None:
        flags.note(known[n] for n in inputs)
    return answer


def _is_drawn(x: torch.Tensor) -> bool:
    """Does its value come from random numbers alone?"""
    traced = _traced(x)
    nodes = _ancestors(traced[0]) if traced is not None else set()
    return any(_draws(n) for n in nodes) and not any(n.op == "placeholder" for n in nodes)


_COMPARISONS = {"gt": False, "ge": False, "lt": True, "le": True}  # are they true of numbers below the other one?


def certain(x: torch.Tensor) -> bool | None:
    """The truth of a traced comparison of a uniform random number with one that it does not reach; else None.

    A rate of 0 that is asked for nevertheless: `torch.rand(1) > 0` is true but once in 2**24 draws.
    """
    node = (_traced(x) or (None,))[0]
    below = _COMPARISONS.get(op_name(node)) if node is not None else None
    if node is None or below is None or not isinstance(node.args[1], int | float):
        return None
    drawn = op_name(node.args[0])
    if drawn != "rand" and not (drawn == "uniform_" and node.args[0].args[1:] in ((), (0, 1))):
        return None
    return not below if node.args[1] <= 0 else below if node.args[1] >= 1 else None


def _traced(x: torch.Tensor) -> tuple[fx.Node, Any] | None:
    """The node of a tensor in the graph that is being traced, and what traces it."""
    for mode in torch.overrides._get_current_function_mode_stack():
        tracer: Any = getattr(mode, "tracer", None)
        slot = get_proxy_slot(x, tracer, None) if tracer is not None else None
        if slot is not None:
            return slot.proxy.node, tracer
    return None


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += each.all_input_nodes
    return seen


def _evaluate(node: fx.Node, root: Any, name: str, values: dict[fx.Node, Any]) -> Any:
    """Runs what was traced so far and depends on sizes and `values` alone, in order, writes in place and their views
    included."""
    known = {each: value.clone() for each, value in values.items()}
    for each in node.graph.nodes:
        held: Any = getattr(root, each.target, None) if each.op == "get_attr" else None
        if type(held) is torch.Tensor:
            known[each] = held.clone()
        elif each.op == "call_function":
            _run(each, known)
    return getattr(known[node], name)() if node in known else None


def _run(node: fx.Node, known: dict[fx.Node, Any]) -> None:
    operands, target = node.all_input_nodes, node.target
    schema = getattr(target, "_schema", None)
    writes = schema is not None and schema.is_mutable
    result = node.meta.get("val")
    small = not isinstance(result, torch.Tensor) or result.numel() <= LARGEST_ELEMENTS
    if schema is None and target is not operator.getitem:
        return
    if all(n in known for n in operands) and small and not _draws(node):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        known[node] = target(*args, **kwargs)
    elif writes:
        _forget({_storage(known[n]) for n in operands if n in known}, known)


def _forget(storages: set[Any], known: dict[fx.Node, Any]) -> None:
    for node in [node for node, value in known.items() if _storage(value) in storages]:
        del known[node]


def _storage(value: Any) -> Any:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else id(value)


# --- what a guard asks ------------------------------------------------------------------------------------------------


def usual_answer(frame: FrameType) -> tuple[bool, str] | None:
    """The answer that a running guard usually gets, and the text of what it asks; None where the line is no guard."""
    question = _tested_expression(frame)
    if question is None:
        return None
    expression, parents, source = question
    answer = _finite(expression)
    if answer is None:
        answer = _passing(expression, parents)
    return None if answer is None else (answer, ast.get_source_segment(source, expression) or "")


def _tested_expression(frame: FrameType) -> tuple[ast.expr, list[ast.AST], str] | None:
    """The expression whose truth a frame is asking for, and what stands around it, innermost first."""
    code = list(dis.get_instructions(frame.f_code))
    at = max((i for i, step in enumerate(code) if step.offset <= frame.f_lasti), default=0)  # its caches follow it
    step = code[at]
    if "CALL" not in step.opname and step.opname != "COMPARE_OP":  # a jump tests what the instruction before it made
        step = code[max(0, at - 1)]
    place, source = step.positions, _source(frame.f_code.co_filename)
    if place is None or place.lineno is None or not source:
        return None
    wanted = (place.lineno, place.end_lineno, place.col_offset, place.end_col_offset)
    stack: list[tuple[ast.AST, list[ast.AST]]] = [(_tree(source), [])]
    while stack:
        node, parents = stack.pop()
        if isinstance(node, ast.expr) and _position(node) == wanted:
            return node, parents, source
        stack += [(child, [node, *parents]) for child in ast.iter_child_nodes(node) if _covers(child, place.lineno)]
    return None


@cache
def _source(filename: str) -> str:
    try:
        return Path(filename).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@cache
def _tree(source: str) -> ast.AST:
    return ast.parse(source)


def _position(node: ast.expr) -> tuple[Any, ...]:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def _covers(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", line), getattr(node, "end_lineno", line)
    return bool(first <= line <= last)


_BAD, _GOOD = ("isnan", "isinf", "isposinf", "isneginf"), ("isfinite", "isreal")
_SAME = ("any", "all", "sum", "max", "min", "item", "bool", "flatten", "view", "reshape", "nonzero", "to", "cpu")
_EITHER, _BOTH = ("logical_or", "bitwise_or"), ("logical_and", "bitwise_and")


def _finite(node: ast.AST) -> bool | None:
    """The truth of a question after inf and NaN of numbers that are finite; None for other questions."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        inner = _finite(node.operand)
        return None if inner is None else not inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd):
        return _joined(isinstance(node.op, ast.BitOr), [node.left, node.right])
    if isinstance(node, ast.BoolOp):
        return _joined(isinstance(node.op, ast.Or), list(node.values))
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in (*_BAD, *_GOOD):
        return name in _GOOD
    is_method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") != "torch"
    operands = [*([node.func.value] if isinstance(node.func, ast.Attribute) and is_method else []), *node.args]
    if name in (*_EITHER, *_BOTH):
        return _joined(name in _EITHER, operands)
    if name in _SAME and operands:
        return _finite(operands[0])
    if name == "logical_not" and operands:
        inner = _finite(operands[0])
        return None if inner is None else not inner
    return None


def _joined(either: bool, parts: list[ast.expr]) -> bool | None:
    values = [_finite(part) for part in parts]
    if None in values:
        return None
    return any(values) if either else all(values)


def _passing(expression: ast.AST, parents: list[ast.AST]) -> bool | None:
    """The truth of `expression` with which an `assert` holds, or a branch that only raises is not taken."""
    flipped, child = False, expression
    for parent in parents:
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            flipped = not flipped
        elif isinstance(parent, ast.Assert) and parent.test is child:
            return not flipped
        elif isinstance(parent, ast.If) and parent.test is child:
            wanted = _wanted(parent)
            return None if wanted is None else wanted != flipped
        elif not isinstance(parent, ast.BoolOp | ast.Call):
            return None
        child = parent
    return None


def _wanted(branch: ast.If) -> bool | None:
    """The truth of the test of a branch with which nothing is raised."""
    if _raises(branch.body):
        return False
    return True if _raises(branch.orelse) else None


def _raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)
