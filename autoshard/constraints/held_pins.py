"""Pins that hold stored tensors where a plan has them."""

from __future__ import annotations

from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan, TensorPlan


def held_pins(plan: Plan, graph: Graph, inputs: bool = False) -> tuple[str, ...]:
    """Pins for the parameters and buffers of `graph` as `plan` has them; with `inputs`, for these too."""
    stored = {one.path for one in (*graph.parameters, *graph.buffers)}
    every = [("parameter", one) for one in (*plan.parameters, *plan.buffers) if one.path in stored]
    every += [("input", one) for one in plan.inputs] * inputs
    return tuple(f"{kind}:{one.path}={_text(one, plan.mesh.names)}" for kind, one in every)


def _text(one: TensorPlan, names: tuple[str, ...]) -> str:
    return ",".join(f"{placement}@{axis}" for placement, axis in zip(one.layout.placements, names, strict=True))
