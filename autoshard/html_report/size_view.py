"""Step time and memory against each dynamic size, the others as planned, with the histogram under the curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.size_histogram import MOST_POINTS
from autoshard.errors import UserError
from autoshard.graph_capture.dynamic_sizes.graph_numbers import sizes_of
from autoshard.graph_capture.dynamic_sizes.numbers import resized
from autoshard.html_report.picture import svg
from autoshard.html_report.picture.plot_axis import PlotAxis, PlotFrame
from autoshard.ir.dynamic import DynamicSize
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.replay.resize import reapply
from autoshard.search.fixed_step import predicted
from autoshard.text.answer_labels import STEP
from autoshard.text.size_table import size_table, size_words
from autoshard.units import format_bytes, format_seconds

FRAME = PlotFrame(640.0, 250.0, left=84.0, right=20.0, top=22.0, bottom=44.0)
BARS = FRAME.bottom  # height of the histogram under the curve
Row = tuple[int, float, float]  # size, seconds, bytes


def size_view(plan: Plan, graph: Graph, hardware: Hardware) -> dict[str, Any]:
    """Nothing without dynamic sizes."""
    if not graph.dynamic:
        return {"sizes": None}
    curves = [_curve(dim, plan, graph, hardware) for dim in graph.dynamic]
    drawn = zip(graph.dynamic, curves, strict=True)
    return {
        "sizes": {
            "text": f"{size_words(graph)}.",
            "rows": size_table(plan) if plan.search.sizes else [],
            "plots": [_plot(dim, rows, plan) for dim, rows in drawn if len(rows) > 1],
            "points": [
                (f"{dim.name} {size}", format_seconds(seconds), format_bytes(peak))
                for dim, rows in zip(graph.dynamic, curves, strict=True)
                for size, seconds, peak in rows
            ],
        }
    }


def _curve(dim: DynamicSize, plan: Plan, graph: Graph, hardware: Hardware) -> list[Row]:
    """Curve at sizes evenly over the range, up to the planned one, where a plan can be priced."""
    most = sizes_of(graph)[dim.name]
    spread = (dim.nearest(dim.least + (most - dim.least) * n / (MOST_POINTS - 1)) for n in range(MOST_POINTS))
    rows = []
    for size in dict.fromkeys(spread):
        try:
            at = resized(graph, {dim.name: size})
            there = plan.at_sizes(sizes_of(at))
            priced = plan if at is graph else predicted(reapply(there, graph, at, hardware), at)
        except UserError:
            continue
        rows.append((size, priced.step_seconds, priced.step_peak_bytes))
    return rows


def _plot(dim: DynamicSize, rows: Sequence[Row], plan: Plan) -> str:
    floor = FRAME.floor
    across = PlotAxis.of([float(size) for size, *_ in rows], FRAME.left, FRAME.end)
    up = PlotAxis.of([seconds for _, seconds, _ in rows], floor - BARS, FRAME.top)
    marks = [(across.at(size), str(size)) for size, *_ in rows]
    aside = f"{STEP}{up.note}; bars: share of steps" if plan.search.sizes else STEP
    body = FRAME.panel(marks, up, format_seconds, (f"{dim.name}{across.note}", aside))
    body += _bars(dim, plan, across, floor)
    line = " L ".join(f"{svg.number(across.at(size))} {svg.number(up.at(seconds))}" for size, seconds, _ in rows)
    body.append(svg.path(f"M {line}", class_="edge"))
    listed = "; ".join(f"{size}: {format_seconds(seconds)}" for size, seconds, _ in rows)
    return svg.document(
        FRAME.width, FRAME.height, f"Step time against {dim.name}", f"By {dim.name}: {listed}.", body, "plot", "img"
    )


def _bars(dim: DynamicSize, plan: Plan, across: PlotAxis, floor: float) -> list[str]:
    shares: dict[int, float] = {}
    for point in plan.search.sizes:
        size = dict(point.sizes)[dim.name]
        shares[size] = shares.get(size, 0.0) + point.weight
    most = max(shares.values(), default=1.0)
    return [
        svg.rect(across.at(size) - 4, floor - BARS * share / most, 8, BARS * share / most, class_="box")
        for size, share in sorted(shares.items())
        if across.covers(size)
    ]
