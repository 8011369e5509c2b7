"""Problems as JSON in the format of the ASPLOS 2025 contest on intra-operator parallelism (optionally gzipped).

`problem.nodes.{intervals, costs, usages}`, `problem.edges.{nodes, costs}` (row-major over the choices of the edge's
nodes) and `problem.usage_limit`. Node i takes one of its choices, and uses `usages[i][choice]` while start <= t < stop.
A cost of 1e18 or more means "not allowed". Costs and usages have no unit there; here they stand as seconds and bytes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.errors import InvalidFileError
from autoshard.ir.problem import Floats, Node, Problem, Value
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
        problem = _problem(content)
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        what = f"no entry {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise InvalidFileError(f"{path} is not a problem in the contest's format: {what}") from error
    refuse_if_short(problem)
    return problem


def refuse_if_short(problem: Problem) -> None:
    """Raises InfeasibleError where the smallest sizes alone are above the capacity at some time."""
    minimum = least(problem)
    if none_within(minimum.bytes, problem.capacity_bytes):
        raise short(problem, minimum.bytes - problem.capacity_bytes)


def _problem(content: Any) -> Problem:
    """Equal tables become one object, and so do the numbers of choices."""
    known: dict[tuple[object, ...], Any] = {}

    def once(key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if key not in known:
            known[key] = make()
        return known[key]

    def table(what: str, entries: Any, *shape: int) -> Floats:
        array = np.asarray(entries, np.float64)
        if not array.size or not (array >= 0).all():
            raise ValueError(f"{what} has no cost, or one that is no number from 0 on")
        if shape and array.size != math.prod(shape):
            raise ValueError(f"{what} has {array.size} costs, expected {math.prod(shape)} for its nodes' choices")
        allowed = np.where(array >= FORBIDDEN, np.inf, array)
        return once((*shape, array.tobytes()), lambda: allowed.reshape(shape or -1))

    nodes = []
    lists = content["nodes"]
    for n, (span, costs, usages) in enumerate(zip(lists["intervals"], lists["costs"], lists["usages"], strict=True)):
        if not 0 <= span[0] <= span[1]:
            raise ValueError(f"node {n} is alive from {span[0]} to {span[1]}")
        seconds = table(f"node {n}", costs)
        nodes.append(Node(f"node {n}", seconds, table(f"the usage of node {n}", usages, len(seconds)), tuple(span)))
    values = []
    for e, (members, costs) in enumerate(zip(content["edges"]["nodes"], content["edges"]["costs"], strict=True)):
        a, b = members
        if a == b or min(members) < 0:
            raise ValueError(f"edge {e} is over {members}, expected two different nodes")
        rows, columns = len(nodes[a].seconds), len(nodes[b].seconds)
        cost = table(f"edge {e}", costs, rows, columns)
        source, target = (once(("range", size), partial(np.arange, size)) for size in (rows, columns))
        none = once(("zeros", columns), partial(np.zeros, columns))
        values.append(Value(f"edge {e}", a, (b,), source, (target,), cost, none, _NO_BYTES))
    horizon = max([1, *(node.interval[1] for node in nodes)])
    return Problem(tuple(nodes), tuple(values), float(content["usage_limit"]), horizon)
