"""Front of step time against memory: the problem solved under smaller and smaller limits, each plan simulated."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from autoshard.constraints.size_histogram import MOST_POINTS
from autoshard.errors import InfeasibleError
from autoshard.ir.plan import Plan
from autoshard.search.search_task import SearchTask
from autoshard.solvers.common.clock import watched
from autoshard.solvers.common.result import fits
from autoshard.solvers.relax.low_memory_plans import minimum_memory_bound


@dataclass(frozen=True)
class Point:
    """A plan: the step and peak of its program. `fits` the memory limit; `front`: no other is better in both."""

    predicted_seconds: float
    predicted_peak_bytes: float
    objective_seconds: float
    fits: bool
    front: bool = True


def front(task: SearchTask, plan: Plan, points: int = MOST_POINTS) -> tuple[Point, ...]:
    """Plans from the fastest to the leanest, `plan` and those simulated for it among them, in order of time."""
    problem = task.formulation.problem
    all_points = [
        Point(
            c.predicted_seconds,
            c.predicted_peak_bytes,
            c.objective_seconds,
            fits(c.predicted_peak_bytes, task.memory_limit_bytes),
        )
        for c in plan.search.candidates
    ]
    free = task.solve(replace(problem, capacity_bytes=float("inf")))
    all_points.append(_point(task, task.plan(free)))
    with watched(task.clock):
        least = minimum_memory_bound(problem)
    for step in range(1, points):
        if task.clock.over or free.peak_bytes <= least:
            break
        target = free.peak_bytes * (least / free.peak_bytes) ** (step / (points - 1))
        try:
            solution = task.solve(replace(problem, capacity_bytes=target * (1 + 1e-9)))
        except InfeasibleError:
            break
        all_points.append(_point(task, task.plan(solution)))
    return _marked(all_points)


def _point(task: SearchTask, plan: Plan) -> Point:
    peak = plan.predicted_peak_bytes
    return Point(plan.predicted_seconds, peak, plan.certificate.objective_seconds, task.holds(plan))


def _marked(all_points: list[Point]) -> tuple[Point, ...]:
    """Points in order of time, doubles left out, those on the front marked."""
    marked: list[Point] = []
    least = float("inf")
    for point in sorted(dict.fromkeys(all_points), key=lambda p: (p.predicted_seconds, p.predicted_peak_bytes)):
        if not marked or _place(point) != _place(marked[-1]):
            marked.append(replace(point, front=point.predicted_peak_bytes < least))
            least = min(least, point.predicted_peak_bytes)
    return tuple(marked)


def _place(point: Point) -> tuple[float, float]:
    return point.predicted_seconds, point.predicted_peak_bytes


def as_json(points: tuple[Point, ...]) -> str:
    """JSON of the points: seconds and bytes, in order of time."""
    return json.dumps({"points": [vars(point) for point in points]}, indent=1) + "\n"


def from_json(content: Any) -> tuple[Point, ...]:
    """Points of this content; ValueError if it is not what `as_json` writes."""
    try:
        return tuple(Point(**{field.name: row[field.name] for field in fields(Point)}) for row in content["points"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of points: {error}") from error


def plot(points: tuple[Point, ...], title: str) -> str:
    """Plot as SVG; the same points give the same text."""
    import matplotlib

    matplotlib.rcParams |= {"svg.hashsalt": "autoshard", "font.size": 9, "svg.fonttype": "none"}
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    units = _units(points)
    best = [point for point in points if point.front]
    others = [point for point in points if not point.front]
    axes.step(*_coordinates(best, units), where="post", marker="o", color="#3b78b8", label="no plan is better in both")
    if others:
        axes.plot(*_coordinates(others, units), "x", color="#6b7280", label="other plans simulated")
    (_, of_time), (_, of_memory) = units
    axes.set(xlabel=f"predicted step ({of_time})", ylabel=f"peak memory of a device ({of_memory})", title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "autoshard"})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _units(points: Sequence[Point]) -> tuple[tuple[float, str], tuple[float, str]]:
    """Units of time and memory: seconds or bytes in each, and its name; large ones if all values are large."""
    slow = min(point.predicted_seconds for point in points) >= 1
    large = min(point.predicted_peak_bytes for point in points) >= 2**30
    return (1.0, "s") if slow else (1e-3, "ms"), (2.0**30, "GiB") if large else (2.0**20, "MiB")


def _coordinates(
    points: list[Point], units: tuple[tuple[float, str], tuple[float, str]]
) -> tuple[list[float], list[float]]:
    (time, _), (memory, _) = units
    return [point.predicted_seconds / time for point in points], [
        point.predicted_peak_bytes / memory for point in points
    ]
