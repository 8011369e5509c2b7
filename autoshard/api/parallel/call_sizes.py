"""The dynamic sizes of a call: read off its tensors, checked, and agreed on by all ranks before they communicate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autoshard.emit.runtime import ParallelMesh
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph

_GLOBAL = "the global batch on every rank, padded or cut to an allowed size"


def call_sizes(graph: Graph, inputs: Mapping[str, Tensor], mesh: ParallelMesh) -> dict[str, int]:
    """Dynamic sizes by name, of global tensors by graph name; {} without any. UsageError, on all ranks, where a size is
    not allowed on one of them, where inputs differ in one, or where ranks do."""
    if not graph.dynamic:
        return {}
    message = ""
    by_name: dict[str, int] = {}
    for dynamic in graph.dynamic:
        seen = {f"dim {dim} of {name}": _size(inputs[name], dim) for name, dim in dynamic.dims}
        by_name[dynamic.name] = next(iter(seen.values()))
        if len({*seen.values()}) > 1:
            message = message or f"{dynamic.name}: " + ", ".join(f"{place} is {size}" for place, size in seen.items())
        elif not dynamic.allows(by_name[dynamic.name]):
            message = message or f"{dynamic.name} of {by_name[dynamic.name]}: expected {dynamic.words()}"
    sizes = torch.tensor(
        [float(bool(message)), *(s for size in by_name.values() for s in (size, -size))], dtype=torch.float64
    )
    sizes = sizes.to(mesh.device)
    mesh.joint(tuple(mesh.axes)).transport.all_reduce(sizes, "max")()
    wrong, *limits = sizes.tolist()
    if message:
        raise UsageError(message, _GLOBAL)
    if wrong:
        raise UsageError("another rank was called with sizes that the plan does not allow, and says which", _GLOBAL)
    for name, most, least in zip(by_name, limits[::2], limits[1::2], strict=True):
        if most != -least:
            raise UsageError(f"ranks were called with different sizes: {name} from {-least:.0f} to {most:.0f}", _GLOBAL)
    return by_name


def _size(x: Tensor, dim: int) -> int:
    return int(x.shape[dim]) if dim < x.dim() else 0
