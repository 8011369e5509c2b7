"""docs/architectures.md from the rows: nothing in it but what they say."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.architecture_row import INFERENCE_MESH, Extent, Row
from benchmarks.package_runs import HARDWARE, MESH, STAGES, STRATEGY

HEADER = ("architecture", "reached", "verified", "operators", "distinct", "without a rule", "error", "reason")
ALL, NOT_RUN = "all", "not run"
_BAR = re.compile(r"(?<!\\)\|")  # between cells: one within a cell is escaped
_PASSED = re.compile(r"^(\S+) +(\d+) +(\d+) +(\d+) +(\S+e[-+]\d+)$", re.MULTILINE)


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


def passed_list(rows: Sequence[Row]) -> str:
    """Name, operators, distinct ones, plans and largest error of the rows that passed without a remark."""
    lines = [
        f"{row.name:<26}{row.ops:>4}{row.operators:>4}{row.plans:>3}  {row.largest_error:.1e}"
        for row in rows
        if _plainly_passed(row)
    ]
    return "\n".join(lines)


def _plainly_passed(row: Row) -> bool:
    return row.passed and row.operators > 0 and not (row.without_rule or row.reasons)


def table(rows: Sequence[Row]) -> str:
    """The exceptions, as markdown."""
    lines = [HEADER, tuple("---" for _ in HEADER), *(cells(row) for row in rows if not _plainly_passed(row))]
    return "\n".join("| " + " | ".join(_text(cell) for cell in line) + " |" for line in lines)


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


def rows_of(text: str, extent: Extent) -> dict[str, Row]:
    """The rows that `page` wrote, but those not run or not installed; none of a page of another extent."""
    if extent.words not in text:
        return {}
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    split = [[cell.strip().replace("\\|", "|") for cell in _BAR.split(line)[1:-1]] for line in lines]
    found = [_row(dict(zip(HEADER, line, strict=True)), extent) for line in split]
    for name, ops, distinct, plans, error in _PASSED.findall(text):
        line = (name, ALL, f"{plans}/{plans}", ops, distinct, "", error, "")
        found.append(_row(dict(zip(HEADER, line, strict=True)), extent))
    return {row.name: row for row in found if row is not None}


def _row(cell: dict[str, str], extent: Extent) -> Row | None:
    reason, refused = cell["reason"], cell["reason"].startswith("refused: ")
    if reason == NOT_RUN or reason.startswith("not installed: "):
        return None
    verified, _, plans = cell["verified"].partition("/")
    reached = {ALL: len(STAGES)} | {stage: number for number, stage in enumerate(STAGES, 1)}
    without = tuple(cell["without a rule"].split(", ")) if cell["without a rule"] else ()
    return Row(
        cell["architecture"], extent.name, refused=refused, stages=STAGES[: reached.get(cell["reached"], 0)],
        ops=int(cell["operators"] or 0), operators=int(cell["distinct"] or 0), without_rule=without,
        plans=int(plans or 0), verified=int(verified or 0), largest_error=float(cell["error"] or 0.0),
        reasons=(reason.removeprefix("refused: "),) if reason else (),
    )  # fmt: skip


def page(rows: Sequence[Row], extent: Extent) -> str:
    """docs/architectures.md."""
    return f"""# Architectures

{counts(rows)}.

Written by `python -m benchmarks.architectures{" --quick" * (extent.name == "quick")} --results FILE --write`.

Each model is built from a small configuration (`tests/models`) of `transformers`, `timm`, `diffusers`, `peft`,
published code, or `torch.nn` alone. It passes these stages:

1. *captured*, *planned*: `autoshard plan MODEL --mesh {MESH} --hardware {HARDWARE} --strategy {STRATEGY}` (the best
   plan of so small a model would shard nothing);
2. *started*, *saved*: the printed torchrun command trains over gloo and saves a checkpoint after each step;
3. *killed*, *resumed*: all processes get SIGKILL, and training resumes from the last checkpoint at the next step;
4. *taken back*: `convert.py --to-original`, and the original class loads the result, strictly;
5. *weights*: the printed command starts from the original's own safetensors.

*verified*: plans whose package computes the original's outputs, gradients, parameters and buffers over three optimizer
steps in float64, dropout included, with all devices in lock-step. Plans: {extent.words}; for inference without a loss,
those of `{INFERENCE_MESH}` again. Random plans use any valid strategies and redistributions, so they test more rules
than the best plan does.

## Exceptions

*without a rule*: operators that run whole on every device; the rest of the model is still sharded.

{table(rows)}

## Passed

Operators, distinct operators, verified plans and the largest error:

```text
{passed_list(rows)}
```
"""
