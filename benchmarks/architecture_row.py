"""One architecture of docs/architectures.md: its package really run, and random plans of the same graph verified.

The package is what a user would train: start with the printed torchrun line, save, be killed in the middle, resume,
take the weights back into the original class, and start again from the original's own safetensors. All on this machine,
over gloo.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoshard.cli import commands
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.load_model import load_model
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import load
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.rules.operator_table import has_rule
from autoshard.verification import check_files, make_case
from benchmarks import harness
from tests.models import NAMES, missing_library

MESH = "tp=2"
HARDWARE = "cpu-local"
STRATEGY = "random:1"  # the best plan of a small model splits nothing
NO_PLAN, NOT_CAPTURED = 3, 4  # exit codes
STAGES = ("captured", "planned", "started", "saved", "killed", "resumed", "taken back", "weights")
START_SECONDS = 240.0  # a slow machine has time to import torch
POLL_SECONDS = 0.1
_ENDLESS = 100_000  # steps: it must be killed
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


Report = Callable[[Row], object]  # called before each plan


def measure(name: str, extent: Extent, report: Report = lambda row: None) -> Row:
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


def _packaged(row: Row, extent: Extent, folder: Path, report: Report) -> Row:
    """The package first: its graph is what the random plans are of."""
    row = run_package(row, folder)
    report(row)
    graph = folder / "package" / "graph.json"
    return verify(row, extent, report, load(graph)) if graph.exists() else row


def verify(row: Row, extent: Extent, report: Report = lambda row: None, graph: Graph | None = None) -> Row:
    """Train (`graph`, captured here where it is None) and infer under every plan."""
    for training in (True, False):
        try:
            row = _verified(row, extent, training, report, graph if training else None)
        except Exception as error:
            row = _failed(row, f"{'training' if training else 'inference'}: {_in_words(error)}")
    return row


def _verified(row: Row, extent: Extent, training: bool, report: Report, graph: Graph | None) -> Row:
    arguments = {} if training else {"loss": False}
    graph = graph or capture(NAMES[row.name], arguments, training=training)
    if training:
        row = replace(row, **_counts(graph))
        if graph.loss is None:
            return _failed(row, "the model gives no loss")
    case = make_case(NAMES[row.name], arguments, graph)
    for label, plan in plans(graph, extent if training else replace(extent, meshes=(INFERENCE_MESH,))):
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


# --- its package: planned by the command, and every command that it prints really run ---------------------------------


class Failed(Exception):
    """What went wrong, in a sentence."""


class Refused(Failed):
    """The model was not captured, and it was said why, and what to try."""


def run_package(row: Row, folder: Path) -> Row:
    """All stages, in an empty folder, until one fails: those that passed, in the order of STAGES, and why the next did
    not."""
    passed, spec = list[str](), NAMES[row.name]
    try:
        launch = _plan(spec, folder / "package", passed)
        last = _start_and_kill(launch, folder / "saved", passed)
        _resume(launch, folder, last, passed)
        _take_back(spec, folder, last + 2, passed)
        _start_from_weights(launch, folder, passed)
    except Failed as error:
        row = replace(_failed(row, str(error)), refused=isinstance(error, Refused))
    return replace(row, stages=tuple(passed))


def _plan(spec: str, package: Path, passed: list[str]) -> list[str]:
    """`autoshard plan`; the torchrun command that it prints."""
    output, errors = io.StringIO(), io.StringIO()
    options = ["--mesh", MESH, "--hardware", HARDWARE, "--strategy", STRATEGY, "--out", str(package)]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = commands.main(["plan", spec, *options])
    if code:
        said = [line for line in errors.getvalue().splitlines() if line.strip() and "capturing" not in line]
        if code == NO_PLAN:
            passed.append("captured")
        words = " ".join(line.strip() for line in said).removeprefix("autoshard: ") or f"plan ended with {code}"
        raise (Refused if code == NOT_CAPTURED else Failed)(words)
    passed += ["captured", "planned"]
    match = re.search(r"^next: (torchrun .*)$", output.getvalue(), re.MULTILINE)
    if match is None:
        raise Failed("plan prints no torchrun command")
    return shlex.split(match[1])


def _command(launch: Sequence[str], *options: object) -> list[str]:
    """The printed command; several run at once here, so each takes a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *launch[1:], *map(str, options)]


