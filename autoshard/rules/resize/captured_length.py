"""Numbers of a graph that follow the sequence length, and their slopes, from the same model at another length.

A second capture tells. If it is the same graph but for its numbers, each of them is taken to be `n + slope * (length -
own)`, which a third capture must confirm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from autoshard.errors import UsageError
from autoshard.graph_capture.dynamic_sizes.graph_numbers import numbers_of
from autoshard.graph_capture.dynamic_sizes.numbers import ends_of, kind_of, plain
from autoshard.graph_capture.dynamic_sizes.sequence_inputs import sequence_dims
from autoshard.graph_capture.passes.noops import drop_noops
from autoshard.graph_capture.passes.op_names import rename
from autoshard.graph_capture.training.overwritten_buffers import note_saved
from autoshard.ir.graph import Following, FreeSize, Graph, Op
from autoshard.rules.op_labels import described, line_of, short

SEQUENCE = "sequence"
Slopes = dict[str, Fraction]  # place -> of what is not 0


def sequence_length(graph: Graph) -> int:
    """Length of the sequences among the graph's inputs; 0 without any."""
    tensors = [graph.tensor(name) for name in graph.inputs]
    return sequence_dims([t.shape for t in tensors], ["float" in t.dtype for t in tensors])[0]


def slopes_between(graph: Graph, carried: Graph, captured: Graph, length: int) -> Slopes:
    """Slopes of the numbers of `graph` in its length, by `captured`, the same model with sequences of `length`.

    `carried`: `graph` by the rules at the batch of `captured`. UsageError names what else differs.
    """
    base = sequence_length(graph)
    _check_kinds(carried, captured, base, length)
    mine, theirs, there = numbers_of(graph), numbers_of(carried), numbers_of(captured)
    slopes = {}
    for place, number in there.items():
        grown = Fraction(number) * mine[place] / theirs[place] if theirs[place] else Fraction(number)
        if grown != mine[place]:
            if length == base:
                raise _number(captured, base, length, place, number, mine[place])
            slopes[place] = (grown - mine[place]) / (length - base)
    return slopes


def check_same(carried: Graph, captured: Graph, base: int) -> None:
    """Raises UsageError if `captured`, of a model planned with sequences of `base`, is another graph than `carried`.

    A slice of a whole table is none.
    """
    if len(carried.ops) != len(captured.ops):
        carried = rename(drop_noops(carried))
    length = sequence_length(captured)
    _check_kinds(carried, captured, base, length)
    mine, there = numbers_of(carried), numbers_of(captured)
    for place, number in there.items():
        if mine[place] != number:
            raise _number(captured, base, length, place, number, mine[place])


def _check_kinds(carried: Graph, captured: Graph, base: int, length: int) -> None:
    """Checks that all but whole numbers is the same."""
    for before, op in zip(carried.ops, captured.ops, strict=False):
        if kind_of(carried, before) != kind_of(captured, op):
            there, here = _differing(captured, op, carried, before)
            raise _other(base, length, there, here)
    if len(carried.ops) != len(captured.ops) or ends_of(carried) != ends_of(captured):
        raise _other(base, length, "other operators, outputs or stored tensors", "its own")
    if numbers_of(carried).keys() != numbers_of(captured).keys():
        raise _other(base, length, "other tensors", "its own")


def relengthened(graph: Graph, length: int) -> Graph:
    """`graph` for sequences of `length`, by what its `free_sizes` say. UsageError if a number would not be whole."""
    base = sequence_length(graph)
    if length == base:
        return graph
    size = next(size for size in graph.free_sizes if size.name == SEQUENCE)
    grown = {place: slope * (length - base) for place, slope in slopes_of(size).items()}
    tensors = {t.name: replace(t, shape=_grown(t.name, t.shape, grown, length)) for t in graph.tensors}
    ops = tuple(
        replace(
            op,
            attributes=tuple(
                (name, _grown(f"{op.name} {name}", value, grown, length)) for name, value in op.attributes
            ),
        )
        for op in graph.ops
    )
    return note_saved(replace(graph, tensors=tuple(tensors.values()), ops=ops))


def slopes_of(size: FreeSize) -> Slopes:
    return {place: Fraction(one.slope) for one in size.follows for place in one.places}


def follows_of(slopes: Mapping[str, Fraction]) -> tuple[Following, ...]:
    """Slopes as a graph keeps them: the places of each slope, in order."""
    kinds = sorted(set(slopes.values()))
    return tuple(Following(str(kind), tuple(p for p, slope in slopes.items() if slope == kind)) for kind in kinds)


def at_another_batch(size: FreeSize, graph: Graph, rebatched: Graph) -> FreeSize:
    """`size` of `graph` as it is for `rebatched`, the same at another batch: what follows both grows with it."""
    mine, theirs = numbers_of(graph), numbers_of(rebatched)
    slopes = {p: s * theirs[p] / mine[p] if mine[p] else s for p, s in slopes_of(size).items()}
    return replace(size, follows=follows_of(slopes))


def _grown(place: str, value: Any, grown: Mapping[str, Fraction], length: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_grown(f"{place} {i}", part, grown, length) for i, part in enumerate(value))
    if place not in grown:
        return value
    number = value + grown[place]
    if number.denominator != 1:
        what = f"{place} does not grow evenly with the sequences: with {length} it would be {float(number):g}"
        raise UsageError(what, "a plan of its own")
    return int(number)


def _differing(graph: Graph, op: Op, other: Graph, before: Op) -> tuple[str, str]:
    """Two operators in words, or the argument in which one differs from its counterpart."""
    if (op.target, op.operands) == (before.target, before.operands):
        attributes = dict(before.attributes)
        for name, value in op.attributes:
            if name in attributes and plain(value) != plain(attributes[name]):
                return f"{name} of {described(graph, op)} is {short(value)}", short(attributes[name])
    return described(graph, op), described(other, before)


def _number(graph: Graph, base: int, length: int, place: str, number: int, expected: int) -> UsageError:
    """UsageError on a whole number that does not follow the length evenly."""
    name, _, argument = place.partition(" ")
    op = graph.by_op.get(name) or graph.producers.get(name)
    at = f"{argument} of {described(graph, op)}" if op and name in graph.by_op else f"a size of {name}"
    at += f" at {line_of(graph, op)}" if op and name not in graph.by_op else ""
    return _other(base, length, f"{at} is {number}", f"{expected}, were it to grow evenly")


def _other(base: int, length: int, there: str, here: str) -> UsageError:
    what = f"with sequences of {length} the model computes something else than with {base}: {there} in place of {here}"
    return UsageError(what, "a plan of its own")
