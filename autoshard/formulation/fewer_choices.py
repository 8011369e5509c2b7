"""A formulation with fewer choices, by which pins, forbidden choices and "why not" are implemented."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from autoshard.formulation.formulate import Formulation, Site
from autoshard.ir.problem import Floats, Integers, Value, changed

T = TypeVar("T")
Array = TypeVar("Array", Floats, Integers)
Keep = Mapping[int, Sequence[int]]  # node -> the choices that stay, in order


def narrowed(formulation: Formulation, keep: Keep, taken: Keep | None = None) -> Formulation:
    """Restricts nodes to the choices `keep[node]`, and value v to the target layouts `taken[v]`; others keep all.

    Equal arrays that lose the same choices stay shared, so that repeated layers stay repeated.
    """
    shared = _Shared()
    problem = replace(
        formulation.problem,
        nodes=tuple(
            changed(node, seconds=shared.part(node.seconds, keep[n]), bytes=shared.part(node.bytes, keep[n]))
            if n in keep
            else node
            for n, node in enumerate(formulation.problem.nodes)
        ),
        values=tuple(shared.value(v, value, keep, taken or {}) for v, value in enumerate(formulation.problem.values)),
    )
    sites = tuple(shared.site(site, keep[n]) if n in keep else site for n, site in enumerate(formulation.sites))
    return replace(formulation, problem=problem, sites=sites)


class _Shared:
    """Restricted arrays and tuples, each made once."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, tuple[int, ...]], Any] = {}

    def part(self, array: Array, choices: Sequence[int]) -> Array:
        return self._once(array, choices, lambda: array[list(choices)])

    def site(self, site: Site, choices: Sequence[int]) -> Site:
        if site.kind == "op":
            return replace(site, strategies=self._some(site.strategies, choices))
        return replace(site, layouts=self._some(site.layouts, choices))

    def _some(self, whole: tuple[T, ...], choices: Sequence[int]) -> tuple[T, ...]:
        return self._once(whole, choices, lambda: tuple(whole[s] for s in choices))

    def value(self, v: int, value: Value, keep: Keep, taken: Keep) -> Value:
        if v in taken:
            value = replace(value, seconds=self._closed(value.seconds, taken[v]))
        if not any(n in keep for n in (value.producer, *value.consumers)):
            return value

        def cut(n: int, layouts: Integers) -> Integers:
            return self.part(layouts, keep[n]) if n in keep else layouts

        targets = tuple(cut(c, t) for c, t in zip(value.consumers, value.targets, strict=True))
        return changed(value, source=cut(value.producer, value.source), targets=targets)

    def _closed(self, seconds: Floats, taken: Sequence[int]) -> Floats:
        """`seconds` with every target but `taken` forbidden."""
        open_ = np.isin(np.arange(seconds.shape[1]), taken)
        return self._once(seconds, (-1, *taken), lambda: np.where(open_, seconds, np.inf))

    def _once(self, whole: object, choices: Sequence[int], make: Callable[[], T]) -> T:
        key = (id(whole), tuple(choices))  # what it names outlives this object: it is part of the formulation
        if key not in self._parts:
            self._parts[key] = make()
        part: T = self._parts[key]
        return part
