"""Starts a package's train.py as a user does: in its own precision, on synthetic batches, for a few steps."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.units import counted
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from autoshard.verification.ranks.rank_processes import SECOND_PORT

STEPS = 3  # of a check, and of a start


def arguments(folder: Path, trains: bool, sizes: Sequence[str] = ()) -> tuple[str, ...]:
    """Command-line options of train.py. `trains`: it has a loss; `sizes`: the dynamic ones, as for `--sizes`."""
    if not trains:
        return ("--backend", "gloo", "--dry-run")
    options = folder / "run_options.py"
    known = options.is_file() and "--nonfinite" in options.read_text(encoding="utf-8")  # packages of older versions
    synthetic = ("--nonfinite", f"skip:{STEPS}") if known else ()  # which a model may make no numbers of
    fixed = ("--sizes", ",".join(sizes)) if sizes else ()
    return ("--backend", "gloo", "--steps", str(STEPS), *synthetic, *fixed)


def run_as_program(folder: Path, options: Sequence[str]) -> None:
    """Runs train.py in this process, after another process group has ended; raises SystemExit with its exit code."""
    os.environ["MASTER_PORT"] = os.environ[SECOND_PORT]
    sys.argv = [str(folder / "train.py"), *options]
    sys.path.insert(0, str(folder))
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_in_lockstep(
    folder: Path,
    axes: Mapping[str, int],
    options: Sequence[str],
    timeout_seconds: float,
    part_stages: Sequence[int] = (0,),
    places: Sequence[Mapping[str, int]] = (),
) -> None:
    """Runs train.py on ranks in lock-step, from its options on. Raises LockstepError if it fails."""
    package = load_package(folder)
    parsed = package.train.parse_arguments(list(options))
    package.train.take_options(parsed)

    def run(mesh: Any) -> None:
        mesh.random.exact = False
        package.train.run(parsed, mesh)

    with contextlib.redirect_stdout(io.StringIO()):
        classes = package.runtime.ParallelMesh, getattr(package.runtime, "Stages", None)
        run_lockstep(axes, run, timeout_seconds, *classes, part_stages, places)


def words(options: Sequence[str], backend: str, ranks: int, precision: str) -> str:
    """Description of the run."""
    where = counted(ranks, "gloo process") if backend == "gloo" else f"{counted(ranks, 'device')} in lock-step"
    what = "the model is built" if "--dry-run" in options else f"{STEPS} steps on synthetic batches"
    return f"run as a user starts it: {what}, in {precision}, {where}"
