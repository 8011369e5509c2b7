"""Lower bound on the memory of a device's fullest moment, for every plan: a bound on the simulated peak.

The solver's count is no bound: it has gradients for the whole step, and a value once for each layout that it is kept
in. Here a moment has only what every program of the formulation holds then, by `simulation.memory_curve`:

- always: each parameter and its optimizer state, buffers and inputs, as they are stored;
- at the forward and at the backward of an operator: of each storage that an operator up to it keeps for its own
  backward one value, as the keeping operator reads it; masks and statistics of these operators;
- at the forward also: what the operator reads, makes and works with;
- at its backward also: the gradients of these;
- at the optimizer: all gradients of parameters.

Each is a sum over nodes of terms that depend on one choice each, so that the least over all plans is a sum of minima. A
storage counts once: views share it, and if it is kept in several layouts that of the first keeper counts. A view counts
as the smallest storage that it can share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.costs.device_bytes import activation_bytes, is_trained, parameter_parts
from autoshard.formulation.formulate import Formulation
from autoshard.formulation.memory_bound.operator_bytes import OperatorBytes
from autoshard.ir.layout import Layout

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


@dataclass(frozen=True)
class MemoryLowerBound:
    """Every program of a formulation holds `bytes` in the `phase` (forward or backward) of `op`, or where the optimizer
    begins: `stored` in parameters and their optimizer states, inputs and buffers; `saved` for backward by earlier
    operators; the rest belongs to the moment itself."""

    bytes: float
    phase: str
    op: str
    stored: float
    saved: float = 0.0

    @property
    def moment(self) -> str:
        return f"in the {self.phase} of {self.op}" if self.op else f"as the {self.phase} begins"


def memory_lower_bound(formulation: Formulation) -> MemoryLowerBound:
    """Largest of the minimal bytes of all moments of a step."""
    return max(floors(formulation), key=lambda floor: floor.bytes)


def floors(formulation: Formulation) -> Iterator[MemoryLowerBound]:
    """Lower bound at each moment."""
    parts = _LeastStored(formulation)
    strategies = {
        site.name: tuple(site.strategies[s] for s in allowed(formulation, n))
        for n, site in enumerate(formulation.sites)
        if site.kind == "op"
    }
    before = 0.0
    for moment in OperatorBytes(formulation.graph, formulation.mesh, strategies, parts.parameters).moments():
        for phase, beside in ((FORWARD, moment.forward), (BACKWARD, moment.backward)):
            size = parts.lasting + before + float((moment.saved + beside).min())
            yield MemoryLowerBound(size, phase, moment.op, parts.lasting, before)
        before += float(moment.saved.min())
    everything = parts.lasting + parts.gradients
    yield MemoryLowerBound(everything, OPTIMIZER, "", everything)


class _LeastStored:
    """Minimal bytes: `lasting` during the whole step, `gradients` of parameters when the optimizer begins.
    `parameters`: those of each parameter that must lie on the device."""

    def __init__(self, formulation: Formulation) -> None:
        self.graph, self.mesh = formulation.graph, formulation.mesh
        self.known = {p.tensor: p for p in (*self.graph.parameters, *self.graph.buffers)}
        self.lasting = self.gradients = 0.0
        self.parameters: dict[str, float] = {}
        for n, site in enumerate(formulation.sites):
            layouts = [site.layouts[s] for s in allowed(formulation, n)] if site.layouts else []
            if site.kind == "input":
                tensor = self.graph.tensor(site.name)
                self.lasting += min(activation_bytes(tensor, layout, self.mesh) for layout in layouts)
            elif site.kind in ("parameter", "buffer"):
                self._add(site.name, layouts)

    def _add(self, name: str, layouts: list[Layout]) -> None:
        parameter = self.known[name]
        parts = [parameter_parts(self.graph, parameter, layout, self.mesh) for layout in layouts]
        self.lasting += min(weight + moments for weight, _, moments in parts)
        self.gradients += min(gradient for _, gradient, _ in parts) if is_trained(self.graph, parameter) else 0.0
        if not any(layout.host for layout in layouts):
            self.parameters[name] = min(weight for weight, _, _ in parts)


def allowed(formulation: Formulation, n: int) -> list[int]:
    """Choices of a node that are not forbidden by themselves."""
    choices: list[int] = np.flatnonzero(np.isfinite(formulation.problem.nodes[n].seconds)).tolist()
    return choices
