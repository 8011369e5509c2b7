"""Comparison of a graph carried to another batch with the model itself captured there.

Rules follow shapes. A number (`loss / len(x)`) or a branch that the model's own code computes from its batch is in no
rule: only a second capture tells. If both graphs compute the same but for numbers, the captured ones are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

from autoshard.errors import NAMED, CaptureError, UsageError
from autoshard.graph_capture.model_spec import holds_graph
from autoshard.ir.graph import Graph, Op
from autoshard.rules.op_labels import described, line_of, short
from autoshard.rules.resize.rebatch import batch_size


def captured_with(
    graph: Graph, spec: str, arguments: Mapping[str, Any], count: int, dynamic: tuple[str, ...] = ()
) -> Graph:
    """`graph`, of the model `spec` carried from `count` samples to those that it has, with the numbers that the model
    computes there. `dynamic`: its sizes, as --dynamic has them. UsageError if it computes anything else; a graph from a
    file, whose model is not there, stays."""
    samples = batch_size(graph)
    if samples == count or holds_graph(spec):
        return graph
    from autoshard.graph_capture.capture import capture
    from autoshard.graph_capture.dynamic_export.concrete import with_samples

    try:
        with redirect_stdout(StringIO()):  # what it prints as it is built was printed before
            captured = capture(
                spec, arguments, graph.precision, graph.optimizer, graph.training,
                lambda inputs: with_samples(inputs, count, samples), dynamic=dynamic,
            )  # fmt: skip
    except CaptureError as error:
        raise _other_model(count, samples, error.message) from error
    return with_numbers_of(graph, captured, count)


def with_numbers_of(graph: Graph, captured: Graph, count: int) -> Graph:
    """`graph`, carried over from `count` samples, with the arguments of `captured`, the same model captured at this
    batch. UsageError names the first operator that is not the same."""
    differs = _difference(graph, captured)
    if differs:
        raise _other_model(count, batch_size(graph), differs)
    if not any(_others(one, other) for one, other in _pairs(graph, captured)):
        return graph
    copy = replace(graph, ops=captured.ops, follows=captured.follows)
    message = followed_numbers(copy, graph)[0]  # numbers of this batch alone: what was tried of others was with the old
    return replace(copy, free_sizes=tuple(replace(size, fixed=size.fixed or message) for size in graph.free_sizes))


def followed_numbers(graph: Graph, carried: Graph) -> list[str]:
    """Sentence on the numbers of `graph` that differ from those that rules `carried` there; [] if none does."""
    message: dict[str, None] = {}
    for one, other in _pairs(graph, carried):
        for (name, new), (_, old) in zip(one.attributes, other.attributes, strict=True):
            if repr(new) != repr(old):
                is_now = f"is {short(new)}, where {short(old)} was captured"
                message[f"{name} of {_kind(one)} at {line_of(graph, one)} {is_now}"] = None
    if not message:
        return []
    more = f"; and {len(message) - NAMED} more" if len(message) > NAMED else ""
    return [f"the model computes numbers of its batch: {'; '.join(list(message)[:NAMED])}{more}"]


def _difference(graph: Graph, captured: Graph) -> str:
    """First difference that is more than a number; "" if there is none."""
    for one, other in _pairs(graph, captured):
        if _fixed(graph, one) != _fixed(captured, other):
            return f"{described(captured, other)} in place of {described(graph, one)}"
        if _others(one, other) and one.name in graph.rule_of:
            return f"{described(captured, other)} has other arguments, and its rule was found by trial"
    if len(graph.ops) != len(captured.ops):
        longer, shorter = sorted((graph, captured), key=lambda version: -len(version.ops))
        message = described(longer, longer.ops[len(shorter.ops)])
        return f"{message} is left out" if longer is graph else f"{message} comes in addition"
    return "" if _ends(graph) == _ends(captured) else "other outputs, or stored tensors"


def _pairs(graph: Graph, other: Graph) -> Iterator[tuple[Op, Op]]:
    return zip(graph.ops, other.ops, strict=False)


def _fixed(graph: Graph, op: Op) -> tuple[object, ...]:
    """Arguments of an operator except numbers."""
    tensors = [None if name is None else graph.tensor(name) for name in (*op.operands, *op.results)]
    return op.name, op.target, op.operands, op.results, op.module, [name for name, _ in op.attributes], tensors


def _ends(graph: Graph) -> tuple[object, ...]:
    stored = [(p.tensor, p.path, graph.tensor(p.tensor)) for p in (*graph.parameters, *graph.buffers)]
    return graph.inputs, graph.outputs, graph.loss, graph.buffer_updates, stored


def _others(one: Op, other: Op) -> bool:
    """True if the arguments differ, by their text: a NaN among them equals itself."""
    return one.attributes != other.attributes and repr(one.attributes) != repr(other.attributes)


def _kind(op: Op) -> str:
    return op.target.partition(".")[2]


def _other_model(count: int, samples: int, reason: str) -> UsageError:
    what = f"the model computes something different for {samples} samples, as planned, than for the {count} captured"
    return UsageError(f"{what}: {reason}", f"capture it with {samples} samples, or another --micro-batch")
