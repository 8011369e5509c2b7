"""Real architectures in every respect: captured, planned, verified under random plans, and the printed torchrun command
started, saved, killed and resumed.

    python -m benchmarks.architectures [NAME ...] [--part K/N] [--quick] [--again] [--jobs 2] [--write]

Appends one line of JSON for each architecture to architectures.jsonl here (or `--results FILE`), so it can be stopped
and goes on where it ended: delete a line to run its model again; `--again` runs those that did not pass. `--write`
renews docs/architectures.md from the file. The models are those of tests/models, each in a process of its own. Some
need a library beside transformers: `pip install timm torchvision diffusers peft` (torchvision of the very release and
kind, CPU or CUDA, of torch); without it they are "not installed", and not counted.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import architecture_row as own
from benchmarks import harness
from benchmarks.architecture_row import EXTENTS, FULL, QUICK, STAGES, Extent, Row, measure, row_of
from benchmarks.harness import ROOT
from tests.models import NAMES, missing_library

TIMEOUT_SECONDS = {FULL: 3600.0, QUICK: 1200.0}
MEMORY_BYTES = 16 * 2**30  # of address space: more is a fault
RESULTS = Path(__file__).with_suffix(".jsonl")
PAGE = ROOT / "docs" / "architectures.md"


HEADER = ("architecture", "reached", "verified", "operators", "distinct", "without a rule", "error", "reason")
ALL, NOT_RUN = "all", "not run"


def read(path: Path) -> dict[str, Row]:
    """The last row of each name."""
    return {row.name: row for row in map(row_of, harness.logged(path))}


def is_pending(name: str, row: Row | None, extent: Extent, retry: bool = False) -> bool:
    """Without a row of this extent, or its library has come; with `retry` also where it did not pass."""
    if row is None or row.extent != extent.name:
        return True
    return not missing_library(name) if row.missing else retry and not row.passed


def run(name: str, extent: Extent) -> Row:
    """Measure in a fresh process; a crash or a timeout is a reason too. Nothing that it started is left."""
    command = [sys.executable, "-c", f"from benchmarks import architectures as a; a.work({name!r}, {extent.name!r})"]
    with tempfile.TemporaryDirectory(prefix="autoshard-architecture-", ignore_cleanup_errors=True) as temporary:
        outcome = harness.ended(command, TIMEOUT_SECONDS[extent], HF_HUB_OFFLINE="1", TMPDIR=temporary)
    row = _last_row(name, extent, outcome.output)
    if os.environ.get("AUTOSHARD_TRACEBACK"):
        sys.stderr.write(outcome.errors)
    if not outcome.end:
        return row
    last = outcome.errors.strip().splitlines()[-1:] if outcome.code else []
    return replace(row, reasons=(*row.reasons, ": ".join([outcome.end, *last])))


def _last_row(name: str, extent: Extent, output: str) -> Row:
    """The worker writes its row anew before each plan; a line that was cut off is none."""
    lines = [line for line in output.splitlines(keepends=True) if line.startswith('{"name"') and line.endswith("\n")]
    return row_of(json.loads(lines[-1])) if lines else Row(name, extent.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tests/models; without it all of them")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of rows")
    parser.add_argument("--part", default="0/1", help="every N-th name from the K-th: K/N")
    parser.add_argument("--quick", action="store_true", help=f"verify only {QUICK.words.replace('`', '')}")
    parser.add_argument("--again", action="store_true", help="run those again that did not pass")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    options = parser.parse_args(arguments)
    extent = EXTENTS["quick" if options.quick else "full"]
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"no architecture {', '.join(unknown)}; there are {', '.join(NAMES)}")
    names, rows = harness.part(list(dict.fromkeys(options.names)) or list(NAMES), options.part), read(options.results)
    left = [name for name in names if is_pending(name, rows.get(name), extent, options.again)]
    rows |= _measured(left, extent, options.jobs, options.results)
    print(counts([rows[name] for name in names]))
    if options.write:
        PAGE.write_text(page([rows.get(name, Row(name, extent.name)) for name in NAMES], extent), encoding="utf-8")
    return 0 if all(rows[name].passed or rows[name].missing or rows[name].refused for name in names) else 6


def _measured(names: Sequence[str], extent: Extent, jobs: int, results: Path) -> dict[str, Row]:
    """Each row is in the file as soon as it is there. When interrupted, those that wait are not begun."""
    rows = {}
    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed([pool.submit(run, name, extent) for name in names]):
            row = done.result()
            harness.log(results, asdict(row))
            print(_line(row), flush=True)
            rows[row.name] = row
    finally:
        pool.shutdown(cancel_futures=True)
    return rows


def work(name: str, extent: str) -> None:
    """In the process of one architecture: prints its row, as far as it is, before each plan and at the end."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def show(row: Row) -> None:
        print(json.dumps(asdict(row)), flush=True)

    show(measure(name, EXTENTS[extent], show))


def _line(row: Row) -> str:
    outcome = f"not installed: {row.missing}" if row.missing else "; ".join(row.reasons) or "ok"
    stages = row.stages[-1] if row.stages else ""
    return f"{row.name:24} {stages:10} {row.verified}/{row.plans} {row.seconds:5.0f} s  {outcome}"


# --- the page -------------------------------------------------------------------------------------------------------


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
    return harness.rendered(
        "architectures.md.j2",
        counts=counts(rows),
        quick=" --quick" * (extent.name == "quick"),
        mesh=own.MESH,
        hardware=own.HARDWARE,
        strategy=own.STRATEGY,
        plans=extent.words,
        inference=own.INFERENCE_MESH,
        header=HEADER,
        exceptions=[map(_text, cells(row)) for row in rows if not _plainly_passed(row)],
        passed=[row for row in rows if _plainly_passed(row)],
    )


if __name__ == "__main__":
    sys.exit(main())
