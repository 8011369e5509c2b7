"""Strategies in the model's own code: `operator(torch.matmul, in_strategy=((2, 4), (4, 1)))(x, w)`.

They do nothing where the model runs alone. While it is captured, torch's annotations of graphs carry them to the
operators, whose source they stand behind until all passes ran.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.fx.traceback import annotate

from autoshard.errors import CaptureError, UsageError
from autoshard.graph_capture.passes.rewrite import MARK
from autoshard.ir.graph import Graph, Op
from autoshard.rules.operators import record

_Result = TypeVar("_Result")
_KEY, _MARK = "autoshard", MARK
_NUMBERS = itertools.count(1)
_MEMORIES = {"CPU": "host", "GPU": "device", "Ascend": "device"}  # the target of an operator -> as a pin says it
_HINT = "in_strategy=((2, 4), (4, 1)): for each tensor how often each dim is cut, or None"


def operator(
    fn: Callable[..., _Result],
    in_strategy: Any = None,
    out_strategy: Any = None,
    *,
    primitive_target: str | None = None,
) -> Callable[..., _Result]:
    """`fn`, with its operator split: shard counts for the dims of each tensor, and of its results as others read them.

    A layout of its first result, `"Shard(0)@dp"`, may stand for `in_strategy`. What is None is searched. Where several
    mesh axes give a count, the search decides. `primitive_target="CPU"`: a look-up in a table that runs on the host,
    where the table then lies with its optimizer state; another device's name forbids that.
    """
    how = _how(in_strategy, out_strategy, primitive_target)

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> _Result:
        with _annotated(how):
            return fn(*args, **kwargs)

    return run


@contextlib.contextmanager
def strategy(
    in_strategy: Any = None, out_strategy: Any = None, *, primitive_target: str | None = None
) -> Iterator[None]:
    """Split operators of the block as `operator` does, if their dims match the counts; the target is for look-ups."""
    with _annotated(_how(in_strategy, out_strategy, primitive_target)):
        yield


@contextlib.contextmanager
def _annotated(how: str) -> Iterator[None]:
    if not torch.compiler.is_exporting():
        yield
        return
    with annotate({_KEY: f"{next(_NUMBERS)}{_MARK}{how}"}):
        yield


def _how(in_strategy: Any, out_strategy: Any, target: str | None = None) -> str:
    """Strategy as a pin writes it, checked. UsageError names an impossible count."""
    if target is not None and target not in _MEMORIES:
        near = difflib.get_close_matches(str(target).upper(), _MEMORIES, 1) or ["CPU"]
        known = ", ".join(map(repr, _MEMORIES))
        raise UsageError(f"primitive_target {target!r}: expected {known}", f"primitive_target={near[0]!r}")
    memory = f" {_MEMORIES[target]}" if target else ""
    if in_strategy is None and out_strategy is None:
        if not target:
            raise UsageError("neither in_strategy nor out_strategy is given", _HINT)
        return memory.strip()
    if isinstance(in_strategy, str):
        if out_strategy is not None:
            raise UsageError(
                "a layout as in_strategy is also that of the result, and out_strategy is given", "one of the two"
            )
        return in_strategy + memory
    _check("in_strategy", in_strategy)
    _check("out_strategy", out_strategy)
    return repr((in_strategy, out_strategy)) + memory


def _check(name: str, strategy: Any) -> None:
    if strategy is None:
        return
    if not isinstance(strategy, tuple | list):
        raise UsageError(f"{name} is {strategy!r}, expected a tuple with an entry for each tensor", _HINT)
    for number, cut in enumerate(strategy):
        if cut is not None and isinstance(cut, tuple | list) and name == "in_strategy":
            for lengths in (entry for entry in cut if isinstance(entry, tuple | list)):  # unequal parts
                _check(name, [lengths])
            cut = tuple(len(entry) if isinstance(entry, tuple | list) else entry for entry in cut)
        if cut is not None and not (isinstance(cut, tuple | list) and all(type(n) is int for n in cut)):
            raise UsageError(f"{name}[{number}] is {cut!r}: expected whole numbers, one a dim, or None", _HINT)
        if cut is not None and any(n < 1 for n in cut):
            raise UsageError(f"{name}[{number}] is {cut!r}: a dim is cut at least once, got {min(cut)}", _HINT)


# --- in a graph -----------------------------------------------------------------------------------------------------


def mark_of(meta: Mapping[str, Any]) -> str:
    """Mark that follows the source of an annotated node's operator; "" without an annotation."""
    text = (meta.get("custom") or {}).get(_KEY)
    return f"{_MARK}{text}" if text else ""


