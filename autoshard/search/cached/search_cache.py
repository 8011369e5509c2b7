"""Cache of search results of one problem that depends on neither level nor memory limit, between commands.

It holds the formulation itself; and by name, as JSON: the step and peak of each simulated program, the plans of a step
without a limit with their bound, and known styles. Results that a clock may have ended are not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from autoshard.constraints.pins import Pin
from autoshard.formulation import formulation_store
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import graph_hash
from autoshard.ir.problem import Problem
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.solver_options import Clock
from autoshard.system.disk_cache import DiskCache, key_of

HELD = 4  # in memory of one: formulations of a graph, plans of a formulation


def formulated(cache: DiskCache | None, context: PlanningContext) -> Formulation:
    """Formulation of all strategies, made once for a graph; read if another command made it."""
    known, key = context.graph.once(_formulations), context.key
    formulation = known.pop(key, None) or _formulation(cache, context)
    known[key] = formulation  # used last
    while len(known) > HELD:
        del known[next(iter(known))]
    return formulation


def _formulations(graph: Graph) -> dict[object, Formulation]:
    return {}


def _formulation(cache: DiskCache | None, context: PlanningContext) -> Formulation:
    if cache is None:
        return formulate(context)
    key = _problem_key(context)
    content = cache.read("formulation", key)
    if content is not None:
        with contextlib.suppress(ValueError):  # made anew, and written over
            return formulation_store.loads(content, context)
    formulation = formulate(context)
    with contextlib.suppress(ValueError):  # something in it has no text: it is made each time
        cache.write("formulation", key, formulation_store.dumps(formulation))
    return formulation


def _problem_key(context: PlanningContext) -> str:
    mesh, hardware, *settings = context.key
    said = (graph_hash(context.graph), str(mesh), repr(hardware), *settings[:-1], sorted(context.on_host))
    return key_of("problem", *said)


class Figures(NamedTuple):
    """Predicted step and peak of the program of a choice."""

    predicted_seconds: float
    predicted_peak_bytes: float


class SearchCache:
    """Results of one problem, by name: of this search, and of earlier ones if there is a cache. `save` adds the new
    ones to its file."""

    def __init__(self, cache: DiskCache | None, key: str) -> None:
        self.cache, self.key = cache, key
        self.known: dict[str, Any] = self._read()
        self.new: dict[str, Any] = {}

    def _read(self) -> dict[str, Any]:
        content = self.cache.read("answers", self.key) if self.cache is not None else None
        try:
            answers = json.loads(content) if content is not None else {}
        except ValueError:
            return {}
        return answers if isinstance(answers, dict) else {}

    def get(self, name: str) -> Any:
        return self.known.get(name)

    def put(self, name: str, value: Any) -> None:
        self.known[name] = value
        if self.cache is not None:
            self.new[name] = value

    def save(self) -> None:
        """Adds the new results to the file, next to those that other processes saved meanwhile."""
        if self.cache is not None and self.new:
            every = self._read() | self.new
            self.cache.write("answers", self.key, json.dumps(every, separators=(",", ":")).encode())
            self.new = {}

    def figures(self, choice: Choice, fuse: object, make: Callable[[], Figures]) -> Figures:
        """Figures of a choice, with the collectives to `fuse`: `make` lowers and simulates its program."""
        said = ",".join(str(int(s)) for s in choice) + repr(fuse)
        name = f"program {hashlib.sha256(said.encode()).hexdigest()[:32]}"
        match self.get(name):
            case [float(seconds), float(size)]:
                return Figures(seconds, size)
        figures = make()
        self.put(name, [float(figure) for figure in figures])
        return figures


def answers_of(
    cache: DiskCache | None,
    context: PlanningContext,
    strategy: str = "best",
    pins: Sequence[Pin] = (),
    fuse: Sequence[str] = (),
) -> SearchCache:
    """Cache of the problem that a style and pins leave, for the collectives to `fuse`."""
    if cache is None:
        return SearchCache(None, "")
    return SearchCache(cache, key_of("answers", _problem_key(context), strategy, tuple(map(repr, pins)), tuple(fuse)))


def unhurried(clock: Clock) -> bool:
    """True if results under this clock are those without it."""
    return math.isinf(clock.limit_seconds) and not clock.stopped and not clock.cut


def choice_of(problem: Problem, said: object) -> Choice:
    """Choice in `said`; ValueError if it is none of the problem."""
    sizes = [len(node.seconds) for node in problem.nodes]
    if not isinstance(said, list) or len(said) != len(sizes):
        raise ValueError("no choice of this problem")
    if not all(type(s) is int and 0 <= s < size for s, size in zip(said, sizes, strict=True)):
        raise ValueError("no choice of this problem")
    return tuple(said)
