# mypy: ignore-errors
# ruff: noqa: I001
"""The folder of --save: one job at a time writes in it, the checkpoints of one run, as many as --keep says.

The lock is one of POSIX (fcntl) on a file: it ends with its process, however that ends. On NFS it holds between hosts
where its server has locks; where the file system has none, a line says so and the run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from batches import UserError
from model_parallel import STAGES, UNEVEN
from run_options import AUTO
from runtime import LossScaler, SaveError, newest_whole, save_checkpoint, step_folders
from start_state import last_checkpoint

LOCK = ".lock"


def saves(options: argparse.Namespace, step: int, stopped: bool) -> bool:
    """True if a checkpoint is written after this step."""
    every = options.save_every and step % options.save_every == 0
    return bool(options.save) and bool(step == options.steps or every or stopped)


# --- one job at a time ---


@contextlib.contextmanager
def locked(folder: str | None) -> Iterator[None]:
    """UserError where another job writes there. What a job left that was killed while it saved is put in order."""
    if folder is None:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    path = Path(folder) / LOCK
    held = _lock(folder, path)
    try:
        _put_in_order(folder)
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is let go: who has opened it sees that it is gone
        os.close(held)


def _lock(folder: str, path: Path) -> int:
    import fcntl

    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            other = os.read(held, 200).decode(errors="replace").strip()
            os.close(held)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                message = f"--save {folder}: another job writes its checkpoints there: {other or 'it starts just now'}"
                raise UserError(f"{message}\n  try: another folder, or when that job has ended") from None
            print(f"note: --save {folder} can't be locked ({error.strerror}): only one job may write there", flush=True)
            return os.open(os.devnull, os.O_RDONLY)
        if path.exists() and os.path.samestat(os.fstat(held), os.stat(path)):
            break
        os.close(held)  # its holder has just ended, and removed it
    os.ftruncate(held, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(held, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
    return held


def _put_in_order(folder: str) -> None:
    for older in Path(folder).glob("step-*.older"):
        if not older.with_suffix("").exists():
            os.replace(older, older.with_suffix(""))
        else:
            shutil.rmtree(older, ignore_errors=True)
    for partial in Path(folder).glob("step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


# --- of one run ---


class Saving:
    """The checkpoints of this run: one that goes on with --resume is the run of what it resumes."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        """UserError where the folder has checkpoints of another run."""
        self.options, self.first, self.last = options, rank == 0, 0
        self.run = run_of(last_checkpoint(options.resume)) if options.resume else secrets.token_hex(4)
        there = step_folders(options.save) if options.save and self.first else []
        others = [path for path in there if run_of(path) not in (None, self.run)]
        if others:
            raise UserError(
                f"--save {options.save}: it has checkpoints of another run, the last of them {others[-1].name}\n"
                "  try: --resume auto, which goes on with that run, or another folder"
            )

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, scaler: LossScaler | None
    ) -> None:
        """UserError on all ranks where it can't be written."""
        with failing(self.options):
            save_checkpoint(
                f"{self.options.save}/step-{step}", model, optimizer, step, loader=loader,
                background=self.options.save_async, scaler=scaler, run=self.run or "", seed=self.options.seed or 0,
                staged=STAGES > 1, uneven=UNEVEN,
            )  # fmt: skip
        self.last = step
        self.remove_older()

    def remove_older(self) -> None:
        """Removes checkpoints that --keep does not keep; one still written in the background does not count."""
        if self.first and self.options.keep is not None and self.last:
            there = [folder for folder in step_folders(self.options.save) if int(folder.name[5:]) <= self.last]
            for path in there[: -self.options.keep]:
                shutil.rmtree(path, ignore_errors=True)

    def stop_report(self) -> str:
        """Report of what a stopped run has saved, as the end of a sentence."""
        if not self.options.save:
            return ", and nothing is saved, without --save"
        return f" after step {self.last}, which is saved in {self.options.save}: --resume auto goes on"


def run_of(checkpoint: Path) -> str | None:
    """Name of the run that wrote it; "" without one, as from older packages, None where it is no checkpoint."""
    try:
        return str(json.loads((checkpoint / "training.json").read_text(encoding="utf-8")).get("run", ""))
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def failing(options: argparse.Namespace) -> Iterator[None]:
    """Context that raises UserError where a checkpoint can't be written."""
    try:
        yield
    except SaveError as error:
        whole = [path.name for path in step_folders(options.save)]
        last = f"the last one that is whole is {whole[-1]}" if whole else "there is none that is whole"
        raise UserError(f"--save {options.save}: {error}; {last}\n  try: free space, --keep 2") from None


# --- where to go on ---


def resumed_from(options: argparse.Namespace, rank: int) -> str | None:
    """Checkpoint that --resume names; for auto, the last whole one. All ranks go on from what rank 0 finds."""
    if options.resume != AUTO:
        return options.resume
    several = dist.is_initialized() and dist.get_world_size() > 1
    store = dist.distributed_c10d._get_default_store() if several else None
    if rank and store is not None:
        return store.get("train/resume").decode() or None
    newest = newest_whole(options.save, "--resume auto: ")
    if newest is None:
        print(f"--resume auto: no checkpoint in {options.save}: a fresh start", flush=True)
    if store is not None:
        store.set("train/resume", str(newest or ""))
    return newest and str(newest)
