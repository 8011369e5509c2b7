"""Two reports beside each other: what the plans are predicted to cost, where that goes, and which decisions differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.costs.model_flops import ideal_seconds
from autoshard.html_report.answer import exposed_seconds
from autoshard.html_report.memory_table import KINDS, bytes_by_kind
from autoshard.html_report.picture.plan_picture import plan_svg
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.simulation import COMPUTE, Timeline
from autoshard.text import plan_diff
from autoshard.text.answer_words import certainty
from autoshard.text.plan_summary import error_band
from autoshard.units import format_bytes, format_seconds, signed_seconds

Row = tuple[str, str, str, str]
SHOWN = 200


@dataclass(frozen=True)
class Side:
    """One of the two: a plan carried to its simulated step."""

    plan: Plan
    graph: Graph
    program: Program
    hardware: Hardware
    timeline: Timeline


def diff_page(one: Side, other: Side) -> dict[str, Any]:
    """Everything the template of two reports names."""
    found = plan_diff.diff(one.plan, one.graph, other.plan, other.graph)
    names = [side.plan.model or side.graph.name for side in (one, other)]
    return {
        "title": f"{names[0]}: two plans compared",
        "model": names[0] if names[0] == names[1] else f"{names[0]} and {names[1]}",
        "sides": [(label, _described(side)) for label, side in (("A", one), ("B", other))],
        "figures": _figures(one, other),
        "time": _time(one, other),
        "memory": _memory(one, other),
        "changes": [_change(own) for own in found.changes[:SHOWN]],
        "more": max(0, len(found.changes) - SHOWN),
        "same": found.same,
        "missing": found.missing,
        "notes": found.notes,
        "certainty": [certainty(one.plan), certainty(other.plan)],
        "pictures": [plan_svg(s.plan, s.graph, s.hardware, key) for s, key in ((one, "plan-a"), (other, "plan-b"))],
    }


def _described(side: Side) -> str:
    plan = side.plan
    return f"{plan.mesh}, {plan.mesh.size} devices of {plan.hardware}, {plan.precision}, level {plan.search.level}"


def _figures(one: Side, other: Side) -> list[Row]:
    a, b = one.timeline, other.timeline
    rows = [_seconds("predicted step", a.step_seconds, b.step_seconds)]
    bands = [str(error_band(side.plan, side.graph)) for side in (one, other)]
    rows.append(("how sure that is", bands[0], bands[1], ""))
    rows.append(_bytes("peak memory of a device", a.peak_bytes, b.peak_bytes))
    shares = [_utilisation(side) for side in (one, other)]
    if all(shares):
        apart = f"{100 * (shares[1] - shares[0]):+.1f} points"
        rows.append(("model FLOPs utilisation", f"{shares[0]:.1%}", f"{shares[1]:.1%}", apart))
    counts = [len(side.plan.redistributions) for side in (one, other)]
    rows.append(("redistributions", str(counts[0]), str(counts[1]), f"{counts[1] - counts[0]:+d}"))
    return rows


def _utilisation(side: Side) -> float:
    ideal = ideal_seconds(side.graph, side.hardware, side.plan.mesh.size)
    return ideal / side.timeline.step_seconds if side.timeline.step_seconds else 0.0


def _time(one: Side, other: Side) -> list[Row]:
    """Computing, exposed communication and waiting add up to the step; streams run beside each other."""
    pair = one.timeline, other.timeline
    computing = [timeline.busy(COMPUTE) for timeline in pair]
    exposed = [exposed_seconds(timeline) for timeline in pair]
    idle = [max(0.0, t.step_seconds - c - e) for t, c, e in zip(pair, computing, exposed, strict=True)]
    rows = [
        _seconds("computing", *computing),
        _seconds("communicating, and computing nothing meanwhile", *exposed),
        _seconds("waiting for the host, doing neither", *idle),
    ]
    streams = dict.fromkeys(name for timeline in pair for name in timeline.streams if name != COMPUTE)
    return rows + [_seconds(f"busy: {name}", pair[0].busy(name), pair[1].busy(name)) for name in streams]


def _memory(one: Side, other: Side) -> list[Row]:
    a, b = (bytes_by_kind(side.program, side.graph, side.hardware) for side in (one, other))
    return [_bytes(KINDS[kind], a[kind], b[kind]) for kind in KINDS if a[kind] or b[kind]]


def _change(own: plan_diff.ChangedDecision) -> tuple[str, str, str, str, str]:
    return own.name, f"{own.times}x", own.one, own.other, signed_seconds(own.seconds)


def _seconds(name: str, a: float, b: float) -> Row:
    return name, format_seconds(a), format_seconds(b), signed_seconds(b - a)


def _bytes(name: str, a: float, b: float) -> Row:
    return name, format_bytes(a), format_bytes(b), ("-" if b < a else "+") + format_bytes(abs(b - a))
