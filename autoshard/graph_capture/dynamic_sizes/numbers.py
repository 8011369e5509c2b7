"""The numbers of a graph that follow its dynamic sizes, and what else two graphs of one program have alike."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from autoshard.errors import CaptureError, UsageError
from autoshard.graph_capture.dynamic_sizes.graph_numbers import at_sizes, numbers_of, place_words, sizes_of, words
from autoshard.graph_capture.dynamic_sizes.polynomials import Point, polynomial_of
from autoshard.graph_capture.training.overwritten_buffers import note_saved
from autoshard.ir.dynamic import DynamicSize, Follows, terms_of
from autoshard.ir.graph import Attribute, Graph, Op, Tensor

TENSOR_FOR_FLOAT = "a float of a size as a tensor: x.new_ones(size).sum().sqrt()"


def kind_of(graph: Graph, op: Op) -> tuple[object, ...]:
    """Everything of an operator but its whole numbers."""
    tensors = [None if name is None else _kind(graph.tensor(name)) for name in (*op.operands, *op.results)]
    attributes = [(name, plain(value)) for name, value in op.attributes]
    return op.name, op.target, op.operands, op.results, op.module, attributes, tensors


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.name, len(tensor.shape), tensor.dtype, tensor.requires_grad


def plain(value: Attribute) -> object:
    """An argument without its whole numbers."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return 0 if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def ends_of(graph: Graph) -> tuple[object, ...]:
    """Inputs, outputs and stored tensors, whose sizes stay."""
    stored = [(p.tensor, p.path, graph.tensor(p.tensor)) for p in (*graph.parameters, *graph.buffers)]
    return graph.inputs, graph.outputs, graph.loss, graph.buffer_updates, stored


# --- numbers that follow dynamic sizes ---


def follows_of(graphs: Sequence[Graph], points: Sequence[Point], names: Sequence[str]) -> tuple[Follows, ...]:
    """The numbers that differ, as polynomials; `graphs` are of one program, at `points`. CaptureError names an operator
    that is another one at another point, or a number that is no polynomial."""
    first = graphs[0]
    for other, point in zip(graphs[1:], points[1:], strict=True):
        _check_alike(first, other, points[0], point, names)
    every = [numbers_of(graph) for graph in graphs]
    places: dict[tuple[int, ...], list[str]] = {}
    for place in every[0]:
        values = tuple(numbers[place] for numbers in every)
        if len(set(values)) > 1:
            places.setdefault(values, []).append(place)
    follows = []
    for values, group in places.items():
        polynomial = polynomial_of(values, points)
        if polynomial is None:
            sizes = " and ".join(
                f"{value} at {words(names, point)}" for value, point in zip(values, points, strict=True)
            )
            message = f"{place_words(first, group[0])} does not follow the dynamic sizes evenly: {sizes}"
            raise CaptureError(message, "a divisor with which it does, as /32 for an image that is halved five times")
        follows.append(Follows(terms_of(polynomial), tuple(group)))
    return tuple(follows)


def _check_alike(graph: Graph, other: Graph, point: Point, there: Point, names: Sequence[str]) -> None:
    for op, theirs in zip(graph.ops, other.ops, strict=False):
        if kind_of(graph, op) != kind_of(other, theirs):
            _check_floats(op, theirs, point, there, names)
            message = f"at {words(names, there)} the model computes something else than at {words(names, point)}: "
            message += f"{theirs.name} ({theirs.target}) at {theirs.source or 'an unknown line'} in place of {op.name}"
            raise CaptureError(message, "a smaller range of sizes")
    if len(graph.ops) != len(other.ops) or ends_of(graph) != ends_of(other):
        message = (
            f"at {words(names, there)} the model has other operators or stored tensors than at {words(names, point)}"
        )
        raise CaptureError(message, "a smaller range of sizes")


def _check_floats(op: Op, other: Op, point: Point, there: Point, names: Sequence[str]) -> None:
    """CaptureError if the two differ by a float that is computed from a size, such as `T**-0.5`."""
    for (name, value), (_, their_value) in zip(op.attributes, other.attributes, strict=False):
        if isinstance(value, float) and isinstance(their_value, float) and value != their_value:
            message = f"{name} of {op.name} ({op.target}) at {op.source or 'an unknown line'} is a float that follows "
            message += f"a size: {value:g} at {words(names, point)} and {their_value:g} at {words(names, there)}"
            raise CaptureError(message, f"{TENSOR_FOR_FLOAT}; or leave this size out of the dynamic ones")


def resized(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """`graph` with inputs of these dynamic sizes; those that are not named stay. UsageError for one that is not
    allowed."""
    current = sizes_of(graph)
    if sizes and not current:
        raise UsageError("the plan has no dynamic sizes", "leave --sizes out, or plan with --dynamic batch=8..512/8")
    for name, size in sizes.items():
        known = next((one for one in graph.dynamic if one.name == name), None)
        if known is None or not known.allows(size):
            expected = known.words() if known else f"one of {', '.join(current)}"
            allowed = [f"{one.name}={one.nearest((current | dict(sizes))[one.name])}" for one in graph.dynamic]
            raise UsageError(f"{name} of {size}: expected {expected}", f"--sizes {','.join(allowed)}")
    wanted = current | dict(sizes)
    return graph if wanted == current else note_saved(at_sizes(graph, wanted))


MOST_POINTS = 6  # two determine a number, the others must bear it out
MOST_UNITS = 4096  # sizes of a range that are looked at; of what has no limit


def points_of(sizes: Sequence[DynamicSize], planned: Point, most: int = MOST_POINTS) -> list[Point]:
    """The planned one first, then the least, then others of the range, in which all sizes differ where they can.

    No size is 1: a trace is of sizes from 2 on (verification compares what it computes of 1).
    """
    points = dict.fromkeys([planned, tuple(_least(size) * size.divisor + size.remainder for size in sizes)])
    draw = random.Random(0)  # the same points for the same ranges
    there = math.prod(len(_range(size)) for size in sizes)
    while len(points) < min(most, there):
        points.setdefault(tuple(size.divisor * draw.choice(_range(size)) + size.remainder for size in sizes))
    return list(points)


def _range(size: DynamicSize) -> range:
    """Range of a size, in units."""
    least = _least(size)
    return range(least, (size.most - size.remainder) // size.divisor + 1 if size.most else least + MOST_UNITS + 1)


def _least(size: DynamicSize) -> int:
    """Least size, in units."""
    units = (size.least - size.remainder) // size.divisor
    return units + (size.least == 1 and size.most != 1)
