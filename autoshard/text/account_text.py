"""Where a whole step goes, as tables: one row a part, or with stages one row a stage. They add up to the step."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.simulation.step_account import BUBBLE, COMPUTED, OPTIMIZER, OTHER, StageAccount, StepAccount
from autoshard.units import format_bytes, format_seconds

EXPOSED = "exposed communication"
WORDS = {OTHER: "waiting for the host"}


def kind_words(kind: str) -> str:
    plain = (*COMPUTED, BUBBLE, OPTIMIZER)
    return WORDS.get(kind, kind if kind in plain else f"exposed {kind}")


def parts(account: StepAccount) -> list[tuple[str, float]]:
    """(part of the step, seconds) of the mean stage."""
    return [(kind_words(kind), seconds) for kind, seconds in account.mean.parts]


def breakdown_rows(account: StepAccount) -> list[tuple[str, str, str]]:
    """`time breakdown`, of the mean stage where there are several."""
    mean = f" (mean of {len(account.stages)} stages)" if len(account.stages) > 1 else ""
    step = account.step_seconds or 1.0
    rows = [(format_seconds(seconds), f"{seconds / step:5.1%}  {name}") for name, seconds in parts(account)]
    rows.append((format_seconds(account.step_seconds), f"{1:5.0%}  predicted step{mean}"))
    return [("time breakdown" if n == 0 else "", *row) for n, row in enumerate(rows)]


def stage_breakdown(account: StepAccount) -> list[tuple[str, ...]]:
    """A row a stage: what it computes, exposed communication, bubble, optimizer, host, and its peak memory."""
    columns = [*COMPUTED, EXPOSED, BUBBLE, OPTIMIZER, OTHER]
    columns = [name for name in columns if any(_seconds(stage, name) for stage in account.stages)]
    named = [{EXPOSED: "exposed", OTHER: "host"}.get(name, name) for name in columns]
    rows: list[tuple[str, ...]] = [("stage", *named, "memory")]
    for number, stage in enumerate(account.stages):
        rows.append((str(number), *_cells(stage, columns), format_bytes(stage.peak_bytes)))
    rows.append(("mean", *_cells(account.mean, columns), ""))
    return rows


def _cells(stage: StageAccount, columns: Sequence[str]) -> list[str]:
    return [format_seconds(_seconds(stage, name), 3) for name in columns]


def _seconds(stage: StageAccount, name: str) -> float:
    return stage.exposed_seconds if name == EXPOSED else stage.seconds(name)
