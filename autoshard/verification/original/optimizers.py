"""Optimizers by their names in a plan, with the options that both sides of a verification run with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from autoshard.errors import CheckError

# A large eps: AdamW's own would make steps of gradients that are truly zero but for rounding, and hide their scale.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1}),
}


# Of row-wise Adagrad, as parameter servers train tables.
ROW_RATE, ROW_EPS = (inspect.signature(torch.optim.Adagrad).parameters[name].default for name in ("lr", "eps"))


def make_optimizer(
    name: str, parameters: list[torch.nn.Parameter], by_rows: Sequence[torch.nn.Parameter] = ()
) -> Stepping:
    """Optimizer of this name; row-wise Adagrad trains the parameters `by_rows` in its place."""
    kind, options = OPTIMIZERS[name]
    rows = {id(parameter) for parameter in by_rows}
    dense = [parameter for parameter in parameters if id(parameter) not in rows]
    return RowAdagrad(by_rows, kind(dense, **options) if dense else None) if rows else kind(parameters, **options)


class Stepping(Protocol):
    def step(self) -> Any: ...


class RowAdagrad:
    """Adagrad by rows, with dense gradients: each row by the root of the sum of its gradients' mean squares so far."""

    def __init__(self, tables: Sequence[torch.nn.Parameter], others: torch.optim.Optimizer | None) -> None:
        self.others = others
        self.tables = [(table, table.new_zeros(table.shape[0])) for table in tables]

    @torch.no_grad()
    def step(self) -> None:
        if self.others is not None:
            self.others.step()
        for table, sums in self.tables:
            if table.grad is not None:
                sums += table.grad.flatten(1).pow(2).mean(dim=1)
                rates = ROW_RATE / (sums.sqrt() + ROW_EPS)
                table -= rates.reshape(-1, *[1] * (table.dim() - 1)) * table.grad


def set_options(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Sets our options, as the user may have edited the package's. CheckError if the optimizer is not the plan's."""
    kind, options = OPTIMIZERS[name]
    if not isinstance(optimizer, kind):
        raise CheckError(
            f"the package's optimizer is {type(optimizer).__name__}, planned {kind.__name__}",
            f"{kind.__name__} in train.py, or plan again with --optimizer",
        )
    for group in optimizer.param_groups:
        group.update(options)
