"""How many real architectures plan and verify: each captured, planned, and every plan run against the original.

    python benchmarks/architectures.py [--only llama,t5] [--quick] [--jobs 2] [--json] [--write]

The models are those of tests/models: 30 of the `transformers` library at small sizes, the others of torch.nn alone.
Each is trained for three steps in float64 with its loss, under two random plans on each mesh and the best one on
dp=2,tp=2; and run forward without a loss. All ranks run in lock-step in one process, one process an architecture.
`--write` renews docs/architectures.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, this finds autoshard and tests of this very clone

from tests.models import NAMES  # noqa: E402

if TYPE_CHECKING:
    from autoshard.graph.model import Graph
    from autoshard.plan import Plan

MESHES = ("tp=2", "tp=4", "dp=2,tp=2", "pp=2,dp=2,tp=2")
BEST_MESHES = ("dp=2,tp=2",)
INFERENCE_MESH = "dp=2,tp=2"
SEEDS = (1, 2)
TIMEOUT_SECONDS = 1200
MEMORY_BYTES = 16 * 2**30  # of address space: more is a fault
PAGE = ROOT / "docs" / "architectures.md"


@dataclass(frozen=True)
class Row:
    """`verified` counts the plans that passed out of `plans`; `reasons` those that did not, in words."""

    name: str
    ops: int = 0
    operators: int = 0
    without_rule: tuple[str, ...] = ()
    plans: int = 0
    verified: int = 0
    largest_error: float = 0.0
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0
    memory_bytes: int = 0

    @property
    def passed(self) -> bool:
        return self.plans > 0 and self.verified == self.plans and not self.reasons


Report = Callable[[Row], None]  # called before each plan


# --- one architecture, in a process of its own ----------------------------------------------------------------------


def measure(
    name: str,
    meshes: Sequence[str] = MESHES,
    seeds: Sequence[int] = SEEDS,
    best: Sequence[str] = BEST_MESHES,
    report: Report | None = None,
) -> Row:
    """Train and infer one architecture under every plan. A failure is a reason in the row, never an exception."""
    start = time.monotonic()
    row = Row(name)
    for training in (True, False):
        try:
            row = _measured(row, name, training, meshes if training else (INFERENCE_MESH,), seeds, best, report)
        except Exception as error:
            row = _failed(row, f"{'training' if training else 'inference'}: {_in_words(error)}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return replace(row, seconds=time.monotonic() - start, memory_bytes=memory)


def _measured(
    row: Row,
    name: str,
    training: bool,
    meshes: Sequence[str],
    seeds: Sequence[int],
    best: Sequence[str],
    report: Report | None,
) -> Row:
    from autoshard.emit import emit
    from autoshard.graph.capture import capture
    from autoshard.program.lower import lower
    from autoshard.verify import check_files, make_case

    arguments = {} if training else {"loss": False}
    graph = capture(NAMES[name], arguments, training=training)
    if training:
        row = replace(row, **_counts(graph))
        if graph.loss is None:
            return _failed(row, "the model gives no loss")
    case = make_case(NAMES[name], arguments, graph)
    for label, plan in plans(graph, meshes, seeds, best):
        if report is not None:
            report(row)
        where = f"{label} {'training' if training else 'inference'}"
        row = replace(row, plans=row.plans + 1)
        try:
            made = plan()
            program = lower(made, graph)
            proof = check_files(case, program, emit(program, made, graph))
        except Exception as error:
            row = _failed(row, f"{where}: {_in_words(error)}")
            continue
        errors = [kind.worst.error for kind in proof.kinds if kind.worst is not None]
        row = replace(row, largest_error=max([row.largest_error, *errors]))
        row = replace(row, verified=row.verified + 1) if proof.passed else _failed(row, f"{where}: {proof.failure}")
    return row


def _counts(graph: Graph) -> dict[str, Any]:
    from autoshard.rules.table import has_rule

    without = sorted({op.target for op in graph.ops if not has_rule(graph, op)})
    return {"ops": len(graph.ops), "operators": len({op.target for op in graph.ops}), "without_rule": tuple(without)}


def plans(
    graph: Graph, meshes: Sequence[str], seeds: Sequence[int], best: Sequence[str]
) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """(label, function that makes the plan): random ones on each mesh, and the best on those of `best`."""
    from autoshard.hardware import load_hardware
    from autoshard.mesh import Mesh
    from autoshard.search import search
    from autoshard.styles import random_plan

    hardware = load_hardware("a100-80g-sxm")
    for text in meshes:
        mesh = Mesh.parse(text)
        if text in best:
            yield f"{text} best", partial(search, graph, mesh, hardware)
        for seed in seeds:
            yield f"{text} random:{seed}", partial(random_plan, graph, mesh, hardware, seed)


def _failed(row: Row, reason: str) -> Row:
    return replace(row, reasons=(*row.reasons, reason))


def _in_words(error: Exception) -> str:
    if os.environ.get("AUTOSHARD_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


# --- all of them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """How much is run of each architecture."""

    meshes: tuple[str, ...] = MESHES
    seeds: tuple[int, ...] = SEEDS
    best: tuple[str, ...] = BEST_MESHES

    @property
    def words(self) -> str:
        count = f"{len(self.seeds)} random plan{'s' * (len(self.seeds) > 1)}"
        best = f", and the best on {_listed(self.best)}" if self.best else ""
        return f"{count} on {'each of ' * (len(self.meshes) > 1)}{_listed(self.meshes)}{best}"


def _listed(meshes: Sequence[str]) -> str:
    return ", ".join(f"`{mesh}`" for mesh in meshes)


FULL = Extent()
QUICK = Extent((INFERENCE_MESH,), SEEDS[:1], best=())


def run(name: str, quick: bool) -> Row:
    """Measure in a fresh process; a crash or a timeout is a reason too."""
    command = [sys.executable, __file__, "--worker", name, *["--quick"] * quick]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    seconds = TIMEOUT_SECONDS / 4 if quick else TIMEOUT_SECONDS
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        return _failed(_last_row(name, error.stdout or b""), f"stopped after {seconds:.0f} s")
    if os.environ.get("AUTOSHARD_TRACEBACK"):
        sys.stderr.write(done.stderr.decode())
    row = _last_row(name, done.stdout)
    if done.returncode:
        lines = done.stderr.decode().strip().splitlines() or [f"ended with {done.returncode}"]
        return _failed(row, lines[-1])
    return row


def _last_row(name: str, output: bytes) -> Row:
    """The worker writes its row anew before each plan."""
    lines = output.decode().splitlines()
    if not lines:
        return Row(name)
    found = json.loads(lines[-1])
    return Row(**{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})


HEADER = ("architecture", "operators", "distinct", "without a rule", "plans verified", "largest error", "reason")


def cells(row: Row) -> tuple[str, ...]:
    without = ", ".join(name.removeprefix("aten.") for name in row.without_rule)
    verified = f"{row.verified} of {row.plans}"
    error = f"{row.largest_error:.1e}" if row.plans else ""
    reason = row.reasons[0] if row.reasons else ""
    return row.name, str(row.ops), str(row.operators), without, verified, error, reason


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [HEADER, tuple("---" for _ in HEADER), *(cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def page(rows: Sequence[Row], extent: Extent = FULL) -> str:
    """docs/architectures.md."""
    passed = [row for row in rows if row.passed]
    return f"""# Architectures

