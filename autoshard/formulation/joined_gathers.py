"""Gathers of one weight over one axis after the other, which may run as one over all of these (`weight_path`).

Separate gathers of a small weight may be cheaper; together with those of others the joint one may take less than the
bytes of both, or use another link. So each row counts the minimum of separate and joint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, combinations

import numpy as np

from autoshard.ir.layout import Layout
from autoshard.ir.problem import Floats
from autoshard.redistribute.path_costs import GATHER, Axes, PathParts


def joined_less(
    parts: PathParts,
    sizes: PathParts,
    phase: str,
    sources: Sequence[Layout],
    rate: Callable[[Axes, str], float],
    rows: Callable[[Axes], Sequence[int]],
) -> dict[int, Floats]:
    """Row -> [source, target]: excess seconds of `parts` in a phase, GATHER or SCATTER. `sizes`: these redistributions
    in bytes. `rate`: seconds per byte of a collective; `rows`: those that one over these axes counts in."""
    groups = [axes for other, axes in parts.seconds if other == phase and axes]
    if len(groups) < 2:
        return {}
    joined, kind = parts.may_join(sources), "all_gather" if phase == GATHER else "reduce_scatter"
    some_joined = np.flatnonzero(joined)  # few are
    zero = np.zeros(len(some_joined))
    gathered, moved = (
        {axes: table.seconds[phase, axes].reshape(-1)[some_joined] for axes in groups} for table in (parts, sizes)
    )
    excess = {}
    for row in sorted({row for axes in groups for row in rows(axes)}):
        apart = {axes: gathered[axes] * (row in rows(axes)) for axes in groups}
        least = whole = sum(apart.values(), zero)
        for some in chain.from_iterable(combinations(groups, n) for n in range(2, len(groups) + 1)):
            over = tuple(sorted({axis for axes in some for axis in axes}))
            amounts = [moved[axes] for axes in some]
            one = rate(over, kind) * np.maximum.reduce(amounts) * (row in rows(over))
            others = sum((seconds for axes, seconds in apart.items() if axes not in some), zero)
            least = np.where(np.minimum.reduce(amounts) > 0, np.minimum(least, others + one), least)
        excess[row] = np.zeros(joined.shape)
        excess[row].reshape(-1)[some_joined] = whole - least
    return excess
