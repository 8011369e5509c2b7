"""Seeded valid choices that are far from optimal on purpose: what verification runs in addition to the best plan.

A random choice minimises random node costs where every allowed redistribution is free. Memory is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, Value, objective
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimise


def random_choice(problem: Problem, seed: int) -> Choice:
    """A choice without a forbidden entry; the same for the same seed. Raises InfeasibleError where there is none."""
    return forced(problem, {}, seed)


def forced(problem: Problem, pins: Mapping[int, int], seed: int) -> Choice:
    """A random choice in which node n takes strategy pins[n]. Raises InfeasibleError that names the pinned nodes."""
    generator = np.random.default_rng(seed)
    costs = [generator.random(len(node.seconds)) for node in problem.nodes]
    try:
        return _cheapest(problem, costs, pins)[0]
    except InfeasibleError as error:
        if not pins:
            raise
        names = ", ".join(f"{problem.nodes[n].name} = {s}" for n, s in sorted(pins.items()))
        raise InfeasibleError(f"no allowed choice has {names}: {error.message}", proven=error.proven) from error


def _cheapest(problem: Problem, costs: Sequence[Floats], pins: Mapping[int, int]) -> tuple[Choice, bool]:
    """The allowed choice of least node cost, redistributions being free; and whether that is proven."""
    free = _free(problem, costs)
    allowed: list[Integers] = [np.arange(len(cost)) for cost in costs]
    for n, s in pins.items():
        allowed[n] = np.array([s])
    minimum = minimise(free, Contents(free), allowed=allowed)
    if math.isinf(objective(problem, minimum.choice)):
        raise InfeasibleError(
            "no allowed combination of strategies was found; that there is none is not proven", proven=False
        )
    return minimum.choice, minimum.exact


def _free(problem: Problem, costs: Sequence[Floats]) -> Problem:
    """Node costs replaced, every allowed redistribution free; only forbidden entries are left of the original."""
    nodes = tuple(
        replace(node, seconds=np.where(np.isinf(node.seconds), np.inf, cost), interval=(0, 0))
        for node, cost in zip(problem.nodes, costs, strict=True)
    )
    return Problem(nodes, tuple(part for value in problem.values for part in _fences(value)))


def _fences(value: Value) -> list[Value]:
    """One value per consumer: a shared redistribution is forbidden where it is for any of them."""
    if not np.isinf(value.seconds).any():
        return []
    seconds = np.where(np.isinf(value.seconds), np.inf, 0.0)
    return [
        Value(
            name=value.name,
            producer=value.producer,
            consumers=(c,),
            source=value.source,
            targets=(t,),
            seconds=seconds,
            bytes=np.zeros(len(value.bytes)),
            intervals=((0, 0),),
        )
        for c, t in zip(value.consumers, value.targets, strict=True)
    ]
