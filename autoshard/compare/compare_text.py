"""A comparison as the command prints it, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.compare.differences import Comparison, Row
from autoshard.text.tables import ROWS
from autoshard.units import format_seconds, signed_seconds

WIDTH = 34


def text(found: Comparison) -> str:
    """Tables of at most 80 columns; the largest difference first."""
    where = "kernels of a device" if found.on_device else "operators of a CPU"
    own, step = found.largest, found.step
    more = "longer" if own.difference_seconds > 0 else "shorter"
    lines = [
        f"{found.steps} measured step{'s' if found.steps > 1 else ''}, {where}",
        "",
        _line("", "predicted", "measured", "difference"),
        *_lines([step, *found.streams]),
        "",
        "operators",
        *_lines(found.operators[:ROWS]),
        *_left(found.operators[ROWS:]),
        "",
        "collectives",
        *(_lines(found.collectives) or ["  none on either side"]),
        "",
        f"Most of the difference: {own.name}, {format_seconds(abs(own.difference_seconds))} {more} than predicted;",
        f"the step differs by {format_seconds(abs(step.difference_seconds))}.",
    ]
    return "\n".join(lines)


def _lines(rows: Sequence[Row]) -> list[str]:
    cells = ((row.name, row.predicted_seconds, row.measured_seconds, row.difference_seconds) for row in rows)
    return [_line(name, _shown(own), _shown(other), signed_seconds(more)) for name, own, other, more in cells]


def _left(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    predicted = sum(row.predicted_seconds or 0.0 for row in rows)
    measured = sum(row.measured_seconds or 0.0 for row in rows)
    return _lines([Row(f"{len(rows)} more", predicted, measured)])


def _line(name: str, *cells: str) -> str:
    return f"  {name[:WIDTH]:<{WIDTH}}" + "".join(f"{cell:>14}" for cell in cells)


def _shown(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def as_dict(found: Comparison) -> dict[str, Any]:
    """In seconds; null where one side has nothing of the kind."""

    def row(own: Row) -> dict[str, Any]:
        return {"name": own.name, "predicted_seconds": own.predicted_seconds, "measured_seconds": own.measured_seconds}

    return {
        "steps": found.steps,
        "step": row(found.step),
        **{key: [row(own) for own in getattr(found, key)] for key in ("streams", "operators", "collectives")},
        "largest": row(found.largest),
    }
