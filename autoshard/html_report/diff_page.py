"""Two reports side by side: what the plans are predicted to cost, where that goes, and which decisions differ."""

from __future__ import annotations

from typing import Any

from autoshard.html_report.picture.plan_picture import plan_svg
from autoshard.html_report.timeline_series import KINDS, bytes_by_kind
from autoshard.replay.simulated_plan import SimulatedPlan
from autoshard.text import plan_diff
from autoshard.text.account_text import kind_words
from autoshard.text.answer_labels import MEMORY, STEP, certainty
from autoshard.text.plan_diff import bytes_row, seconds_row
from autoshard.text.plan_figures import error_band, peak_bytes, utilisation
from autoshard.units import signed_seconds

Row = tuple[str, str, str, str]


def diff_page(one: SimulatedPlan, other: SimulatedPlan) -> dict[str, Any]:
    """Everything the template of two reports names."""
    diff = plan_diff.diff(one.plan, one.graph, other.plan, other.graph)
    names = [side.plan.model or side.graph.name for side in (one, other)]
    return {
        "title": f"{names[0]}: two plans compared",
        "model": names[0] if names[0] == names[1] else f"{names[0]} and {names[1]}",
        "sides": [(label, _described(side)) for label, side in (("A", one), ("B", other))],
        "figures": _figures(one, other),
        "time": _time(one, other),
        "memory": _memory(one, other),
        "changes": [_change(change) for change in diff.changes],
        "same": diff.same,
        "missing": diff.missing,
        "notes": diff.notes,
        "certainty": [certainty(one.plan), certainty(other.plan)],
        "pictures": [plan_svg(s.plan, s.graph, s.hardware, key) for s, key in ((one, "plan-a"), (other, "plan-b"))],
    }


def _described(side: SimulatedPlan) -> str:
    plan = side.plan
    return f"{plan.mesh}, {plan.mesh.size} devices of {plan.hardware}, {plan.precision}, level {plan.search.level}"


def _figures(one: SimulatedPlan, other: SimulatedPlan) -> list[Row]:
    a, b = one.step.account, other.step.account
    rows = [seconds_row(STEP, a.step_seconds, b.step_seconds)]
    bands = [str(error_band(side.plan, side.graph)) for side in (one, other)]
    rows.append(("error band", bands[0], bands[1], ""))
    rows.append(bytes_row(MEMORY, *(peak_bytes(side.plan, side.step.account) for side in (one, other))))
    shares = [utilisation(side.plan, side.graph, side.step.account.step_seconds) for side in (one, other)]
    if all(shares):
        apart = f"{100 * (shares[1] - shares[0]):+.1f} points"
        rows.append(("MFU", f"{shares[0]:.1%}", f"{shares[1]:.1%}", apart))
    counts = [len(side.plan.redistributions) for side in (one, other)]
    rows.append(("redistributions", str(counts[0]), str(counts[1]), f"{counts[1] - counts[0]:+d}"))
    return rows


def _time(one: SimulatedPlan, other: SimulatedPlan) -> list[Row]:
    """The parts of the step, which add up to it, the mean of its stages."""
    a, b = one.step.account.mean, other.step.account.mean
    kinds = dict.fromkeys(kind for kind, _ in (*a.parts, *b.parts))
    return [seconds_row(kind_words(kind), a.seconds(kind), b.seconds(kind)) for kind in kinds]


def _memory(one: SimulatedPlan, other: SimulatedPlan) -> list[Row]:
    a, b = (bytes_by_kind(side.program, side.graph, side.hardware) for side in (one, other))
    return [bytes_row(KINDS[kind], a[kind], b[kind]) for kind in KINDS if a[kind] or b[kind]]


def _change(change: plan_diff.ChangedDecision) -> tuple[str, str, str, str, str]:
    return change.name, f"{change.times}x", change.one, change.other, signed_seconds(change.seconds)
