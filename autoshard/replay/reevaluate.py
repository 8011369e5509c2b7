"""A plan made earlier: its figures by today's costs, and what has changed since, in a reader's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard import __version__
from autoshard.cluster.hardware import list_profiles, load_hardware
from autoshard.formulation.cost_breakdown import parts
from autoshard.formulation.formulate import Formulation, Site
from autoshard.ir.layout import Layout
from autoshard.ir.plan import OUTPUT, OpPlan, Plan, TensorPlan
from autoshard.ir.problem import objective
from autoshard.search.build_plan import priced, with_parts
from autoshard.search.objectives import SPEED, level_value
from autoshard.solvers.common.result import without_proof
from autoshard.units import ROUNDING, format_seconds

Decided = OpPlan | TensorPlan


@dataclass(frozen=True)
class Today:
    """`plan` with today's figures; as it was made if `offered` is False: one of its choices is no longer offered.

    `notes` are sentences on what has changed; none where nothing has.
    """

    plan: Plan
    notes: tuple[str, ...]
    offered: bool = True


def today(plan: Plan, formulation: Formulation) -> Today:
    """Plan with every figure recomputed: parts, objective, simulated step. `formulation`: of its own search."""
    choice = choice_of(plan, formulation)
    if choice is None:
        note = "this autoshard does not offer all choices of the plan any more: the figures are those in plan.json"
        return Today(plan, (*origin(plan), note), False)
    site_parts = parts(formulation, choice)
    now = with_parts(priced(plan, formulation.graph, formulation.hardware), formulation, site_parts)
    seconds = objective(formulation.problem, choice)
    ends = [part for part, site in zip(site_parts, formulation.sites, strict=True) if site.kind == "sink"]
    outputs = sum(part.compute_seconds + part.communication_seconds for part in ends)
    now = replace(now, search=replace(now.search, outputs_seconds=outputs))
    changed = moved(plan, seconds, now.predicted_seconds)
    if not changed:  # the certificate holds; parts may be of another version's split
        stable = replace(now, predicted_seconds=plan.predicted_seconds, predicted_peak_bytes=plan.predicted_peak_bytes)
        return Today(stable, origin(plan))
    level = plan.search.level
    least = now.predicted_seconds if level == SPEED else level_value(formulation, level, choice)
    certificate = without_proof(plan.certificate, least, seconds)  # a bound was of the costs that it was proved by
    return Today(replace(now, certificate=certificate), (*origin(plan), changed))


def moved(plan: Plan, objective_seconds: float, predicted_seconds: float) -> str:
    """Sentence that costs have changed since the plan was made; "" if they have not."""
    then, step = plan.certificate.objective_seconds, plan.predicted_seconds
    if _close(then, objective_seconds) and _close(step, predicted_seconds):
        return ""
    was = f"objective {format_seconds(then)}, predicted step {format_seconds(step)}"
    return f"costs have changed since this plan was made ({was}): figures are today's, and no bound holds for them"


def resimulated(plan: Plan, step_seconds: float, compiled: bool = False) -> tuple[str, ...]:
    """Notes on the plan for a reader of a timeline made today, of one micro-batch. `compiled`: its blocks are, unlike
    those of the plan's own step."""
    if plan.step.predicted_seconds:
        eager, whole = " of eager blocks" * compiled, format_seconds(plan.step.predicted_seconds)
        return (*origin(plan), f"the timeline is of one micro-batch by itself; the step of all{eager} takes {whole}")
    if compiled:
        return (*origin(plan), f"with eager blocks the predicted step is {format_seconds(plan.predicted_seconds)}")
    if _close(plan.predicted_seconds, step_seconds):
        return origin(plan)
    then = format_seconds(plan.predicted_seconds)
    return (*origin(plan), f"simulated again: when the plan was made, its predicted step was {then}")


def origin(plan: Plan) -> tuple[str, ...]:
    """Notes that another version made the plan, or that its profile changed since; the plan holds its own profile."""
    version = dict(plan.versions).get("autoshard", __version__)
    notes = [f"this plan was made by autoshard {version}, this is {__version__}"] if version != __version__ else []
    if plan.hardware in list_profiles() and load_hardware(plan.hardware).text != plan.hardware_text:
        notes.append(f"the profile {plan.hardware} has changed since: the figures are of the one that the plan holds")
    return tuple(notes)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= ROUNDING * max(abs(one), abs(other))


# --- the choices of a plan ------------------------------------------------------------------------------------------


def decisions(plan: Plan) -> list[tuple[str, Decided]]:
    """(kind, decision) of everything that was chosen."""
    stored = (("input", plan.inputs), ("parameter", plan.parameters), ("buffer", plan.buffers))
    return [*((kind, t) for kind, tensors in stored for t in tensors), *(("op", op) for op in plan.ops)]


def said(decided: Decided) -> str:
    return decided.strategy if isinstance(decided, OpPlan) else str(decided.layout)


def chosen(plan: Plan, formulation: Formulation) -> dict[int, int]:
    """Node -> index of the plan's choice, if the formulation offers it. Sinks are no choices."""
    texts = {(kind, d.op if isinstance(d, OpPlan) else d.name): said(d) for kind, d in decisions(plan)}
    indices = {}
    known: dict[int, dict[str, int]] = {}  # by the tuple of choices, which alike sites share
    for n, site in enumerate(formulation.sites):
        choices: Sequence[object] = site.strategies or site.layouts
        if id(choices) not in known:
            known[id(choices)] = {str(choice): s for s, choice in reversed([*enumerate(choices)])}
        offered, text = known[id(choices)], texts.get((site.kind, site.name))
        if text is not None and text in offered:
            indices[n] = offered[text]
    return indices


def choice_of(plan: Plan, formulation: Formulation) -> tuple[int, ...] | None:
    """Index of the plan's choice at every node, None if one is not offered."""
    indices = chosen(plan, formulation)
    layouts = _layouts(formulation, indices)
    ends = {move.tensor: move.target for move in plan.redistributions if OUTPUT in move.consumers}
    buffers = {buffer.name: buffer.layout for buffer in plan.buffers}
    for n, site in enumerate(formulation.sites):
        if site.kind == "sink":
            layout = _end(site, {**layouts, **ends}, buffers)
            if layout in site.layouts:
                indices[n] = site.layouts.index(layout)
    return tuple(indices[n] for n in range(len(formulation.sites))) if len(indices) == len(formulation.sites) else None


def _end(site: Site, outputs: Mapping[str, Layout], buffers: Mapping[str, Layout]) -> Layout | None:
    """Layout that a sink wants: of an output, its own or the one redistributed for it; of an update, the buffer's."""
    kind, _, tensor = site.name.partition(":")
    return buffers.get(kind.removeprefix("update")) if kind.startswith("update") else outputs.get(tensor)


def _layouts(formulation: Formulation, indices: Mapping[int, int]) -> dict[str, Layout]:
    """Tensor -> layout in which its producer leaves it."""
    layouts: dict[str, Layout] = {}
    for n, choice in indices.items():
        site = formulation.sites[n]
        if site.kind == "op":
            layouts |= dict(
                zip(formulation.graph.by_op[site.name].results, site.strategies[choice].results, strict=True)
            )
        else:
            layouts[site.name] = site.layouts[choice]
    return layouts
