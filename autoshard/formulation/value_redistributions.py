"""Occupation by the redistributions of values. Equal values share it, and each redistribution is found once, whatever
unit its parts are counted in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from autoshard import costs
from autoshard.costs.collective import per_byte_seconds
from autoshard.formulation.formulate import Formulation
from autoshard.redistribute import CollectiveSeconds
from autoshard.redistribute.path_costs import Axes, PathCosts, PathParts


class ValueRedistributions:
    """Redistributions of values. `together`: see `weight_tasks.members`."""

    def __init__(self, formulation: Formulation, together: Mapping[str, int]) -> None:
        self.formulation, self.together = formulation, together
        self.graph, self.mesh, self.hardware = formulation.graph, formulation.mesh, formulation.hardware
        self.paths: dict[Hashable, tuple[PathCosts, CollectiveSeconds]] = {}
        self.known: dict[Hashable, PathParts] = {}
        self.last: PathCosts | None = None  # whose steps are held: they are many

    def parts(self, v: int) -> PathParts:
        return self._counted(v, "seconds", lambda alone: alone)

    def rates(self, v: int) -> PathParts:
        """Redistributions in the seconds that a collective surely takes; without tasks."""
        num = self.together.get(self.formulation.values[v].tensor, 0)
        return self._counted(v, num, lambda alone: self._least(alone, num))

    def sizes(self, v: int) -> PathParts:
        """Redistributions in bytes instead of seconds; without tasks."""
        return self._counted(v, "bytes", lambda alone: _size)

    def _counted(self, v: int, name: Hashable, count: Callable[[CollectiveSeconds], CollectiveSeconds]) -> PathParts:
        site = self.formulation.values[v]
        tensor = self.graph.tensor(site.tensor)
        key = costs.moving_facts(self.graph, tensor), site.sources, site.targets
        if (key, name) not in self.known:
            if key not in self.paths:
                terms = costs.moving_terms(
                    self.hardware, self.mesh, self.graph, tensor, self.formulation.context.all_to_all
                )
                known = self.formulation.ways.pop(key, None)
                self.paths[key] = known or PathCosts(site.sources, site.targets, terms), terms.seconds
            ways, alone = self.paths[key]
            if self.last is not None and self.last is not ways:
                self.last.forget()
            self.last = ways
            self.known[key, name] = ways.parts(count(alone), tasks=name == "seconds")
        return self.known[key, name]

    def _least(self, alone: CollectiveSeconds, num: int) -> CollectiveSeconds:
        """Certain seconds of a collective for these bytes of a weight, `num` of which go together, 0 if that is
        unknown: those of their bytes, and a part of its other costs, which are as much as the largest's."""

        def seconds(axes: Axes, kind: str, size: float) -> float:
            bytes_ = per_byte_seconds(self.hardware, self.mesh, axes, kind) * size
            return bytes_ + (max(0.0, alone(axes, kind, size) - bytes_) / num if num else 0.0)

        return seconds


def _size(axes: Axes, kind: str, size: float) -> float:
    return size
