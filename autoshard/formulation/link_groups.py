"""The links and axes of a mesh, each with the groups of axes whose collectives it carries."""

from __future__ import annotations

from itertools import combinations

from autoshard.costs.links import joint_link
from autoshard.formulation.formulate import Formulation

Axes = tuple[int, ...]


def groups_of(formulation: Formulation) -> dict[str, frozenset[Axes]]:
    """Each link and each axis, with the groups of axes whose collectives it carries; none that is part of another."""
    mesh, hardware = formulation.mesh, formulation.hardware
    own = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    every = [axes for n in range(1, len(own) + 1) for axes in combinations(own, n)]
    sets: dict[str, frozenset[Axes]] = {}
    for axes in every:
        link = f"link {joint_link(hardware, mesh, axes).name}"
        sets[link] = sets.get(link, frozenset()) | {axes}
    for axis in own:
        sets[f"axis {mesh.names[axis]}"] = frozenset(axes for axes in every if axis in axes)
    distinct = {held: name for name, held in reversed(sets.items())}
    return {name: held for held, name in reversed(distinct.items()) if not any(held < other for other in distinct)}
