"""A search by the time of a step, with cached answers: they are for the problem without its memory limit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard.formulation.formulate import Formulation
from autoshard.formulation.step_resources import StepResources
from autoshard.ir.problem import Problem
from autoshard.search.cached.search_cache import SearchCache, choice_of, unhurried
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.solver_options import Clock

if TYPE_CHECKING:
    from autoshard.search.shortest_step import StepSearch

Named = tuple[str, Choice]
_FIRST, _OTHERS, _STYLES = "first of a step", "others of a step", "styles of a step"


class StepCache:
    """A `StepSearch`, which `make` creates if an answer is not known yet; it then recomputes what it continues from.

    `plans`: those so far, (name, choice).
    """

    def __init__(
        self, formulation: Formulation, clock: Clock, answers: SearchCache, make: Callable[[], StepSearch]
    ) -> None:
        self.formulation, self.clock, self.answers, self.make = formulation, clock, answers, make
        self.plans: list[Named] = []
        self._began = False
        self._bound_seconds: float | None = None
        self._weights: list[float] | None = None

    def first(self) -> Choice | None:
        """First plan, see `StepSearch.first`."""
        self._began = True
        known = self._known(_FIRST)
        if known is not None:
            self.plans, self._weights = self._named(known["found"]), known["weights"]
            return choice_of(self.formulation.problem, known["choice"])
        choice = self._search.first()
        self.plans = self._search.plans
        if choice is not None:
            self._weights = self._search.weights.tolist()
            said = {"choice": _numbers(choice), "found": _said(self.plans), "weights": self._weights}
            self._keep(_FIRST, said)
        return choice

    def weighed(self) -> Problem:
        """Problem of the estimated step by the final weights of the first plan, to be solved within a limit."""
        assert self._weights is not None, "the first plan ends with weights"
        return self._created.resources.likely(np.array(self._weights))

    def others(self) -> Iterator[Named]:
        """Other plans, see `StepSearch.others`."""
        known = self._known(_OTHERS)
        if known is not None:
            self.plans, self._bound_seconds = self._named(known["found"]), known["bound"]
            yield from self._named(known["others"])
            return
        message: list[Named] = []
        self.plans = self._search.plans
        for other in self._search.others():
            message.append(other)
            yield other
        bound = self._search.bounded
        if bound is not None:
            self._keep(_OTHERS, {"others": _said(message), "found": _said(self.plans), "bound": float(bound.seconds)})

    def bound(self, known: Sequence[Choice]) -> float:
        """Lower bound in seconds on any plan's step, see `StepSearch.bound`."""
        if self._bound_seconds is not None:
            return self._bound_seconds
        begun = "after the first" if self._began else "alone"
        name = f"bound {begun} {hashlib.sha256(repr([_numbers(choice) for choice in known]).encode()).hexdigest()[:32]}"
        stored = self._known(name) if self._unasked else None
        if stored is not None:
            return float(stored["bound"])
        alone = self._search.bounded is None
        seconds = float(self._search.bound(known).seconds)
        if alone:
            self._keep(name, {"bound": seconds})
        return seconds

    def styles(self, solved: Callable[[StepResources], Iterable[Named]]) -> list[Named]:
        """(name of a style, its least choice in a row), which `solved` finds whatever time is left."""
        known = self._valid(_STYLES)
        if known is not None:
            return self._named(known["styles"])
        styles = list(solved(self._created.resources))
        self.answers.put(_STYLES, {"styles": _said(styles)})
        return styles

    @property
    def _unasked(self) -> bool:
        """True if nothing was computed here."""
        return "_search" not in vars(self)

    @cached_property
    def _created(self) -> StepSearch:
        return self.make()

    @cached_property
    def _search(self) -> StepSearch:
        if self._began and self.plans:  # its first plan was known
            self._created.first()
        return self._created

    def _known(self, name: str) -> dict[str, Any] | None:
        """Cached result, if no clock may have ended it."""
        return self._valid(name) if unhurried(self.clock) else None

    def _valid(self, name: str) -> dict[str, Any] | None:
        """Cached result, if all of it belongs to this problem."""
        said = self.answers.get(name)
        if not isinstance(said, dict):
            return None
        try:
            for key in ("found", "others", "styles"):
                self._named(said.get(key, []))
            if "choice" in said:
                choice_of(self.formulation.problem, said["choice"])
                if not all(type(weight) is float and math.isfinite(weight) for weight in said["weights"]):
                    return None
            fits = not ("bound" in said and not (type(said["bound"]) is float and math.isfinite(said["bound"])))
        except (KeyError, ValueError, TypeError):
            return None
        return said if fits else None

    def _keep(self, name: str, said: dict[str, Any]) -> None:
        if unhurried(self.clock):
            self.answers.put(name, said)

    def _named(self, said: Sequence[Any]) -> list[Named]:
        return [(str(name), choice_of(self.formulation.problem, choice)) for name, choice in said]


def _said(named: Sequence[Named]) -> list[Any]:
    return [[name, _numbers(choice)] for name, choice in named]


def _numbers(choice: Choice) -> list[int]:
    return [int(s) for s in choice]
