"""Real architectures in every respect: captured, planned, verified under random plans, and the printed torchrun command
started, saved, killed and resumed.

    python -m benchmarks.architectures --results FILE [NAME ...] [--part K/N] [--quick] [--again] [--jobs 2] [--write]

Appends one line of JSON for each architecture to FILE, so it can be stopped and goes on where it ended; `--again` runs
those anew that did not pass. `--write` renews docs/architectures.md: rows that FILE has not are kept as they stand on
the page, and what stands on neither is "not run". The models are those of tests/models, each in a process of its own.
Some need a library beside transformers: `pip install timm torchvision diffusers peft` (torchvision of the very release
and kind, CPU or CUDA, of torch); without it they are "not installed", and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.architecture_page import counts, page, rows_of
from benchmarks.architecture_row import EXTENTS, FULL, QUICK, Extent, Row, measure, row_of
from benchmarks.harness import ROOT
from benchmarks.package_runs import kill_family, patience
from tests.models import NAMES, missing_library

TIMEOUT_SECONDS = {FULL: 3600.0, QUICK: 1200.0}
MEMORY_BYTES = 16 * 2**30  # of address space: more is a fault
RESULTS = Path(tempfile.gettempdir()) / "autoshard-architectures.jsonl"
PAGE = ROOT / "docs" / "architectures.md"


# --- the file of results --------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Row]:
    """The last row of each name. A last line that was cut off is no row; ValueError for another that can't be read."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows: dict[str, Row] = {}
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            row = row_of(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: no row of this benchmark: {error}") from None
        rows[row.name] = row
    return rows


def append(path: Path, row: Row) -> None:
    """After whole lines only: what was cut off before is dropped."""
    text = path.read_bytes() if path.exists() else b""
    with path.open("ab") as stream:
        stream.truncate(text.rfind(b"\n") + 1)
        stream.write(json.dumps(asdict(row)).encode() + b"\n")


def pending(names: Sequence[str], rows: dict[str, Row], extent: Extent, again: bool = False) -> list[str]:
    """Those without a row of this extent; those whose library has come; with `again` those that did not pass."""
    return [name for name in names if _is_pending(name, rows.get(name), extent, again)]


def _is_pending(name: str, row: Row | None, extent: Extent, again: bool) -> bool:
    if row is None or row.extent != extent.name:
        return True
    return row.missing != missing_library(name) or (again and not row.passed and not row.missing)


def part(names: Sequence[str], text: str) -> list[str]:
    """`K/N`: every N-th name from the K-th, counted from 0. ValueError for anything else."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--part is K/N with K below N, such as 0/2, got {text!r}")
    return list(names)[int(number) :: int(count)]


# --- all of them ----------------------------------------------------------------------------------------------------


def run(name: str, extent: Extent) -> Row:
    """Measure in a fresh process; a crash or a timeout is a reason too. Nothing that it started is left."""
    command = [sys.executable, "-m", "benchmarks.architectures", "--worker", name, *["--quick"] * (extent == QUICK)]
    with (
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryDirectory(prefix="autoshard-architecture-", ignore_cleanup_errors=True) as temporary,
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": temporary}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
        try:
            code = process.wait(limit := patience(TIMEOUT_SECONDS[extent]))
            end = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            end = f"stopped after {limit:.0f} s"
        finally:
            kill_family(process)
        output.seek(0)
        errors.seek(0)
        row, said = _last_row(name, extent, output.read().decode()), errors.read().decode(errors="replace")
    if os.environ.get("AUTOSHARD_TRACEBACK"):
        sys.stderr.write(said)
    if not end:
        return row
    last = said.strip().splitlines()[-1:] if end.startswith("ended") else []
    return replace(row, reasons=(*row.reasons, ": ".join([end, *last])))


def _last_row(name: str, extent: Extent, output: str) -> Row:
    """The worker writes its row anew before each plan; a line that was cut off is none."""
    lines = [line for line in output.splitlines(keepends=True) if line.startswith('{"name"') and line.endswith("\n")]
    return row_of(json.loads(lines[-1])) if lines else Row(name, extent.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tests/models; without it all of them")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"the file of rows, default {RESULTS}")
    parser.add_argument("--part", default="0/1", help="every N-th name from the K-th: K/N")
    parser.add_argument("--quick", action="store_true", help=f"verify only {QUICK.words.replace('`', '')}")
    parser.add_argument("--again", action="store_true", help="run those again that did not pass")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--write", action="store_true", help="renew docs/architectures.md from the results")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    extent = EXTENTS["quick" if given.quick else "full"]
    if given.worker:
        return _work(given.worker, extent)
    if unknown := [name for name in given.names if name not in NAMES]:
        parser.error(f"no architecture {', '.join(unknown)}; there are {', '.join(NAMES)}")
    try:
        names, rows = part(list(dict.fromkeys(given.names)) or list(NAMES), given.part), read(given.results)
    except ValueError as error:
        parser.error(str(error))
    rows |= _measured(pending(names, rows, extent, given.again), extent, given.jobs, given.results)
    print(counts([rows[name] for name in names]))
    if given.write:
        PAGE.write_text(page(_of_page(rows, extent), extent), encoding="utf-8")
    return 0 if all(rows[name].passed or rows[name].missing or rows[name].refused for name in names) else 6


def _of_page(rows: dict[str, Row], extent: Extent) -> list[Row]:
    """All architectures: the row of this file, else that of the page; one not installed here replaces none."""
    stands = rows_of(PAGE.read_text(encoding="utf-8"), extent) if PAGE.exists() else {}
    here = {name: row for name, row in rows.items() if row.extent == extent.name}
    kept = here | stands | {name: row for name, row in here.items() if not row.missing}
    return [kept.get(name, Row(name, extent.name)) for name in NAMES]


def _measured(names: Sequence[str], extent: Extent, jobs: int, results: Path) -> dict[str, Row]:
    """Each row is in the file as soon as it is there. When interrupted, those that wait are not begun."""
    rows = {}
    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed([pool.submit(run, name, extent) for name in names]):
            row = done.result()
            append(results, row)
            print(_line(row), flush=True)
            rows[row.name] = row
    finally:
        pool.shutdown(cancel_futures=True)
    return rows


def _work(name: str, extent: Extent) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def show(row: Row) -> None:
        print(json.dumps(asdict(row)), flush=True)

    show(measure(name, extent, show))
    return 0


def _line(row: Row) -> str:
    outcome = f"not installed: {row.missing}" if row.missing else "; ".join(row.reasons) or "ok"
    stages = row.stages[-1] if row.stages else ""
    return f"{row.name:24} {stages:10} {row.verified}/{row.plans} {row.seconds:5.0f} s  {outcome}"


if __name__ == "__main__":
    sys.exit(main())
