"""The figures of a plan, each composed once under its one name: rows of the console, tiles of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cluster.hardware import PRECISION_DTYPES, Hardware, parse_hardware
from autoshard.constraints.host_offers import plan_host_bytes
from autoshard.costs.bands import Band, family
from autoshard.costs.model_flops import flops_by_dtype, ideal_seconds
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.search.objectives import NAMES
from autoshard.search.style_plans import StylePlan
from autoshard.simulation.step_account import StepAccount
from autoshard.step_corrections.software import KERNELS
from autoshard.step_corrections.step_bands import step_kind, whole_step_band
from autoshard.text.answer_labels import MEMORY, gain_words, gap, gap_words, space
from autoshard.text.size_table import step_name
from autoshard.units import counted, format_bytes, format_flop_rate, format_seconds

HOST_MEMORY = "host memory"


@dataclass(frozen=True)
class PlanFigure:
    """`note` follows the value on its line, `about` replaces it where there is room. `share`: percent of a bar."""

    label: str
    value: str
    note: str = ""
    about: str = ""
    share: float | None = None

    @property
    def words(self) -> str:
        return f"{self.value} {self.note}".strip()

    @property
    def more(self) -> str:
        return self.about or self.note


def figures(plan: Plan, graph: Graph, account: StepAccount | None = None) -> list[PlanFigure]:
    """Figures: step, memory, what hosts hold, utilisation. `account`: as simulated today, else the plan's own."""
    step = account.step_seconds if account else plan.step_seconds
    band, hardware = error_band(plan, graph), parse_hardware(plan.hardware_text)
    low, high = (format_seconds(step * (1 + sign * band.error), 3) for sign in (-1, 1))
    what = "one optimizer step" if graph.loss else "forward only"
    what += f" of {counted(plan.step.micro_batches, 'micro-batch')}" if plan.step.micro_batches > 1 else ""
    rows = [PlanFigure(step_name(graph), format_seconds(step), str(band), f"{low} to {high}, {band}; {what}")]
    peak, room = peak_bytes(plan, account), plan.step_capacity_bytes
    if math.isfinite(room) and room:
        note = f"of {format_bytes(room)} ({peak / room:.1%})"
        rows.append(PlanFigure(MEMORY, format_bytes(peak), note, share=_percent(peak / room)))
    else:
        rows.append(PlanFigure(MEMORY, format_bytes(peak), about="no limit was set"))
    if tables := [tensor.path for tensor in plan.parameters if tensor.layout.host]:
        named = tables[0] if len(tables) == 1 else f"{len(tables)} tables, {tables[0]} the first,"
        note = f"per device: {named} with gradient and optimizer state"
        about = f"{note}; {format_bytes(hardware.host_memory_bytes)} of its host are for a device"
        rows.append(PlanFigure(HOST_MEMORY, format_bytes(plan_host_bytes(plan, graph)), note, about))
    if used := utilisation(plan, graph, step):
        rows.append(PlanFigure("MFU", f"{used:.1%}", _peak(graph, hardware), share=_percent(used)))
    return rows


def _peak(graph: Graph, hardware: Hardware) -> str:
    """Peak rate of the dtype in which most is computed; no figure for several kinds of devices."""
    dtype = next(iter(graph.once(flops_by_dtype)))
    rate = "FLOP/s" if hardware.kinds else format_flop_rate(hardware.peak_flops(dtype), 3)
    return f"of the devices' peak, {rate} ({dtype})"


def _percent(share: float) -> float:
    return round(100 * min(1.0, share), 2)


def peak_bytes(plan: Plan, account: StepAccount | None) -> float:
    """The simulated peak; on several kinds of devices the plan's, of the device that its own memory fills most."""
    return plan.step_peak_bytes if account is None or plan.step.capacity_bytes else account.peak_bytes


def utilisation(plan: Plan, graph: Graph, step_seconds: float) -> float:
    """The model's FLOPs over the devices' peak, 0 where either is not known."""
    ideal = ideal_seconds(graph, parse_hardware(plan.hardware_text), plan.devices) * plan.step.micro_batches
    return ideal / step_seconds if step_seconds else 0.0


def baselines(plan: Plan, styles: Sequence[StylePlan]) -> list[PlanFigure]:
    """Gain over each baseline style, or why there is nothing to compare; `note`: its step, "" without one."""
    return [_baseline(style, gain_words(plan, style)) for style in styles]


def _baseline(style: StylePlan, words: str) -> PlanFigure:
    if not style.predicted_seconds:
        return PlanFigure(style.name, words)
    step = format_seconds(style.predicted_seconds)
    return PlanFigure(style.name, words, step, f"it takes {step} and {format_bytes(style.predicted_peak_bytes)}")


def error_band(plan: Plan, graph: Graph) -> Band:
    """Error band of the predicted step, which reports that no emitted package was measured on these devices."""
    seconds: dict[str, float] = {}
    for op in plan.ops:
        kind = family(graph.by_op[op.op].target)
        seconds[kind] = seconds.get(kind, 0.0) + op.forward_seconds + op.backward_seconds
    seconds["collective"] = sum(move.forward_seconds + move.backward_seconds for move in plan.redistributions)
    hardware, dtype = parse_hardware(plan.hardware_text), PRECISION_DTYPES[plan.precision][0]
    return whole_step_band(hardware, seconds, dtype, step_kind(hardware, "autoshard", KERNELS, plan.mesh.size))


CERTIFICATE = ("solver", "status", "sum of costs", "minimised", "lower bound", "gap")


def certificate(plan: Plan) -> tuple[str, ...]:
    """Cells under CERTIFICATE."""
    certificate, show = plan.certificate, format_bytes if plan.search.level == 1 else format_seconds
    bound = show(certificate.level_bound) if certificate.level_bound > 0 else "none"
    status, costs = certificate.status + space(plan), format_seconds(certificate.objective_seconds)
    return certificate.solver, status, costs, show(certificate.level_objective), bound, gap_words(plan)


def certificate_rows(plan: Plan) -> list[tuple[str, str]]:
    """Rows of what was minimised, its bound and the gap between; and the sum of costs, in which nothing overlaps."""
    solver, status, costs, minimised, bound, share = certificate(plan)
    several = plan.step.micro_batches > 1 or plan.step.stages > 1
    step = f"average micro-batch on one {plan.step.word}" if several else "simulated step"
    name = ("communication and replicated work", "least memory as the solver counts", step)[plan.search.level]
    none = "no lower bound of it alone: its step was searched as a whole" if plan.search.steps else "no lower bound"
    known = none if gap(plan) is None else f"lower bound {bound}, gap {share}"
    text = f"{name} {minimised}, {known} (solver {solver}, {status})"
    level = f"level {plan.search.level} ({NAMES[plan.search.level]})"
    return [("sum of costs", f"{costs} (no overlap)"), (level, text)]
