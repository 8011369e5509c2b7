"""Training or evaluation, module by module."""

from __future__ import annotations

import torch


def set_mode(model: torch.nn.Module, training: bool) -> None:
    """`model.train(training)`; but modules in evaluation, inside a model in training, stay so: a frozen batch norm."""
    frozen = [module for _, module in _frozen(model)] if training else []
    model.train(training)
    for module in frozen:
        module.training = False


def frozen_modules(model: torch.nn.Module) -> tuple[str, ...]:
    """A sentence on those that stay in evaluation while the rest trains, named by the outermost."""
    paths = [path for path, _ in _frozen(model)]
    outermost = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    if not outermost:
        return ()
    named = ", ".join(outermost[:3]) + (f" and {len(outermost) - 3} more" if len(outermost) > 3 else "")
    return (f"evaluation mode is meant to stay for {named} (model.train() before planning ends it)",)


def _frozen(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if model.training and not module.training]
