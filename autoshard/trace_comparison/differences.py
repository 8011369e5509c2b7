"""Compares the predicted step with the traced one, by stream, operator and collective, largest difference first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import ROWS
from autoshard.ir.graph import Graph
from autoshard.ir.program import Compute, Program
from autoshard.simulation.timeline import COMPUTE, Event, Timeline
from autoshard.text.tables import WIDTH
from autoshard.trace_comparison.measured_step import UPDATE, MeasuredStep, canonical
from autoshard.units import ROUNDING, format_seconds, signed_seconds


@dataclass(frozen=True)
class Row:
    """One line; None if one side has nothing of the kind."""

    name: str
    predicted_seconds: float | None
    measured_seconds: float | None

    @property
    def difference_seconds(self) -> float:
        return (self.measured_seconds or 0.0) - (self.predicted_seconds or 0.0)


@dataclass(frozen=True)
class Comparison:
    """Rows by stream (the step and its components), by operator and phase, and by kind and ranks of `collectives`."""

    step: Row
    streams: tuple[Row, ...]
    operators: tuple[Row, ...]
    collectives: tuple[Row, ...]
    steps: int
    on_device: bool

    @property
    def largest(self) -> Row:
        """Row with the largest difference: an operator, a collective, or the waiting that neither explains."""
        waiting = next(row for row in self.streams if row.name == WAITING)
        return max((*self.operators, *self.collectives, waiting), key=lambda row: abs(row.difference_seconds))


COMPUTED, COMMUNICATED, WAITING = "computation", "communication", "no operator runs"


def compare(timeline: Timeline, program: Program, graph: Graph, measured: MeasuredStep) -> Comparison:
    """Compares a predicted and a measured step of the same plan. Collectives whose group size the trace does not state
    are compared by kind alone."""
    sized = any(item.group for item in measured.items if item.collective)
    sizes = dict(zip(program.mesh.names, program.mesh.sizes, strict=True))
    operators: dict[str, float] = defaultdict(float)
    collectives: dict[str, float] = defaultdict(float)
    for event in timeline.events:
        if event.collective:
            collectives[_collective(event.collective, _ranks(event, sizes) if sized else 0)] += event.duration_seconds
        else:
            operators[_operator(_name(event, program, graph), event.phase)] += event.duration_seconds
    own_operators: dict[str, float] = defaultdict(float)
    own_collectives: dict[str, float] = defaultdict(float)
    for item in measured.items:
        if item.collective:
            own_collectives[_collective(item.name, item.group if sized else 0)] += item.seconds
        else:
            own_operators[_operator(item.name, item.phase)] += item.seconds
    computed = sum(operators.values())
    waiting = timeline.step_seconds - computed
    streams = (
        Row(COMPUTED, computed, measured.compute_seconds),
        Row(COMMUNICATED, sum(collectives.values()), measured.communication_seconds),
        Row(WAITING, waiting if waiting > ROUNDING * computed else 0.0, measured.waiting_seconds),
    )
    return Comparison(
        Row("step", timeline.step_seconds, measured.step_seconds), streams, _rows(operators, own_operators),
        _rows(collectives, own_collectives), measured.steps, measured.on_device,
    )  # fmt: skip


def _rows(predicted: Mapping[str, float], measured: Mapping[str, float]) -> tuple[Row, ...]:
    rows: Iterable[Row] = (Row(n, predicted.get(n), measured.get(n)) for n in dict.fromkeys([*predicted, *measured]))
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_seconds)))


def _ranks(event: Event, sizes: Mapping[str, int]) -> int:
    ranks = 1
    for axis in event.axes:
        ranks *= sizes[axis]
    return ranks


def _collective(kind: str, ranks: int) -> str:
    return f"{kind} of {ranks}" if ranks else kind


def _operator(name: str, phase: str) -> str:
    """Label of an operator's row; the whole optimizer is one row."""
    return UPDATE if phase == UPDATE else f"{name}, {phase}"


def _name(event: Event, program: Program, graph: Graph) -> str:
    """Canonical operator name of an event; a copy that belongs to a collective is a redistribution."""
    if event.instruction is None or event.stream != COMPUTE:
        return canonical(event.name)
    instruction = program.instructions[event.instruction]
    return canonical(graph.by_op[instruction.op].target) if isinstance(instruction, Compute) else "redistribute"


def text(comparison: Comparison) -> str:
    """Tables of at most 80 columns; the largest difference first."""
    where = "kernels of a device" if comparison.on_device else "operators of a CPU"
    worst, step = comparison.largest, comparison.step
    more = "longer" if worst.difference_seconds > 0 else "shorter"
    lines = [
        f"{comparison.steps} measured step{'s' if comparison.steps > 1 else ''}, {where}",
        "",
        _line("", "predicted", "measured", "difference"),
        *_lines([step, *comparison.streams]),
        "",
        "operators",
        *_lines(comparison.operators[:ROWS]),
        *_left(comparison.operators[ROWS:]),
        "",
        "collectives",
        *(_lines(comparison.collectives) or ["  none on either side"]),
        "",
        f"Most of the difference: {worst.name}, {format_seconds(abs(worst.difference_seconds))} {more} than predicted;",
        f"the step differs by {format_seconds(abs(step.difference_seconds))}.",
    ]
    return "\n".join(lines)


def _lines(rows: Sequence[Row]) -> list[str]:
    cells = ((row.name, row.predicted_seconds, row.measured_seconds, row.difference_seconds) for row in rows)
    return [_line(name, _shown(expected), _shown(other), signed_seconds(more)) for name, expected, other, more in cells]


def _left(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    predicted = sum(row.predicted_seconds or 0.0 for row in rows)
    measured = sum(row.measured_seconds or 0.0 for row in rows)
    return _lines([Row(f"{len(rows)} more", predicted, measured)])


def _line(name: str, *cells: str) -> str:
    figures = "".join(f"{cell:>14}" for cell in cells)
    room = WIDTH - len(figures) - 2
    return f"  {name[:room]:<{room}}{figures}"


def _shown(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """JSON-ready data, in seconds; null if one side has nothing of the kind."""

    def row(entry: Row) -> dict[str, Any]:
        return {
            "name": entry.name,
            "predicted_seconds": entry.predicted_seconds,
            "measured_seconds": entry.measured_seconds,
        }

    return {
        "steps": comparison.steps,
        "step": row(comparison.step),
        **{key: [row(entry) for entry in getattr(comparison, key)] for key in ("streams", "operators", "collectives")},
        "largest": row(comparison.largest),
    }
