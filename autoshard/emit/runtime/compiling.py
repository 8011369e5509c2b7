"""Blocks compiled by `torch.compile`: each is one graph, including its collectives."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn


def compile_blocks(model: nn.Module, backend: str = "inductor", sized: bool = False) -> int:
    """Compiles every item of every `nn.ModuleList` at its first call, and returns their number.

    Code outside them is not compiled; a model without any is one block. `sized`: input sizes differ from step to step,
    and each block is compiled once for all of them.
    """
    torch._dynamo.config.capture_scalar_outputs = True  # how many rows an expert has is known as it runs
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    inner = {id(part) for items in lists(model) for block in items for part in lists(block)}
    blocks = [block for items in lists(model) if id(items) not in inner for block in items] or [model]
    # Blocks of one class are versions of one function to dynamo, where each has its own random numbers: each block may
    # have as many as a function has.
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"  # torch 2.6
    setattr(torch._dynamo.config, name, max(getattr(torch._dynamo.config, name), _versions(name) * len(blocks)))
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend, dynamic=sized or None)
    return len(blocks)


@cache
def _versions(name: str) -> int:
    """Number of versions that a function may have, as set before the first model was compiled."""
    return int(getattr(torch._dynamo.config, name))


def lists(module: nn.Module) -> list[nn.ModuleList]:
    return [part for part in module.modules() if isinstance(part, nn.ModuleList)]
