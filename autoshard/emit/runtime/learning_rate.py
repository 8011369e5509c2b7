"""The learning rate over a run, by torch's LambdaLR: a warm-up, then constant, or down a line or a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

SHAPES: dict[str, Callable[[float], float]] = {  # what is left of the rate after a share of the way down
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


def share_of_rate(step: int, *, shape: str, warmup: int, steps: int, least: float) -> float:
    """Share of the highest rate, in the step after `step` others; `least` is the share that is left after the last."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return least + (1 - least) * SHAPES[shape](done)


def make_schedule(
    optimizer: torch.optim.Optimizer, done: int, *, shape: str, warmup: int, steps: int, least: float
) -> LambdaLR:
    """Schedule of a run with `done` completed steps; call its `step` after each of the optimizer's.

    The highest rate is that of the optimizer's groups, or a checkpoint's `initial_lr`.
    """
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    rate = partial(share_of_rate, shape=shape, warmup=warmup, steps=steps, least=least)
    return LambdaLR(optimizer, rate, last_epoch=done - 1)
