"""One architecture of docs/architectures.md: its package really run, and random plans of the same graph verified."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import load
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.rules.operator_table import has_rule
from autoshard.verification import check_files, make_case
from benchmarks import harness
from benchmarks.package_runs import STAGES, run_package
from tests.models import NAMES, missing_library

INFERENCE_MESH = "dp=2,tp=2"


@dataclass(frozen=True)
class Extent:
    """How many plans of each architecture are verified."""

    name: str
    meshes: tuple[str, ...]
    seeds: tuple[int, ...]
    best: tuple[str, ...]

    @property
    def words(self) -> str:
        count = f"{len(self.seeds)} random plan{'s' * (len(self.seeds) > 1)}"
        best = f", and the best on {_listed(self.best)}" if self.best else ""
        return f"{count} on {'each of ' * (len(self.meshes) > 1)}{_listed(self.meshes)}{best}"


def _listed(meshes: Sequence[str]) -> str:
    return ", ".join(f"`{mesh}`" for mesh in meshes)


FULL = Extent("full", ("tp=2", "tp=4", "dp=2,tp=2", "pp=2,dp=2,tp=2"), (1, 2), ("dp=2,tp=2",))
QUICK = Extent("quick", (INFERENCE_MESH,), (1,), ())
EXTENTS = {extent.name: extent for extent in (FULL, QUICK)}


@dataclass(frozen=True)
class Row:
    """`stages`: those of STAGES that passed; `verified` counts the plans that passed out of `plans`; `reasons` say in
    words what did not. `refused`: capture said no, with the only reason. `missing`: the library that is not installed.
    """

    name: str
    extent: str = FULL.name
    missing: str = ""
    refused: bool = False
    stages: tuple[str, ...] = ()
    ops: int = 0
    operators: int = 0
    without_rule: tuple[str, ...] = ()
    plans: int = 0
    verified: int = 0
    largest_error: float = 0.0
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def not_run(self) -> bool:
        return not (self.missing or self.stages or self.plans or self.reasons)

    @property
    def all_verified(self) -> bool:
        return self.plans > 0 and self.verified == self.plans and not self.reasons

    @property
    def passed(self) -> bool:
        """In every column."""
        return self.all_verified and self.stages == STAGES


def row_of(record: dict[str, Any]) -> Row:
    """The row of a JSON object; TypeError where it is none."""
    return Row(**{key: tuple(value) if isinstance(value, list) else value for key, value in record.items()})


Report = Callable[[Row], None]  # called before each plan


def measure(name: str, extent: Extent, report: Report | None = None) -> Row:
    """Every column of one architecture. A failure is a reason in the row, never an exception."""
    start = time.monotonic()
    row = Row(name, extent.name, missing_library(name))
    if not row.missing and not (row := _built(row)).reasons:
        with tempfile.TemporaryDirectory(prefix="autoshard-architecture-") as folder:
            row = _packaged(row, extent, Path(folder), report)
    return replace(row, seconds=round(time.monotonic() - start, 1))


def _built(row: Row) -> Row:
    """The original builds and runs here; else what capture says is no refusal, but a fault of the installation."""
    module, _, function = NAMES[row.name].partition(":")
    try:
        model, inputs = getattr(importlib.import_module(module), function)()
        model(*inputs)
    except Exception as error:
        return _failed(row, f"the original does not run here: {_in_words(error)}")
    return row


def _packaged(row: Row, extent: Extent, folder: Path, report: Report | None) -> Row:
    """The package first: its graph is what the random plans are of."""
    runs = run_package(NAMES[row.name], folder)
    row = replace(row, stages=runs.passed, refused=runs.refused, reasons=(runs.reason,) if runs.reason else ())
    if report is not None:
        report(row)
    graph = folder / "package" / "graph.json"
    return verify(row, extent, report, load(graph)) if graph.exists() else row


def verify(row: Row, extent: Extent, report: Report | None = None, graph: Graph | None = None) -> Row:
    """Train (`graph`, captured here where it is None) and infer under every plan."""
    for training in (True, False):
        try:
            row = _verified(row, extent, training, report, graph if training else None)
        except Exception as error:
            row = _failed(row, f"{'training' if training else 'inference'}: {_in_words(error)}")
    return row


def _verified(row: Row, extent: Extent, training: bool, report: Report | None, graph: Graph | None) -> Row:
    arguments = {} if training else {"loss": False}
    graph = graph or capture(NAMES[row.name], arguments, training=training)
    if training:
        row = replace(row, **_counts(graph))
        if graph.loss is None:
            return _failed(row, "the model gives no loss")
    case = make_case(NAMES[row.name], arguments, graph)
    for label, plan in plans(graph, extent if training else replace(extent, meshes=(INFERENCE_MESH,))):
        if report is not None:
            report(row)
        where = f"{label} {'training' if training else 'inference'}"
        row = replace(row, plans=row.plans + 1)
        try:
            candidate = plan()
            program = lower(candidate, graph)
            proof = check_files(case, program, emit(program, candidate, graph))
        except Exception as error:
            row = _failed(row, f"{where}: {_in_words(error)}")
            continue
        errors = [kind.worst.error for kind in proof.kinds if kind.worst is not None]
        row = replace(row, largest_error=max([row.largest_error, *errors]))
        row = replace(row, verified=row.verified + 1) if proof.passed else _failed(row, f"{where}: {proof.failure}")
    return row


def _counts(graph: Graph) -> dict[str, Any]:
    without = sorted({op.target for op in graph.ops if not has_rule(graph, op)})
    return {"ops": len(graph.ops), "operators": len({op.target for op in graph.ops}), "without_rule": tuple(without)}


def plans(graph: Graph, extent: Extent) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """(label, function that makes the plan): random ones on each mesh, and the best on those of `extent.best`."""
    for text in extent.meshes:
        plan = partial(harness.planned, graph, "a100-80g-sxm", Mesh.parse(text))
        if text in extent.best:
            yield f"{text} best", plan
        yield from ((f"{text} random:{seed}", partial(plan, seed)) for seed in extent.seeds)


def _failed(row: Row, reason: str) -> Row:
    return replace(row, reasons=(*row.reasons, reason))


def _in_words(error: Exception) -> str:
    if os.environ.get("AUTOSHARD_TRACEBACK"):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
