"""Blocks compiled by `torch.compile`: each of them one graph, its collectives included."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn


def compile_blocks(model: nn.Module, backend: str = "inductor", sized: bool = False) -> int:
    """Compiles every item of every `nn.ModuleList` at its first call, and says how many these are.

    What stands outside of them stays as it is; a model without any is one block. `sized`: sizes of the inputs differ
    from step to step, and each block is compiled once for all of them.
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
    """How many versions a function has, as set before the first model was compiled."""
    return int(getattr(torch._dynamo.config, name))


def lists(module: nn.Module) -> list[nn.ModuleList]:
    return [part for part in module.modules() if isinstance(part, nn.ModuleList)]
