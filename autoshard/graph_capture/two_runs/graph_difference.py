"""Difference between two graphs, each captured in its mode: the line where they part."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from autoshard.ir.graph import Graph, Op

DROPS = frozenset({
    "aten.dropout", "aten.alpha_dropout", "aten.feature_dropout", "aten.feature_alpha_dropout",
})  # fmt: skip


def difference(training: Graph, evaluation: Graph) -> str:
    """Line of the model's code where two captured forwards part, but for dropout; "" if they compute the same."""
    numbers: dict[Any, int] = {}
    one, other = _numbers(training, True, numbers), _numbers(evaluation, False, numbers)
    if [one[name] for name in training.outputs] == [other[name] for name in evaluation.outputs]:
        return ""
    parted = [*_only(evaluation, other, set(one.values())), *_only(training, one, set(other.values()))]
    return min(parted, key=lambda entry: entry[0])[1] if parted else "an operator without a line"


def _numbers(graph: Graph, training: bool, numbers: dict[Any, int]) -> dict[str | None, int]:
    by_value: dict[str | None, int] = {None: -1}
    for name in (*graph.inputs, *(p.tensor for p in (*graph.parameters, *graph.buffers))):
        by_value[name] = numbers.setdefault(("named", name), len(numbers))
    for op in graph.ops:
        attributes = dict(op.attributes)
        if op.target in DROPS and (training or not attributes.get("train") or attributes.get("p") == 0):
            by_value[op.results[0]] = by_value[op.operands[0]]
            continue
        if training or attributes.get("dropout") == 0:
            attributes |= {name: value for name, value in _UNUSED.items() if name in attributes and _drops_inside(op)}
        key = (op.target, *(by_value[x] for x in op.operands), repr(sorted(attributes.items())))  # NaN equals nothing
        for position, result in enumerate(op.results):
            by_value[result] = numbers.setdefault((key, position), len(numbers))
    return by_value


_UNUSED = {"train": False, "dropout_p": 0.0}


def _drops_inside(op: Op) -> bool:
    return op.target in ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu") or "attention" in op.target


def _only(graph: Graph, numbers: Mapping[str | None, int], others: Container[int]) -> Iterator[tuple[int, str]]:
    """The operators behind the outputs that only this graph has, by their places and lines."""
    live = {*graph.outputs}
    for op in reversed(graph.ops):
        if live & {*op.results}:
            live |= {x for x in op.operands if x is not None}
    for place, op in enumerate(graph.ops):
        if live & {*op.results} and op.source and any(numbers[result] not in others for result in op.results):
            yield place, op.source
