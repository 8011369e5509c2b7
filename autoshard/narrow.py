"""A formulation with fewer choices: what pins, forbidden choices and "why not" all come down to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.formulate import Formulation, Site
from autoshard.problem import Floats, Integers, Node, Value

Keep = Mapping[int, Sequence[int]]  # node -> the choices that stay, in order


def narrowed(formulation: Formulation, keep: Keep, taken: Keep | None = None) -> Formulation:
    """Only the choices `keep[node]` of the nodes it names; of value v, only the target layouts `taken[v]`.

    Equal nodes that lose the same choices go on sharing their arrays, so that repeated layers stay repeated.
    """
    sliced: dict[tuple[int, tuple[int, ...]], Floats] = {}

    def part(array: Floats, choices: Sequence[int]) -> Floats:
        key = (id(array), tuple(choices))
        if key not in sliced:
            sliced[key] = array[list(choices)]
        return sliced[key]

    def node(n: int, old: Node) -> Node:
        return replace(old, seconds=part(old.seconds, keep[n]), bytes=part(old.bytes, keep[n])) if n in keep else old

    values = tuple(_value(v, value, keep, taken or {}) for v, value in enumerate(formulation.problem.values))
    problem = replace(
        formulation.problem,
        nodes=tuple(node(n, old) for n, old in enumerate(formulation.problem.nodes)),
        values=values,
    )
    sites = tuple(_site(site, keep[n]) if n in keep else site for n, site in enumerate(formulation.sites))
    return replace(formulation, problem=problem, sites=sites)


def _site(site: Site, choices: Sequence[int]) -> Site:
    if site.kind == "op":
        return replace(site, strategies=tuple(site.strategies[s] for s in choices))
    return replace(site, layouts=tuple(site.layouts[s] for s in choices))


def _value(v: int, value: Value, keep: Keep, taken: Keep) -> Value:
    if v in taken:
        closed = np.ones(value.seconds.shape[1], dtype=bool)
        closed[list(taken[v])] = False
        value = replace(value, seconds=np.where(closed, np.inf, value.seconds))
    if not any(n in keep for n in (value.producer, *value.consumers)):
        return value

    def cut(n: int, layouts: Integers) -> Integers:
        return layouts[list(keep[n])] if n in keep else layouts

    targets = tuple(cut(c, t) for c, t in zip(value.consumers, value.targets, strict=True))
    return replace(value, source=cut(value.producer, value.source), targets=targets)
