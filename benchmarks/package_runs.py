"""One architecture as a user would train it: planned by the command, and every command that it prints really run.

Start with the printed torchrun line, save, be killed in the middle, resume, take the weights back into the original
class, and start again from the original's own safetensors. All on this machine, over gloo.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness

MESH = "tp=2"
HARDWARE = "cpu-local"
STRATEGY = "random:1"  # the best plan of a small model splits nothing
NO_PLAN, NOT_CAPTURED = 3, 4  # exit codes
STAGES = ("captured", "planned", "started", "saved", "killed", "resumed", "taken back", "weights")
START_SECONDS = 240.0  # a slow machine has time to import torch
POLL_SECONDS = 0.1
_ENDLESS = 100_000  # steps: it must be killed


class Failed(Exception):
    """What went wrong, in a sentence."""


class Refused(Failed):
    """The model was not captured, and it was said why."""


@dataclass(frozen=True)
class Runs:
    """The stages that passed, in the order of STAGES, and why the next did not. `refused`: the model was not captured,
    with a reason and what to try."""

    passed: tuple[str, ...] = ()
    reason: str = ""
    refused: bool = False


def run_package(spec: str, folder: Path) -> Runs:
    """All stages of `spec`, in an empty folder, until one fails."""
    passed: list[str] = []
    try:
        launch = _plan(spec, folder / "package", passed)
        last = _start_and_kill(launch, folder / "saved", passed)
        _resume(launch, folder, last, passed)
        _take_back(spec, folder, last + 2, passed)
        _start_from_weights(launch, folder, passed)
    except Failed as error:
        return Runs(tuple(passed), str(error), refused=isinstance(error, Refused))
    return Runs(tuple(passed))


def _plan(spec: str, package: Path, passed: list[str]) -> list[str]:
    """`autoshard plan`; the torchrun command that it prints."""
    from autoshard.cli.commands import main

    output, errors = io.StringIO(), io.StringIO()
    options = ["--mesh", MESH, "--hardware", HARDWARE, "--strategy", STRATEGY, "--out", str(package)]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(["plan", spec, *options])
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
    import torch

    from autoshard.graph_capture.load_model import load_model

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