def marks(graph: Graph) -> dict[str, str]:
    """Number of each annotation -> where it is."""
    marked = (op.source.split(_MARK) for op in graph.ops if _MARK in op.source)
    return {number: source for source, number, _ in marked}


def noted(graph: Graph, before: Mapping[str, str]) -> Graph:
    """The graph with its `strategies`. CaptureError where a pass left none of an annotation's operators."""
    groups: dict[str, list[Op]] = {}
    for op in graph.ops:
        if _MARK in op.source:
            groups.setdefault(op.source.split(_MARK)[1], []).append(op)
    for number, source in before.items():
        if number not in groups:
            what = f"the strategy at {source} is for an operator that capture leaves out or merges with others"
            raise CaptureError(what, "a strategy on another operator")
    if not before:
        return graph
    pairs = [pair for group in groups.values() for pair in _pairs(graph, group)]
    order = {op.name: number for number, op in enumerate(graph.ops)}
    ops = tuple(replace(op, source=op.source.partition(_MARK)[0]) for op in graph.ops)
    return replace(graph, ops=ops, strategies=tuple(sorted(pairs, key=lambda pair: order[pair[0]])))


def _pairs(graph: Graph, group: list[Op]) -> list[tuple[str, str]]:
    """Pairs (operator, strategy) of an annotation; of several operators, those whose tensors have the counts' dims."""
    how = group[0].source.split(_MARK)[2]
    cut_text, space, memory = how.rpartition(" ")
    if not (space and memory in _MEMORIES.values()) and how not in _MEMORIES.values():
        cut_text, memory = how, ""
    if memory:
        group = _look_ups(group)
    if not cut_text.startswith("("):
        return [(op.name, how) for op in group]
    cuts, out_cuts = ast.literal_eval(cut_text)
    fitting = [op for op in group if _fits(graph, op, cuts)] if len(group) > 1 else group
    if not fitting:
        kinds = ", ".join(dict.fromkeys(op.target for op in group))
        where = group[0].source.partition(_MARK)[0]
        raise CaptureError(f"in_strategy {cuts} fits none of {kinds} at {where}", "a count for each dim of each tensor")
    return [(op.name, " ".join(filter(None, [_pin(op, cuts, out_cuts), memory]))) for op in fitting]


def _look_ups(group: list[Op]) -> list[Op]:
    """Look-ups among the operators, which alone can have a target. CaptureError if there are none."""
    look_ups = [op for op in group if record(op.target).on_host]
    if not look_ups:
        kinds, where = ", ".join(dict.fromkeys(op.target for op in group)), group[0].source.partition(_MARK)[0]
        message = f"primitive_target at {where}: {kinds} can't run on the host: only look-ups in a table can"
        raise CaptureError(message, "primitive_target on nn.Embedding, nn.EmbeddingBag or F.embedding")
    return look_ups


def _fits(graph: Graph, op: Op, cuts: Any) -> bool:
    present = [name for name in op.operands if name is not None]
    ranks = [len(graph.tensor(name).shape) for name in present]
    lengths = [None if cut is None else len(cut) for cut in cuts or ()]
    return len(lengths) <= len(ranks) and all(cut in (None, rank) for cut, rank in zip(lengths, ranks, strict=False))


def _pin(op: Op, cuts: Any, out_cuts: Any) -> str:
    """Pin for an operator; tensors without counts, like a bias after the weight, are free."""
    present = sum(name is not None for name in op.operands)
    in_cuts = tuple(None if cut is None else tuple(cut) for cut in cuts or ())
    padded = in_cuts + (None,) * (present - len(in_cuts))
    results = "" if out_cuts is None else f" -> {tuple(None if cut is None else tuple(cut) for cut in out_cuts)}"
    return f"{padded}{results}"
