"""Serialisation of a formulation to bytes, and back: JSON, then the arrays one after the other.

One object stays one object, by which solvers detect repetition. Graph, mesh, profile and capacity are not included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from autoshard.formulation.formulate import Formulation, Site, ValueSite
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.layout import Layout
from autoshard.ir.problem import Node, Problem, Value
from autoshard.rules.algebra.strategy import Choice, Strategy

T = TypeVar("T")
_END = b"\n"
_KINDS = ("<f8", "<i8")


class _Numbered(Generic[T]):
    """Objects numbered by first mention, by identity; each is held, so that no other reuses its address."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self.numbers: dict[int, int] = {}

    def __call__(self, item: T) -> int:
        if id(item) not in self.numbers:
            self.numbers[id(item)] = len(self.items)
            self.items.append(item)
        return self.numbers[id(item)]


class _Words(Generic[T]):
    """Texts of equal objects, each once. Raises ValueError for one that can't be parsed back from its text."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.numbers: dict[T, int] = {}

    def __call__(self, item: T) -> int:
        if item not in self.numbers:
            if self.kind.parse(str(item)) != item:
                raise ValueError(f"{item!r} is not what {item} says")
            self.numbers[item] = len(self.numbers)
        return self.numbers[item]

    def texts(self) -> list[str]:
        return [str(item) for item in self.numbers]


def dumps(formulation: Formulation) -> bytes:
    """The formulation as bytes. Raises ValueError if something in it can't be expressed."""
    problem = formulation.problem
    arrays: _Numbered[np.ndarray[Any, Any]] = _Numbered()
    ends: _Numbered[tuple[Layout, ...]] = _Numbered()
    offers: _Numbered[tuple[Strategy, ...]] = _Numbered()
    layouts: _Words[Layout] = _Words(Layout)
    choices: _Words[Choice] = _Words(Choice)
    said: dict[str, Any] = {
        "sites": [[site.kind, site.name, ends(site.layouts), offers(site.strategies)] for site in formulation.sites],
        "value_sites": [[v.tensor, ends(v.sources), ends(v.targets), v.tied] for v in formulation.values],
        "nodes": [[n.name, arrays(n.seconds), arrays(n.bytes), *n.interval] for n in problem.nodes],
        "values": [
            [v.name, v.producer, v.consumers, arrays(v.source), [arrays(t) for t in v.targets], arrays(v.seconds),
             arrays(v.bytes), v.intervals]
            for v in problem.values
        ],
        "horizon": problem.horizon,
    }  # fmt: skip
    said["offers"] = [
        [
            [[choices(c) for c in s.choices], [-1 if x is None else layouts(x) for x in s.operands],
             [layouts(x) for x in s.results], s.variant, s.host]
            for s in offered
        ]
        for offered in offers.items
    ]  # fmt: skip
    said["ends"] = [[layouts(layout) for layout in end] for end in ends.items]
    said |= {"layouts": layouts.texts(), "choices": choices.texts()}
    said["arrays"] = [[*_order(array), array.shape] for array in arrays.items]
    body = b"".join(array.tobytes(_order(array)[1]) for array in arrays.items)  # type: ignore[arg-type]
    return json.dumps(said, separators=(",", ":")).encode() + _END + body


def _order(array: np.ndarray[Any, Any]) -> tuple[int, str]:
    """Type of an array, a position in _KINDS, and its memory order: sums are rounded in that order."""
    kind = array.dtype.newbyteorder("<").str
    if kind not in _KINDS:
        raise ValueError(f"an array of {array.dtype}")
    return _KINDS.index(kind), "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def loads(content: bytes, context: PlanningContext) -> Formulation:
    """The formulation of these bytes. Raises ValueError if `dumps` did not write them."""
    try:
        return _read(content, context)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no formulation: {error!r}") from error


def _read(content: bytes, context: PlanningContext) -> Formulation:
    head, _, body = content.partition(_END)
    said = json.loads(head)
    arrays = _arrays(said["arrays"], body)
    layouts, choices = [*map(Layout.parse, said["layouts"])], [*map(Choice.parse, said["choices"])]
    ends = [tuple(layouts[i] for i in end) for end in said["ends"]]
    optional = [*layouts, None]  # the last is that of -1
    offers = [
        tuple(
            Strategy(
                tuple(choices[i] for i in picks),
                tuple(optional[i] for i in operands),
                tuple(layouts[i] for i in results),
                variant,
                host,
            )
            for picks, operands, results, variant, host in offered
        )
        for offered in said["offers"]
    ]
    nodes = tuple(Node(name, arrays[a], arrays[b], (i, j)) for name, a, b, i, j in said["nodes"])
    values = tuple(
        Value(
            name,
            producer,
            tuple(consumers),
            arrays[source],
            tuple(arrays[t] for t in targets),
            arrays[seconds],
            arrays[size],
            tuple((start, stop) for start, stop in intervals),
        )
        for name, producer, consumers, source, targets, seconds, size, intervals in said["values"]
    )
    sites = tuple(Site(kind, name, ends[e], offers[o]) for kind, name, e, o in said["sites"])
    value_sites = tuple(ValueSite(tensor, ends[s], ends[t], tied) for tensor, s, t, tied in said["value_sites"])
    return Formulation(context, Problem(nodes, values, math.inf, said["horizon"]), sites, value_sites)


def _arrays(known: Sequence[tuple[int, str, Sequence[int]]], body: bytes) -> list[np.ndarray[Any, Any]]:
    arrays, position = [], 0
    for kind, order, shape in known:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(body, _KINDS[kind], count, position)
        arrays.append(array.reshape(shape, order=order).copy(order))  # type: ignore[call-overload]
        position += array.nbytes
    if position != len(body):
        raise ValueError(f"{len(body)} bytes of arrays, expected {position}")
    return arrays
