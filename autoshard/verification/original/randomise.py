"""Seeded random parameters and buffers: zero biases and unit norms would hide faults."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

import torch

from autoshard.ir.graph import Graph


def generator(seed: int, name: str) -> torch.Generator:
    """Separate generator for each name, so that one tensor's values don't depend on the others."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def tie(module: torch.nn.Module, graph: Graph) -> None:
    """Makes tied parameters and buffers one object again: in an exported program they only share storage."""
    for stored in (*graph.parameters, *graph.buffers):
        for name in stored.ties:
            (owner, leaf), (other, last) = _place(module, stored.path), _place(module, name)
            for source, replaced in ((owner._parameters, other._parameters), (owner._buffers, other._buffers)):
                if leaf in source and last in replaced:
                    replaced[last] = source[leaf]


def _place(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


def randomise_state(module: torch.nn.Module, seed: int, buffers: Collection[str], mildly: bool = False) -> None:
    """Randomises every parameter and the floating ones of the named `buffers` of `module`, in place, in float64.

    Tied parameters stay tied. Buffers that capture has folded into constants (masks) are not in the graph and keep
    their values. `mildly`: within a fifth of their values, for models that give numbers only there.
    """
    module.double()
    done: set[int] = set()
    with torch.no_grad():
        for path, tensor in module.named_parameters():
            if id(tensor) not in done:
                tensor.copy_((_near if mildly else _parameter)(tensor, generator(seed, path)))
            done.add(id(tensor))
        for path, tensor in module.named_buffers():
            if path in buffers and tensor.is_floating_point() and id(tensor) not in done:
                source = generator(seed, path)
                tensor.copy_(_near(tensor, source) if mildly else _buffer(path, tensor, source))
            done.add(id(tensor))


def _parameter(tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Random values: matrices keep activations of order one; vectors of one number stay near it, others near zero."""
    noise = torch.randn(tensor.shape, generator=source, dtype=torch.float64)
    if tensor.dim() < 2:
        middle = float(tensor.reshape(-1)[0]) if tensor.numel() and _constant(tensor) else 0.0
        return middle + 0.2 * (middle or 1.0) * noise
    fan_in = math.prod(tensor.shape[1:])
    return noise * 0.8 / math.sqrt(max(1, min(tensor.shape[0], fan_in)))


def _near(tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Tensor scaled at random by 0.8 to 1.2; signs, zeros and infinities stay."""
    return tensor * (0.8 + 0.4 * torch.rand(tensor.shape, generator=source, dtype=torch.float64))


def _buffer(path: str, tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Random buffer: variances stay positive; tables (frequencies, masks with -inf) keep their signs and infinities."""
    uniform = torch.rand(tensor.shape, generator=source, dtype=torch.float64)
    if path.endswith("running_var"):
        return 0.5 + uniform
    if tensor.numel() and _constant(tensor):
        return tensor + 0.6 * (uniform - 0.5)
    return tensor * (0.9 + 0.2 * uniform)


def _constant(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.reshape(-1)[0]).all()) and bool(torch.isfinite(tensor).all())