def _ended(command: Sequence[str], what: str) -> str:
    """Runs it to its end; what it printed."""
    outcome = harness.ended(command, START_SECONDS)
    if outcome.code is None:
        raise Failed(f"{what}: {outcome.end}")
    if outcome.code:
        raise Failed(f"{what}: {_last_words(outcome.errors) or outcome.end}")
    return outcome.output


def _last_words(text: str) -> str:
    """The error of train.py, or the last exception of a traceback."""
    lines = [re.sub(r"^\[(rank)?\d+\]:?(\[rank\d+\]:)? ?", "", line).strip() for line in text.splitlines()]
    hits = [line for line in lines if line.startswith("error") or re.match(r"[\w.]*(Error|Exception)\b", line)]
    hits = [line for line in hits if "ChildFailedError" not in line] or [line for line in lines if "terminate" in line]
    return hits[0] if hits else (lines[-1] if lines else "")


def _start_and_kill(launch: list[str], saved: Path, passed: list[str]) -> int:
    """Steps without end, a checkpoint after each; killed after the second. The last whole checkpoint's step."""
    with open(f"{saved}.log", "w+") as log:
        command = _command(launch, "--steps", _ENDLESS, "--save", saved, "--save-every", 1)
        process = subprocess.Popen(command, env=harness.one_thread(), stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + harness.patience(START_SECONDS)
            while not _steps(saved)[1:] and process.poll() is None and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
        finally:
            harness.kill_family(process)
        log.seek(0)
        said = log.read()
    if re.search(r"^step 1: loss", said, re.MULTILINE):
        passed.append("started")
    if not _steps(saved)[1:]:
        raise Failed(f"the printed command: {_last_words(said) or 'no checkpoint in time'}")
    passed += ["saved", "killed"]
    return _steps(saved)[-1]


def _steps(saved: Path) -> list[int]:
    """The steps of the whole checkpoints."""
    whole = [p.name[5:] for p in saved.glob("step-*") if (p / ".metadata").exists()]
    return sorted(int(step) for step in whole if step.isdecimal())


def _resume(launch: list[str], folder: Path, last: int, passed: list[str]) -> None:
    saved = folder / "saved"
    said = _ended(_command(launch, "--steps", last + 2, "--resume", saved, "--save", saved), "--resume")
    if f"at step {last}" not in said or f"step {last + 2}: loss" not in said or _steps(saved)[-1] != last + 2:
        raise Failed(f"--resume of step {last} printed {said!r}")
    passed.append("resumed")


def _take_back(spec: str, folder: Path, step: int, passed: list[str]) -> None:
    """convert.py, and a strict load into the original class."""
    target = folder / "back.pt"
    convert = [sys.executable, str(folder / "package" / "convert.py")]
    _ended([*convert, "--to-original", str(folder / "saved" / f"step-{step}"), str(target)], "convert.py")
    torch.manual_seed(0)
    model, _ = load_model(spec, {}, device="cpu")
    try:
        model.load_state_dict(torch.load(target, weights_only=True))
    except RuntimeError as error:
        raise Failed(f"into the original class: {' '.join(str(error).split())}") from None
    passed.append("taken back")
    _save_own(model, folder / "own.safetensors")


def _save_own(model: object, path: Path) -> None:
    """The model's own weights file, as its library writes it: tied tensors once."""
    import safetensors.torch

    for module in model.modules():  # safetensors refuses a view of a larger storage
        module._buffers.update({name: x.clone() for name, x in module._buffers.items() if x is not None})
    safetensors.torch.save_model(model, str(path))  # type: ignore[arg-type]


def _start_from_weights(launch: list[str], folder: Path, passed: list[str]) -> None:
    said = _ended(_command(launch, "--steps", 1, "--weights", folder / "own.safetensors"), "--weights")
    if "step 1: loss" not in said:
        raise Failed(f"--weights printed {said!r}")
    passed.append("weights")
