"""A graph that was carried to another batch, held against the model itself captured there.

Rules follow shapes. What the model's own code computes of its batch, a number (`loss / len(x)`) or a branch, is in no
rule: only a second capture tells. Where both graphs compute the same but for numbers, the captured ones are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

from autoshard.errors import CaptureError, UsageError, UserError
from autoshard.graph_capture.model_spec import holds_graph
from autoshard.ir.graph import Attribute, FreeSize, Graph, Op
from autoshard.rules.rebatch import batch_size, rebatched

LESS, MORE = 2, 64  # the batch captured, divided and multiplied
MOST_SAID, LONGEST = 3, 24  # numbers in a note, and letters of one


def with_free_sizes(graph: Graph, again: Callable[[int, int], Graph], more: int = MORE) -> Graph:
    """`graph`, just captured, with what was tried: whether its batch can change and nothing else does.

    `again(own, samples)` captures the same model with `samples` in place of `own`. Tried are a `LESS`th and
    `more` times its own: a model could do something else of fewer, or of more (`if len(x) < 4`).
    """
    try:
        own = batch_size(graph)
    except UserError as error:
        return replace(graph, free_sizes=(FreeSize("batch", error.message, 0, 0),))
    tried = max(1, own // LESS), own * more
    return replace(graph, free_sizes=(FreeSize("batch", _why_fixed(graph, own, tried, again), *tried),))


def _why_fixed(graph: Graph, own: int, tried: Iterable[int], again: Callable[[int, int], Graph]) -> str:
    """Why a package can't take another batch, "" where the model does nothing else of those tried."""
    try:
        for samples in tried:
            carried = rebatched(graph, samples)
            with redirect_stdout(StringIO()):  # what it prints as it is built was printed before
                captured = again(own, samples)
            told = followed_numbers(with_numbers_of(carried, captured, own), carried)
            if told:
                return told[0]
    except UserError as error:
        return error.message
    return ""


def captured_with(graph: Graph, spec: str, arguments: Mapping[str, Any], own: int) -> Graph:
    """`graph`, of the model `spec` carried from `own` samples to those that it has, with the numbers that the model
    computes there. UsageError where it computes anything else; a graph from a file, whose model is not there, stays."""
    samples = batch_size(graph)
    if samples == own or holds_graph(spec):
        return graph
    from autoshard.graph_capture.capture import capture
    from autoshard.graph_capture.other_samples import with_samples

    try:
        with redirect_stdout(StringIO()):  # what it prints as it is built was printed before
            captured = capture(
                spec, arguments, graph.precision, graph.optimizer, graph.training,
                lambda inputs: with_samples(inputs, own, samples),
            )  # fmt: skip
    except CaptureError as error:
        raise _other_model(own, samples, error.message) from error
    return with_numbers_of(graph, captured, own)


def with_numbers_of(graph: Graph, captured: Graph, own: int) -> Graph:
    """`graph`, carried over from `own` samples, with the arguments of `captured`, the same model captured at this
    batch. UsageError names the first operator that is not the same."""
    differs = _difference(graph, captured)
    if differs:
        raise _other_model(own, batch_size(graph), differs)
    if not any(_others(one, other) for one, other in _pairs(graph, captured)):
        return graph
    made = replace(graph, ops=captured.ops)
    told = followed_numbers(made, graph)[0]  # numbers of this batch alone: what was tried of others was with the old
    return replace(made, free_sizes=tuple(replace(size, fixed=size.fixed or told) for size in graph.free_sizes))


def followed_numbers(graph: Graph, carried: Graph) -> list[str]:
    """That numbers of `graph` are others than rules `carried` there, in words."""
    told: dict[str, None] = {}
    for one, other in _pairs(graph, carried):
        for (name, new), (_, old) in zip(one.attributes, other.attributes, strict=True):
            if repr(new) != repr(old):
                is_now = f"is {_short(new)}, where {_short(old)} was captured"
                told[f"{name} of {_kind(one)} at {_line(graph, one)} {is_now}"] = None
    if not told:
        return []
    more = f"; and {len(told) - MOST_SAID} more" if len(told) > MOST_SAID else ""
    return [f"the model computes numbers of its batch: {'; '.join(list(told)[:MOST_SAID])}{more}"]


def _difference(graph: Graph, captured: Graph) -> str:
    """The first that is more than a number; "" where there is none."""
    for one, other in _pairs(graph, captured):
        if _fixed(graph, one) != _fixed(captured, other):
            return f"{_told(captured, other)} in place of {_told(graph, one)}"
        if _others(one, other) and one.name in graph.rule_of:
            return f"{_told(captured, other)} has other arguments, and its rule was found by trial"
    if len(graph.ops) != len(captured.ops):
        longer, shorter = sorted((graph, captured), key=lambda made: -len(made.ops))
        told = _told(longer, longer.ops[len(shorter.ops)])
        return f"{told} is left out" if longer is graph else f"{told} comes in addition"
    return "" if _ends(graph) == _ends(captured) else "other outputs, or stored tensors"


def _pairs(graph: Graph, other: Graph) -> Iterator[tuple[Op, Op]]:
    return zip(graph.ops, other.ops, strict=False)


def _fixed(graph: Graph, op: Op) -> tuple[object, ...]:
    """All but numbers among the arguments."""
    tensors = [None if name is None else graph.tensor(name) for name in (*op.operands, *op.results)]
    return op.name, op.target, op.operands, op.results, op.module, [name for name, _ in op.attributes], tensors


def _ends(graph: Graph) -> tuple[object, ...]:
    stored = [(p.tensor, p.path, graph.tensor(p.tensor)) for p in (*graph.parameters, *graph.buffers)]
    return graph.inputs, graph.outputs, graph.loss, graph.buffer_updates, stored


def _told(graph: Graph, op: Op) -> str:
    shape = " and ".join(str(graph.tensor(name).shape) for name in op.results)
    return f"{op.name} ({op.target}, {shape}) at {_line(graph, op)}"


def _others(one: Op, other: Op) -> bool:
    """Has it other arguments? By their text: a NaN among them is itself."""
    return one.attributes != other.attributes and repr(one.attributes) != repr(other.attributes)


def _short(value: Attribute) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _kind(op: Op) -> str:
    return op.target.partition(".")[2]


def _line(graph: Graph, op: Op) -> str:
    """Of the model's code; a constant has that of its first reader."""
    readers = [reader for name in op.results for reader, _ in graph.consumers[name]]
    return next((own.source for own in (op, *readers) if own.source), op.module or "the model")


def _other_model(own: int, samples: int, told: str) -> UsageError:
    what = f"the model computes something else of {samples} samples, as planned, than of the {own} captured: {told}"
    return UsageError(what, f"capture it with {samples} samples, or another --micro-batch")
