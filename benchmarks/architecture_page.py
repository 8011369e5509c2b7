"""docs/architectures.md from the rows: nothing in it but what they say."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.architecture_row import INFERENCE_MESH, Extent, Row
from benchmarks.harness import rendered
from benchmarks.package_runs import HARDWARE, MESH, STAGES, STRATEGY

HEADER = ("architecture", "reached", "verified", "operators", "distinct", "without a rule", "error", "reason")
ALL, NOT_RUN = "all", "not run"


def cells(row: Row) -> tuple[str, ...]:
    if row.missing or row.not_run:
        return row.name, *[""] * (len(HEADER) - 2), f"not installed: {row.missing}" if row.missing else NOT_RUN
    without = ", ".join(name.removeprefix("aten.") for name in row.without_rule)
    verified = f"{row.verified}/{row.plans}" if row.plans else ""
    graph = (str(row.ops), str(row.operators)) if row.ops else ("", "")
    error = f"{row.largest_error:.1e}" if row.plans else ""
    reason = f"refused: {row.reasons[0]}" if row.refused else "; ".join(row.reasons[:2])
    reached = ALL if row.stages == STAGES else row.stages[-1] if row.stages else "nothing"
    return row.name, reached, verified, *graph, without, error, reason


def _plainly_passed(row: Row) -> bool:
    return row.passed and row.operators > 0 and not (row.without_rule or row.reasons)


def _text(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").split())


def counts(rows: Sequence[Row]) -> str:
    """A sentence: how many are through every stage, and which are not."""
    measured = [row for row in rows if not row.missing and not row.not_run]
    kinds = {
        "refused": [row.name for row in measured if row.refused],
        "failed": [row.name for row in measured if not row.passed and not row.refused],
        "not installed, not counted": [row.name for row in rows if row.missing],
        "not run, not counted": [row.name for row in rows if row.not_run],
    }
    first = f"{sum(row.passed for row in measured)} of {len(measured)} through every stage"
    return "; ".join([first, *(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)])


def page(rows: Sequence[Row], extent: Extent) -> str:
    """docs/architectures.md."""
    return rendered(
        "architectures.md.j2",
        counts=counts(rows),
        quick=" --quick" * (extent.name == "quick"),
        mesh=MESH,
        hardware=HARDWARE,
        strategy=STRATEGY,
        plans=extent.words,
        inference=INFERENCE_MESH,
        header=HEADER,
        exceptions=[map(_text, cells(row)) for row in rows if not _plainly_passed(row)],
        passed=[row for row in rows if _plainly_passed(row)],
    )
