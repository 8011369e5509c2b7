"""Problems as JSON in the format of the ASPLOS 2025 contest on intra-operator parallelism (optionally gzipped).

`problem.nodes.{intervals, costs, usages}`, `problem.edges.{nodes, costs}` (row-major over the choices of the edge's
nodes) and `problem.usage_limit`. Node i takes one of its choices, and uses `usages[i][choice]` while start <= t < stop.
A cost of 1e18 or more means "not allowed". Costs and usages have no unit there; here they stand as seconds and bytes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.errors import InvalidFileError
from autoshard.ir.problem import Floats, Integers, Node, Problem, Value
from autoshard.solvers.common.infeasibility import least, short
from autoshard.solvers.common.result import none_within

FORBIDDEN = 10**18
_NO_BYTES = ((0, 0),)


def read(path: str | Path) -> Problem:
    """Raises InvalidFileError (a sentence that says where), InfeasibleError where the limit is below any possible use.

    An edge is over two different nodes, as all of the published instances are.
    """
    try:
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        content = json.loads(text)["problem"]
        spans, costs, usages = (content["nodes"][key] for key in ("intervals", "costs", "usages"))
        edges, limit = content["edges"], content["usage_limit"]
        problem = _Reader().problem(spans, costs, usages, edges["nodes"], edges["costs"], limit)
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        what = f"no entry {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise InvalidFileError(f"{path} is not a problem in the contest's format: {what}") from error
    refuse_if_short(problem)
    return problem


def refuse_if_short(problem: Problem) -> None:
    """Raises InfeasibleError where the smallest sizes alone are above the capacity at some time."""
    found = least(problem)
    if none_within(found.bytes, problem.capacity_bytes):
        raise short(problem, found.bytes - problem.capacity_bytes)


class _Reader:
    """Equal arrays become one object."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], Floats] = {}
        self.ranges: dict[int, Integers] = {}

    def problem(self, spans: Any, costs: Any, usages: Any, pairs: Any, tables: Any, limit: Any) -> Problem:
        if not len(spans) == len(costs) == len(usages) or len(pairs) != len(tables):
            raise ValueError("the lists of a node's or an edge's entries differ in length")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or math.isnan(limit):
            raise ValueError(f"usage_limit is {limit!r}, expected a number")
        times: Integers = np.array(spans, np.int64).reshape(-1, 2)
        if (times < 0).any():
            raise ValueError("an interval starts or stops before time 0")
        own = [self.costs(f"node {n}", cost) for n, cost in enumerate(costs)]
        kept = [self.usage(n, usage, len(own[n])) for n, usage in enumerate(usages)]
        self.sizes = [len(cost) for cost in own]
        self.values: list[Value] = []
        for e, (members, table) in enumerate(zip(pairs, tables, strict=True)):
            self.add_edge(e, members, self.costs(f"edge {e}", table))
        nodes = tuple(
            Node(f"node {n}", cost, usage, (start, stop))
            for n, (cost, usage, (start, stop)) in enumerate(zip(own, kept, times.tolist(), strict=True))
        )
        horizon = max(1, int(times.max(initial=1)))
        return Problem(nodes, tuple(self.values), float(limit), horizon)

    def costs(self, what: str, entries: Any) -> Floats:
        """An array without NaN or negative entries; forbidden ones infinite."""
        array = np.asarray(entries, np.float64)
        if array.ndim != 1 or not array.size:
            raise ValueError(f"{what} has an empty choice set" if not array.size else f"{what} has no list of costs")
        key = (array.size, array.tobytes())
        if key not in self.known:
            if not (array >= 0).all():
                bad = array[~(array >= 0)][0]
                raise ValueError(f"{what} has a cost of {bad:g}, expected a number that is not negative")
            self.known[key] = np.where(array >= FORBIDDEN, np.inf, array)
        return self.known[key]

    def usage(self, n: int, entries: Any, choices: int) -> Floats:
        array = np.asarray(entries, np.float64)
        if array.shape != (choices,):
            raise ValueError(f"node {n} has {choices} costs and usages of shape {array.shape}")
        if not (array >= 0).all() or np.isinf(array).any():
            raise ValueError(f"node {n} has a usage that is negative or not a number")
        return array

    def range(self, size: int) -> Integers:
        if size not in self.ranges:
            self.ranges[size] = np.arange(size)
        return self.ranges[size]

    def add_edge(self, e: int, members: Sequence[int], table: Floats) -> None:
        shape = tuple(self.sizes[n] for n in members)
        if min(members, default=0) < 0:
            raise ValueError(f"edge {e} is over node {min(members)}")
        if table.size != math.prod(shape):
            raise ValueError(f"edge {e} has {table.size} costs, expected {math.prod(shape)} for its nodes' choices")
        if len(members) != 2 or members[0] == members[1]:
            raise ValueError(f"edge {e} is over {members}, expected two different nodes")
        self.connect(f"edge {e}", members[0], members[1], self.matrix(table, shape))

    def matrix(self, table: Floats, shape: tuple[int, ...]) -> Floats:
        key = (*shape, id(table))  # tables live as long as the reader
        if key not in self.known:
            self.known[key] = table.reshape(shape)
        return self.known[key]

    def connect(self, name: str, a: int, b: int, cost: Floats) -> None:
        rows, columns = cost.shape
        self.values.append(
            Value(
                name=name,
                producer=a,
                consumers=(b,),
                source=self.range(rows),
                targets=(self.range(columns),),
                seconds=cost,
                bytes=self.zeros(columns),
                intervals=_NO_BYTES,
            )
        )

    def zeros(self, size: int) -> Floats:
        key = ("zeros", size)
        if key not in self.known:
            self.known[key] = np.zeros(size)
        return self.known[key]
