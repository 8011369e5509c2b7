"""Redistribution from one layout to another by the cheapest collectives, with its price and runtime arguments.

A step changes the placement of one or several mesh axes; its forward acts on the value, its backward on the gradient.
The cheapest way is a shortest path over layouts by the steps of the pair table, or the direct one by an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autoshard.ir.layout import Layout
from autoshard.redistribute.collective_table import (
    BACKWARD,
    BY_INDEX,
    CALLS,
    CARRIED,
    CHANGES,
    COLLECTIVES,
    FORWARD,
    LOCAL,
    CollectiveKind,
    CollectiveSeconds,
    kind,
    reason,
    runtime_call,
)
from autoshard.redistribute.path_costs import SUM, PathCosts, path_parts
from autoshard.redistribute.prices import NOMINAL, Floats, Pass, Prices, Terms
from autoshard.redistribute.space import space
from autoshard.redistribute.steps import Message, Path, Step, dim_cuts, local_blocks, messages, step_of

__all__ = [
    "BACKWARD",
    "BY_INDEX",
    "CALLS",
    "CARRIED",
    "CHANGES",
    "COLLECTIVES",
    "FEW",
    "FORWARD",
    "LOCAL",
    "NOMINAL",
    "CollectiveKind",
    "CollectiveSeconds",
    "Message",
    "Pass",
    "Path",
    "PathCosts",
    "Step",
    "Terms",
    "all_pairs",
    "deferred_seconds",
    "dim_cuts",
    "kind",
    "local_blocks",
    "messages",
    "path",
    "reason",
    "runtime_call",
    "step_of",
    "steps_between",
]


FEW = 64  # pairs, whose prices are remembered


@lru_cache(maxsize=4096)
def path(source: Layout, target: Layout, terms: Terms) -> Path:
    """Cheapest way from `source` to `target`; there always is one."""
    return _prices((source,), (target,), terms).path(source, target)


def all_pairs(sources: Sequence[Layout], targets: Sequence[Layout], terms: Terms) -> Floats:
    """Seconds of `path` for all pairs, as [source, target]: `forward_times` the forward, plus the backward."""
    if len(sources) * len(targets) <= FEW:
        return _few_pairs(tuple(sources), tuple(targets), terms)
    return _prices(sources, targets, terms).all_pairs(sources, targets)


@lru_cache(maxsize=4096)
def _few_pairs(sources: tuple[Layout, ...], targets: tuple[Layout, ...], terms: Terms) -> Floats:
    """Seconds of `path` for few pairs, cached and read-only."""
    seconds = _prices(sources, targets, terms).all_pairs(sources, targets)
    seconds.flags.writeable = False
    return seconds


def deferred_seconds(sources: Sequence[Layout], targets: Sequence[Layout], terms: Terms) -> Floats:
    """Seconds of those all-reduces in `path` that a parameter's gradient may leave to the end of a step, all pairs."""
    total: Floats = np.zeros((len(sources), len(targets)))
    for (phase, _), seconds in path_parts(sources, targets, terms).seconds.items():
        if phase == SUM:
            total += seconds
    return total


def steps_between(sources: Sequence[Layout], targets: Sequence[Layout], terms: Terms) -> list[tuple[Layout, Step]]:
    """Steps, each with its start layout, on the ways that `path` gives for all pairs.

    All distinct ones by the table; of the direct ways those between layouts of different kinds.
    """
    return _prices(sources, targets, terms).steps_between(sources, targets)


def _prices(sources: Sequence[Layout], targets: Sequence[Layout], terms: Terms) -> Prices:
    return Prices(space(tuple(sources), tuple(targets), terms.shape, terms.mesh, terms.differentiable), terms)
