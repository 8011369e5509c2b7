"""One model with several forwards: steps of smaller sizes have their own strategies, on the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .mesh import ParallelMesh
from .parameters import sharding


def by_size(model: nn.Module, mesh: ParallelMesh, smaller: Sequence[Callable[[ParallelMesh], nn.Module]]) -> nn.Module:
    """`model`, whose forward is that of the bucket `mesh.bucket`, made by `smaller`; its own for None."""
    mesh.reused = {sharding(one).name: one for one in (*model.parameters(), *model.buffers())}
    try:
        others = [build(mesh) for build in smaller]
    finally:
        mesh.reused = None
    original = model.forward

    def forward(*inputs: Any) -> Any:
        return original(*inputs) if mesh.bucket is None else others[mesh.bucket](*inputs)

    model.forward = forward
    object.__setattr__(model, "smaller", others)  # no submodules: their parameters are those of `model`
    return model
