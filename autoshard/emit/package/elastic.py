# mypy: ignore-errors
# ruff: noqa: I001
"""Choice of the plan that the started processes run: a package may have plans for other numbers of devices, each in a
folder devices_N. They run that for the largest number that is not above theirs; surplus processes wait for its end.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from dynamic_sizes import mesh_devices
from runtime import processes_started, take_start

FOLDER = "devices_"
SURPLUS = "AUTOSHARD_SURPLUS"  # how many processes wait
CHOSEN = "AUTOSHARD_CHOSEN"  # the line of the plan that replaced another: its rank 0 knows that it is
ENDED = "train/ended"


def planned_numbers() -> dict[int, Path]:
    """Numbers of devices -> the folders of their plans, this one's among them."""
    here = Path(__file__).resolve().parent
    others = {int(path.parent.name.removeprefix(FOLDER)): path.parent for path in here.glob(f"{FOLDER}*/train.py")}
    return others | {mesh_devices(): here}


def run_fitting_plan() -> bool:
    """Replaces this process by one that runs another plan of the package, where that fits. False where there is nothing
    to do any more: the process introduced others to each other, or waited for them as one too many.
    """
    plans, started = planned_numbers(), processes_started()
    size = max((number for number in plans if number <= started), default=0)
    surplus = started - size if size and len(plans) > 1 else 0
    if size and plans[size] != Path(__file__).resolve().parent and not surplus:
        _replace(plans[size], size)  # before this process joins the others: its successor does
    if not take_start():
        return False
    if (chosen := os.environ.pop(CHOSEN, "")) and os.environ.get("RANK", "0") == "0":
        print(chosen, flush=True)
    if not surplus:
        return True
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if rank >= size:
        _wait_for_end(rank, started, size)
        return False
    here = min(int(os.environ["LOCAL_WORLD_SIZE"]), size - (rank - local))
    os.environ.update({"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(here), SURPLUS: str(surplus)})
    if plans[size] != Path(__file__).resolve().parent:
        _replace(plans[size], size)
    return True


def end_surplus() -> None:
    """Ends the waiting processes well; called by all that ran the plan."""
    if SURPLUS in os.environ and os.environ["RANK"] == "0":
        with contextlib.suppress(RuntimeError):
            _store(0, int(os.environ["WORLD_SIZE"])).set(ENDED, "")


def _replace(folder: Path, size: int) -> None:
    os.environ[CHOSEN] = f"{size} device{'s' * (size > 1)}: the plan in {folder.name}"
    flags = subprocess._args_from_interpreter_flags()
    os.execv(sys.executable, [sys.executable, *flags, str(folder / "train.py"), *sys.argv[1:]])


def _store(rank: int, size: int) -> dist.Store:
    return next(dist.rendezvous("env://", rank, size))[0]


def _wait_for_end(rank: int, started: int, size: int) -> None:
    """Waits until the plan's processes have ended. A launcher ends this one where they fail."""
    if rank == started - 1:
        print(f"{started} processes: the plan is for {size}, {started - size} wait", flush=True)
    with contextlib.suppress(RuntimeError):  # who has the store has ended
        _store(rank, started).wait([ENDED], datetime.timedelta.max // 1000)