{len(passed)} of {len(rows)} architectures verify under every plan. Written by
`python benchmarks/architectures.py{" --quick" * (extent == QUICK)} --write`.

Each model is built from a small configuration (30 from the `transformers` library, four with `torch.nn` alone; see
`tests/models`), captured, planned and emitted. The emitted package then runs on all devices of the mesh, and every
output, gradient, parameter and buffer is compared with the original's over three optimizer steps in float64, dropout
included.

Plans: {extent.words}; for
inference without a loss, those of `{INFERENCE_MESH}` anew. Random plans use whatever strategies and redistributions are
valid, good or bad: they try far more of the rules than the best plan does.

An operator without a rule runs whole on every device; the rest of the model is still split.

{table(rows)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="names, separated by commas", default="")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--write", action="store_true", help=f"renew {PAGE.relative_to(ROOT)}")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK.words.replace('`', '')}")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    extent = QUICK if given.quick else FULL
    if given.worker:
        return _work(given.worker, extent)
    names = given.only.split(",") if given.only else list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown or (given.write and given.only):
        parser.error(f"no architecture {', '.join(unknown)}" if unknown else "--write needs all architectures")
    rows = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for row in pool.map(partial(run, quick=given.quick), names):
            rows.append(row)
            print(json.dumps(asdict(row)) if given.json else _line(row), flush=True)
    if not given.json:
        print(table(rows))
    if given.write:
        PAGE.write_text(page(rows, extent), encoding="utf-8")
    return 0 if all(row.passed for row in rows) else 1


def _work(name: str, extent: Extent) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def show(row: Row) -> None:
        print(json.dumps(asdict(row)), flush=True)

    show(measure(name, extent.meshes, extent.seeds, extent.best, show))
    return 0


def _line(row: Row) -> str:
    outcome = "ok" if row.passed else "; ".join(row.reasons) or "nothing verified"
    return f"{row.name:20} {row.verified}/{row.plans} {row.seconds:5.0f} s  {outcome}"


if __name__ == "__main__":
    sys.exit(main())
