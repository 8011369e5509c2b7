"""Training that goes on under another placement: emitted train.py in processes (gloo), what one saves another loads.

The placements of a model stand in a line. The first trains without an interruption and saves every `EACH` steps; each
next one goes on from what the one before has saved, for as many; at the end the first from the last one. Every
loss, weight, buffer, moment and step count must be the uninterrupted run's.
"""

from __future__ import annotations

import compileall
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from autoshard.package.output_folder import write_package
from tests import launched
from tests.differential import Mismatch

EACH = 1  # steps of a placement
LIMIT_SECONDS = 150.0  # of a run, before it hangs
LOSS, STATE = 1e-6, 1e-9  # of float32, in which losses are summed over devices; of float64
# Masks of dropout by global position, as `autoshard verify` has them: of the run's seed and step, not of its mesh.
EXACT = ("runtime/randomness.py", "self.exact = mesh, False", "self.exact = mesh, True")


class Hanging(Exception):
    """A run that has not ended."""


class Resumed:
    """The line of one model's placements, of at most `most`; how many have `resumed` what another saved."""

    def __init__(self, most: int) -> None:
        self._own = tempfile.TemporaryDirectory()
        self.folder, self.most, self.resumed = Path(self._own.name), most, 0
        self.packages: list[tuple[Path, int]] = []
        self.steps, self.last = EACH, Path()

    def join(self, files: Mapping[str, str], ranks: int) -> None:
        """Mismatch where this placement goes on otherwise than the uninterrupted run, Hanging where it does not end."""
        package = self.folder / f"package{len(self.packages)}"
        assert EXACT[1] in files[EXACT[0]]
        write_package(package, {**files, EXACT[0]: files[EXACT[0]].replace(*EXACT[1:])})
        compileall.compile_dir(package, quiet=1)  # once, not in every process
        self.packages.append((package, ranks))
        if len(self.packages) > 1:
            self.go_on(package, ranks)
            return
        steps = EACH * (self.most + 1)
        self._run(package, ranks, "whole", steps, "--seed", 1, "--lr", 1e-2, "--save-every", EACH)
        self.last = self._saved("whole", EACH)

    def close(self) -> None:
        """The first goes on from the last."""
        try:
            if len(self.packages) > 1:
                self.go_on(*self.packages[0])
        finally:
            self._own.cleanup()

    def go_on(self, package: Path, ranks: int) -> None:
        """From what was saved last. Where that fails, the next goes on from what the uninterrupted run has saved."""
        before, self.steps = self.last, self.steps + EACH
        name, whole = f"to{self.steps}", self._saved("whole", self.steps)
        self.last = whole
        self._run(package, ranks, name, self.steps, "--resume", before)
        losses, expected = self._losses(name), self._losses("whole")
        wanted = {step: expected[step] for step in range(self.steps - EACH + 1, self.steps + 1)}
        if losses.keys() != wanted.keys():
            raise Mismatch(f"goes on with steps {[*losses]}, expected {[*wanted]}")
        for step, loss in wanted.items():
            same(f"the loss of step {step}", torch.tensor(losses[step]), torch.tensor(loss), LOSS)
        compare(self._saved(name, self.steps), whole)
        self.last = self._saved(name, self.steps)
        self.resumed += 1

    def _saved(self, name: str, step: int) -> Path:
        return self.folder / name / f"step-{step}"

    def _losses(self, name: str) -> dict[int, float]:
        log = self.folder / f"{name}.jsonl"
        rows = map(json.loads, log.read_text().splitlines() if log.exists() else ())
        return {row["step"]: row["loss"] for row in rows}

    def _run(self, package: Path, ranks: int, name: str, steps: int, *options: object) -> None:
        arguments = ("--backend", "gloo", "--steps", steps, "--save", self.folder / name, *options)
        arguments += ("--log-json", self.folder / f"{name}.jsonl", "--traceback")
        try:
            done = launched.torchrun(package / "train.py", ranks, *arguments, limit=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise Hanging(f"{name}: {ranks} processes have not ended after {LIMIT_SECONDS:.0f} s") from None
        if done.returncode:
            raise RuntimeError(f"{name}: ended with {done.returncode}: {done.stderr.strip()[-1500:]}")


def compare(saved: Path, expected: Path) -> None:
    """Mismatch where two checkpoints hold other numbers."""
    tensors, other = state(saved), state(expected)
    if tensors.keys() != other.keys():
        raise Mismatch(f"what is saved differs: {sorted(tensors.keys() ^ other.keys())[:5]}")
    for name, value in other.items():
        same(name, tensors[name], value, STATE)
    settings = [json.loads((folder / "training.json").read_text()) for folder in (saved, expected)]
    for key in ("step", "seed", "groups"):
        if settings[0][key] != settings[1][key]:
            raise Mismatch(f"training.json: {key} is {settings[0][key]}, expected {settings[1][key]}")


def state(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    tensors: dict[str, Tensor] = {}
    reader = FileSystemReader(folder)
    _load_state_dict(tensors, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)  # type: ignore[arg-type]
    return tensors


def same(name: str, value: Tensor, expected: Tensor, tolerance: float) -> None:
    far = (value.double().flatten() - expected.double().flatten()).abs()
    if value.dtype != expected.dtype or not bool((far <= tolerance * (1 + expected.double().flatten().abs())).all()):
        raise Mismatch(f"{name} is {value.dtype}, {float(far.max()):.2g} from the uninterrupted run's {expected.dtype}")
