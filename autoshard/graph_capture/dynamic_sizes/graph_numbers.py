"""The whole numbers of a graph by where they stand, and the graph at other dynamic sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.errors import UsageError
from autoshard.ir.dynamic import Polynomial, value_at
from autoshard.ir.graph import Attribute, Graph, Op


def numbers_of(graph: Graph) -> dict[str, int]:
    """Each whole number of the graph, by its place: "tensor dim", or "op argument" and where in it."""
    numbers = {f"{t.name} {dim}": size for t in graph.tensors for dim, size in enumerate(t.shape)}
    for op in graph.ops:
        numbers.update(numbers_of_op(op))
    return numbers


def numbers_of_op(op: Op) -> dict[str, int]:
    """Whole numbers in the arguments of `op`, by place."""
    return {
        place: number for name, value in op.attributes for place, number in _of_attribute(f"{op.name} {name}", value)
    }


def _of_attribute(place: str, value: Attribute) -> Iterator[tuple[str, int]]:
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _of_attribute(f"{place} {i}", part)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield place, value


def with_numbers(graph: Graph, numbers: Mapping[str, int]) -> Graph:
    """`graph` with other whole numbers at these places."""
    tensors = tuple(replace(t, shape=_placed(t.name, t.shape, numbers)) for t in graph.tensors)
    ops = tuple(
        replace(op, attributes=tuple((name, _placed(f"{op.name} {name}", arg, numbers)) for name, arg in op.attributes))
        for op in graph.ops
    )
    return replace(graph, tensors=tensors, ops=ops)


def _placed(place: str, value: Any, numbers: Mapping[str, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_placed(f"{place} {i}", part, numbers) for i, part in enumerate(value))
    return numbers.get(place, value)


def sizes_of(graph: Graph) -> dict[str, int]:
    """Current dynamic sizes of `graph`."""
    return {size.name: graph.tensor(size.dims[0][0]).shape[size.dims[0][1]] for size in graph.dynamic}


def at_sizes(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """`graph` at any sizes at which its numbers are whole; what autograd keeps (`Op.saved`) stays that of `graph`."""
    point = tuple(sizes[size.name] for size in graph.dynamic)
    numbers: dict[str, int] = {}
    for follows in graph.follows:
        number = value_at(follows.polynomial(), point)
        if number.denominator != 1:
            message = f"{place_words(graph, follows.places[0])} would be {float(number):g}"
            raise UsageError(f"at {words([size.name for size in graph.dynamic], point)} {message}", "another size")
        numbers |= dict.fromkeys(follows.places, int(number))
    return with_numbers(graph, numbers)


def words(names: Sequence[str], point: Sequence[int]) -> str:
    """Sizes as a sentence has them."""
    return ", ".join(f"{name} {size}" for name, size in zip(names, point, strict=True))


def place_words(graph: Graph, place: str) -> str:
    """A place of a number, with the operator and its line."""
    name = place.partition(" ")[0]
    op = graph.by_op.get(name) or graph.producers.get(name)
    return f"a size of {op.name} ({op.target}) at {op.source or 'an unknown line'}" if op else f"a size of {name}"


def shape_at(graph: Graph, tensor: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one tensor at these dynamic sizes."""
    known, point = graph.once(_by_place), tuple(sizes[size.name] for size in graph.dynamic)
    shape = graph.tensor(tensor).shape
    return tuple(
        int(value_at(known[place], point)) if (place := f"{tensor} {dim}") in known else size
        for dim, size in enumerate(shape)
    )


def _by_place(graph: Graph) -> dict[str, Polynomial]:
    return {place: follows.polynomial() for follows in graph.follows for place in follows.places}
