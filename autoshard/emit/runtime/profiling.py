"""A switch for torch.profiler: a few steps of each rank as a trace file, for Perfetto and the like."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule


@contextlib.contextmanager
def profiling(
    folder: str | None, first: int, last: int, rank: int, device: torch.device
) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step; steps from `first` to `last`, counted from 1, are recorded.

    Writes `folder`/rank-N.json; without a folder nothing is recorded. The step before the first is discarded: the
    profiler warms up in it.
    """
    if folder is None:
        yield lambda: None
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    warm = min(1, first - 1)
    plan = schedule(skip_first=first - 1 - warm, wait=0, warmup=warm, active=last - first + 1, repeat=1)
    file = str(Path(folder) / f"rank-{rank}.json")
    with profile(activities=activities, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(file)) as running:
        yield running.step
