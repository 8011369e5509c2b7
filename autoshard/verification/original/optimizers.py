"""The optimizers by their names in a plan, with the options that both sides of a verification run with."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.errors import CheckError

# A large eps: AdamW's own would make steps of gradients that are truly zero but for rounding, and hide their scale.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1}),
}


def make_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(parameters, **options)


def set_options(optimizer: torch.optim.Optimizer, name: str) -> None:
    """The package's optimizer must be of the plan's kind; its options are the user's to edit, so ours replace them."""
    kind, options = OPTIMIZERS[name]
    if not isinstance(optimizer, kind):
        raise CheckError(
            f"the package's optimizer is {type(optimizer).__name__}, planned {kind.__name__}",
            f"{kind.__name__} in train.py, or plan again with --optimizer",
        )
    for group in optimizer.param_groups:
        group.update(options)
