"""Alternatives to the plan: every plan that was simulated, as rows and as points of time against memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.html_report.picture import svg
from autoshard.html_report.picture.plot_axis import PlotAxis, PlotFrame
from autoshard.ir.plan import Plan
from autoshard.search.pareto_front import Point
from autoshard.search.style_plans import StylePlan
from autoshard.solvers.common.result import fits
from autoshard.text.answer_labels import MEMORY, STEP
from autoshard.units import format_bytes, format_seconds

FRAME = PlotFrame(720.0, 340.0, left=84.0, right=130.0, top=18.0, bottom=46.0)
SHAPES = {"chosen": "the chosen plan", "style": "a known style", "simulated": "another plan on this mesh",
          "mesh": "the best plan of another mesh", "front": "asked for by --pareto"}  # fmt: skip


@dataclass(frozen=True)
class Alternative:
    """A simulated plan: `kind` is of SHAPES, `outcome` why it is not the chosen one. `best`: no other is better in both
    time and memory."""

    name: str
    kind: str
    seconds: float
    peak_bytes: float
    outcome: str
    best: bool = False


def alternatives(plan: Plan, styles: Sequence[StylePlan], front: Sequence[Point]) -> list[Alternative]:
    """Alternatives in order of time; one for each place, under its first name."""
    peak = plan.step_peak_bytes
    entries = [Alternative(f"{plan.mesh}, as chosen", "chosen", plan.judged_seconds, peak, "chosen")]
    for style in styles:
        there = fits(style.predicted_peak_bytes, plan.capacity_bytes)
        outcome = _than(plan, style.predicted_seconds) if there else "too large"
        entries.append(Alternative(style.name, "style", style.predicted_seconds, style.predicted_peak_bytes, outcome))
    if plan.step.is_whole or plan.search.sizes:  # the others are of a micro-batch on one stage, or of one size
        return _marked([entry for entry in entries if entry.seconds > 0])
    for option in plan.search.candidates:
        entries.append(
            Alternative(option.name, "simulated", option.predicted_seconds, option.predicted_peak_bytes, option.outcome)
        )
    for tried in plan.search.meshes:
        size = tried.predicted_peak_bytes
        entries.append(Alternative(f"mesh {tried.mesh}", "mesh", tried.predicted_seconds, size, tried.outcome))
    for point in front:
        words = _than(plan, point.predicted_seconds) if point.fits else "too large"
        name = f"least time within {format_bytes(point.predicted_peak_bytes)}"
        entries.append(Alternative(name, "front", point.predicted_seconds, point.predicted_peak_bytes, words))
    return _marked([entry for entry in entries if entry.seconds > 0])


def _than(plan: Plan, seconds: float) -> str:
    apart = seconds - plan.judged_seconds
    if abs(apart) < 1e-9 * plan.judged_seconds:
        return "as fast"
    return f"{format_seconds(abs(apart), 3)} {'slower' if apart > 0 else 'faster'}"


def _marked(entries: list[Alternative]) -> list[Alternative]:
    places: dict[tuple[float, float], Alternative] = {}
    for entry in entries:
        first = places.setdefault((entry.seconds, entry.peak_bytes), entry)
        if first is not entry and entry.name not in first.name and entry.outcome != "chosen":
            name = f"{first.name}; also {entry.name}"
            places[entry.seconds, entry.peak_bytes] = Alternative(
                name, first.kind, first.seconds, first.peak_bytes, first.outcome
            )
    ordered = sorted(places.values(), key=lambda entry: (entry.seconds, entry.peak_bytes))
    marked, least = [], math.inf
    for entry in ordered:
        best = entry.peak_bytes < least
        marked.append(Alternative(entry.name, entry.kind, entry.seconds, entry.peak_bytes, entry.outcome, best))
        least = min(least, entry.peak_bytes)
    return marked


def view(plan: Plan, styles: Sequence[StylePlan], front: Sequence[Point]) -> dict[str, Any]:
    """Rows with the plot of them, and a sentence that says the same."""
    entries = alternatives(plan, styles, front)
    rows = [("no.", "what it is", "kind", STEP, MEMORY, "outcome", "Pareto-optimal")]
    rows += [
        (
            str(number),
            entry.name,
            SHAPES[entry.kind],
            format_seconds(entry.seconds),
            format_bytes(entry.peak_bytes),
            entry.outcome,
            "yes" if entry.best else "",
        )
        for number, entry in enumerate(entries, 1)
    ]
    return {"alternatives": rows, "alternatives_plot": plot(entries, plan)}


def plot(entries: Sequence[Alternative], plan: Plan) -> str:
    """Points with their numbers, each a link to its row; a line through those that no other is better than."""
    across = PlotAxis.of([entry.seconds for entry in entries], FRAME.left, FRAME.end)
    up = PlotAxis.of([entry.peak_bytes for entry in entries], FRAME.floor, FRAME.top, 1024.0)
    marks = [(across.at(value), format_seconds(value, 3)) for value in across.ticks()]
    names = f"{STEP}{across.note}", f"{MEMORY}{up.note}"
    body = FRAME.panel(marks, up, format_bytes, names)
    best = [entry for entry in entries if entry.best]
    path = " L ".join(
        f"{svg.number(across.at(entry.seconds))} {svg.number(up.at(entry.peak_bytes))}" for entry in _steps(best)
    )
    body.append(svg.path(f"M {path}", class_="edge"))
    if math.isfinite(plan.capacity_bytes) and up.covers(plan.capacity_bytes):
        y = up.at(plan.capacity_bytes)
        body.append(svg.line(FRAME.left, y, FRAME.end, y, class_="edge", stroke_dasharray="5 4"))
        body.append(svg.text(FRAME.end + 4, y + 4, "memory limit", class_="small"))
    taken: list[tuple[float, float]] = []
    for number, entry in enumerate(entries, 1):
        body += _mark(number, entry, across.at(entry.seconds), up.at(entry.peak_bytes), taken)
    body += _legend({entry.kind for entry in entries})
    words = "; ".join(
        f"{entry.name}: {format_seconds(entry.seconds)}, {format_bytes(entry.peak_bytes)}" for entry in best
    )
    about = f"{len(entries)} simulated plans. No other is better in both time and memory than: {words}."
    return svg.document(FRAME.width, FRAME.height, "Step time against memory", about, body, "plot", "group")


def _steps(best: Sequence[Alternative]) -> list[Alternative]:
    """Points with the corners between: until the next is reached in time, nothing needs less memory."""
    corners: list[Alternative] = []
    for entry in best:
        if corners:
            corners.append(Alternative("", "", entry.seconds, corners[-1].peak_bytes, ""))
        corners.append(entry)
    return corners


def _mark(number: int, entry: Alternative, x: float, y: float, taken: list[tuple[float, float]]) -> list[str]:
    said = f"{number}. {entry.name}: {format_seconds(entry.seconds)}, {format_bytes(entry.peak_bytes)}, {entry.outcome}"
    place = next(
        (dx, dy)
        for dx, dy in ((8, 4), (8, -8), (-18, 4), (8, 16), (-18, -8), (0, 0))
        if (dx, dy) == (0, 0) or all(abs(x + dx - a) > 14 or abs(y + dy - b) > 10 for a, b in taken)
    )
    taken.append((x + place[0], y + place[1]))
    label = svg.text(x + place[0], y + place[1], str(number), class_="small") if place != (0, 0) else ""
    shape = _shape(entry.kind, x, y)
    named = f'<a href="#alternative-{number}" aria-label={svg.quoted(said)}>'
    return [f"{named}<title>{svg.safe(said)}</title>{shape}{label}</a>"]


def _shape(kind: str, x: float, y: float) -> str:
    """A mark that differs by form too, not by colour alone."""
    if kind == "style":
        return svg.rect(x - 5, y - 5, 10, 10, class_="ink1")
    if kind in _CORNERS:
        points = " ".join(f"{svg.number(x + dx)},{svg.number(y + dy)}" for dx, dy in _CORNERS[kind])
        return f"<polygon{svg.attributes(points=points, class_='ink2' if kind == 'mesh' else 'ink3')}/>"
    size, ink = (7, "ink0") if kind == "chosen" else (4.5, "ink7")
    return f"<circle{svg.attributes(cx=x, cy=y, r=size, class_=ink)}/>"


_CORNERS = {"mesh": ((0, -6), (6, 5), (-6, 5)), "front": ((0, -6), (6, 0), (0, 6), (-6, 0))}


def _legend(kinds: set[str]) -> list[str]:
    body = []
    for index, kind in enumerate(kind for kind in SHAPES if kind in kinds):
        y = FRAME.top + 20 + 24 * index
        body.append(_shape(kind, FRAME.end + 12, y))
        for row, words in enumerate(svg.folded(SHAPES[kind], FRAME.right - 26, 10)):
            body.append(svg.text(FRAME.end + 23, y + 4 + 10 * row, words, class_="small"))
    return body
