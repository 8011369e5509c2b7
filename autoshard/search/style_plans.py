"""Plans that people know by name, for comparison: the best of each style on a plan's own mesh, simulated as any plan.

Memory does not limit them: one that does not fit says so by its peak.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.errors import InfeasibleError
from autoshard.formulation.fewer_choices import Keep, narrowed
from autoshard.formulation.formulate import Formulation, Site, formulate
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.plan import Plan
from autoshard.rules.algebra.strategy import Strategy
from autoshard.search.build_plan import Origin, plan_of, priced
from autoshard.search.fixed_styles import megatron
from autoshard.solvers.common.solver_options import Clock, Options


@dataclass(frozen=True)
class StylePlan:
    """The step and peak of a style's program; both 0, with the `reason`, where there is none."""

    name: str
    meaning: str
    predicted_seconds: float = 0.0
    predicted_peak_bytes: float = 0.0
    reason: str = ""


_MEANINGS: dict[str, str] = {
    "data parallel": "every axis splits the batch, weights and optimizer are copied",
    "ZeRO-3": "every axis splits the batch, weights and optimizer are stored in shards and gathered for use (FSDP)",
    "Megatron": "the last axis splits heads, hidden dims and vocabulary, the others the batch",
}


def style_plans(
    plan: Plan,
    graph: Graph,
    hardware: Hardware,
    clock: Clock | None = None,
    formulation: Formulation | None = None,
) -> tuple[StylePlan, ...]:
    """One for each style, in a fixed order; those that `clock` leaves no time for say so.

    `formulation`: of all strategies on the plan's mesh, where the search has made it already.
    """
    clock = clock or Clock()
    if formulation is None:
        formulation = formulate(graph, plan.mesh, hardware, float("inf"), None, plan.search.all_to_all)
    else:
        formulation = replace(formulation, problem=replace(formulation.problem, capacity_bytes=float("inf")))
    return tuple(_simulated(name, formulation, clock) for name in _MEANINGS)


def _simulated(name: str, formulation: Formulation, clock: Clock) -> StylePlan:
    if clock.left <= 0:
        return StylePlan(name, _MEANINGS[name], reason="not simulated: the search was out of time")
    keep = _KEPT[name](formulation)
    if isinstance(keep, str):
        return StylePlan(name, _MEANINGS[name], reason=keep)
    small = narrowed(formulation, keep)
    try:
        solution = solvers.solve(small.problem, "auto", Options(Clock(clock.left), rough=True))
    except InfeasibleError as error:
        return StylePlan(name, _MEANINGS[name], reason=error.message)
    made = plan_of(small, solution, Origin(), float("inf"), name)
    made = priced(made, formulation.graph, formulation.hardware)
    return StylePlan(name, _MEANINGS[name], made.predicted_seconds, made.predicted_peak_bytes)


def _data_parallel(formulation: Formulation) -> Keep | str:
    return _batch_split(formulation, lambda layout: -_cuts(layout))


def _zero(formulation: Formulation) -> Keep | str:
    return _batch_split(formulation, _cuts)


def _batch_split(formulation: Formulation, stored_best: Callable[[Layout], int]) -> Keep | str:
    """Inputs are cut by dim 0 over all axes, weights whole where used, and stored as `stored_best` ranks highest."""
    graph, axes = formulation.graph, sum(size > 1 for size in formulation.mesh.sizes)
    weights = {parameter.tensor for parameter in graph.parameters}
    batch = max((graph.tensor(name).shape[0] for name in graph.inputs if graph.tensor(name).shape), default=0)
    keep: dict[int, list[int]] = {}
    split = False
    for n, site in enumerate(formulation.sites):
        fitting: Sequence[int] = range(len(site.strategies or site.layouts))
        if site.kind == "op":
            fitting = [s for s, strategy in enumerate(site.strategies) if _whole(site, strategy, weights, graph)]
        elif site.kind == "parameter":
            best = max(map(stored_best, site.layouts))
            fitting = [s for s, layout in enumerate(site.layouts) if stored_best(layout) == best]
        elif site.kind == "input" and graph.tensor(site.name).shape[:1] == (batch,):
            fitting = [s for s, layout in enumerate(site.layouts) if len(layout.shards(0)) == axes]
            split |= bool(fitting)
        if fitting and len(fitting) < len(site.strategies or site.layouts):
            keep[n] = list(fitting)
    return keep if split else f"no input of {batch} samples can be split over {formulation.mesh.size} devices"


def _whole(site: Site, strategy: Strategy, weights: set[str], graph: Graph) -> bool:
    """No weight is cut where it is used."""
    operands = graph.by_op[site.name].operands
    used = (layout for name, layout in zip(operands, strategy.operands, strict=True) if name in weights)
    return all(layout is None or not _cuts(layout) for layout in used)


def _cuts(layout: Layout) -> int:
    """How many axes cut it."""
    return sum(isinstance(placement, Shard) for placement in layout.placements)


def _megatron(formulation: Formulation) -> Keep | str:
    keep = {}
    for n, site in enumerate(formulation.sites):
        if site.kind == "op":
            op = formulation.graph.by_op[site.name]
            fitting = [s for s, strategy in enumerate(site.strategies) if megatron(op, strategy)]
            if not fitting:
                return f"{op.name} ({op.target}) has no such strategy on {formulation.mesh}"
            if len(fitting) < len(site.strategies):
                keep[n] = fitting
    return keep


_KEPT: dict[str, Callable[[Formulation], Keep | str]] = {
    "data parallel": _data_parallel,
    "ZeRO-3": _zero,
    "Megatron": _megatron,
}


def as_json(styles: Sequence[StylePlan]) -> str:
    """Seconds and bytes."""
    return json.dumps({"styles": [asdict(style) for style in styles]}, indent=1, ensure_ascii=False) + "\n"


def from_json(content: Any) -> tuple[StylePlan, ...]:
    """Raises ValueError where it is not what `as_json` writes."""
    try:
        return tuple(_style(row) for row in content["styles"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of styles: {error}") from error


def _style(row: Any) -> StylePlan:
    seconds, peak = float(row["predicted_seconds"]), float(row["predicted_peak_bytes"])
    return StylePlan(str(row["name"]), str(row["meaning"]), seconds, peak, str(row["reason"]))
