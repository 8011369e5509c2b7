"""Seeded random parameters, buffers and inputs: zero biases, unit norms and equal samples would hide faults."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.graph.model import Graph, Op

_LABEL_OPS = {"aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd"}
IGNORED = -100  # aten.cross_entropy_loss's default


def generator(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each name, so that one tensor's values don't depend on the others."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def tie(module: torch.nn.Module, graph: Graph) -> None:
    """Makes tied parameters and buffers one object again: an exported program only shares their storage."""
    for stored in (*graph.parameters, *graph.buffers):
        for name in stored.ties:
            (owner, own), (other, last) = _place(module, stored.path), _place(module, name)
            for kept, replaced in ((owner._parameters, other._parameters), (owner._buffers, other._buffers)):
                if own in kept and last in replaced:
                    replaced[last] = kept[own]


def _place(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


def randomise_state(module: torch.nn.Module, seed: int, buffers: Collection[str]) -> None:
    """Every parameter and the floating ones of the named `buffers` of `module`, in place; it becomes float64.

    Ties stay ties. Buffers that capture has folded into constants (masks) are not in the graph and keep their values.
    """
    module.double()
    done: set[int] = set()
    with torch.no_grad():
        for path, tensor in module.named_parameters():
            if id(tensor) not in done:
                tensor.copy_(_parameter(tensor, generator(seed, path)))
            done.add(id(tensor))
        for path, tensor in module.named_buffers():
            if path in buffers and tensor.is_floating_point() and id(tensor) not in done:
                tensor.copy_(_buffer(path, tensor, generator(seed, path)))
            done.add(id(tensor))


def _parameter(tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Matrices keep activations of order one; vectors of ones stay near one (norm weights), others near zero."""
    noise = torch.randn(tensor.shape, generator=source, dtype=torch.float64)
    if tensor.dim() < 2:
        ones = tensor.numel() > 0 and bool((tensor == 1).all())
        return (1.0 if ones else 0.0) + 0.2 * noise
    rest = math.prod(tensor.shape[1:])
    return noise * 0.8 / math.sqrt(max(1, min(tensor.shape[0], rest)))


def _buffer(path: str, tensor: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Variances stay positive; tables (frequencies, masks with -inf) keep their signs and infinities."""
    uniform = torch.rand(tensor.shape, generator=source, dtype=torch.float64)
    if path.endswith("running_var"):
        return 0.5 + uniform
    if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()) and bool(torch.isfinite(tensor).all()):
        return tensor + 0.6 * (uniform - 0.5)
    return tensor * (0.9 + 0.2 * uniform)


# --- inputs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IntegerRange:
    """What an integer input means: indices in [0, high); labels with this `ignored` value where it is not None."""

    high: int
    ignored: int | None = None


def randomise_inputs(graph: Graph, examples: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """One global batch like `examples` (order of `graph.inputs`), floating ones in float64; no two samples are equal.

    Integers that reach an embedding or a loss are drawn from its range, others are kept as they are.
    """
    ranges = integer_ranges(graph)
    return [
        _input(example, ranges.get(name), generator(seed, f"input {name}"))
        for name, example in zip(graph.inputs, examples, strict=True)
    ]


def _input(example: torch.Tensor, meaning: IntegerRange | None, source: torch.Generator) -> torch.Tensor:
    if example.is_floating_point():
        spread = float(example.double().std()) if example.numel() > 1 else 0.0
        scale = spread if math.isfinite(spread) and spread > 0 else 1.0
        middle = float(example.double().mean()) if example.numel() else 0.0
        noise = torch.randn(example.shape, generator=source, dtype=torch.float64)
        values = (middle if math.isfinite(middle) else 0.0) + scale * noise
        return values.abs().remainder(1) if _within_one(example) else values
    if meaning is None or example.dtype == torch.bool:
        return example.clone()
    values = torch.randint(0, meaning.high, example.shape, generator=source, dtype=example.dtype)
    return values if meaning.ignored is None else _with_ignored(values, meaning.ignored)


def _within_one(example: torch.Tensor) -> bool:
    """Probabilities, which some losses must have; not zeros or ones alone."""
    return bool(((example >= 0) & (example <= 1)).all()) and bool((example.frac() != 0).any())


def _with_ignored(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """Unevenly over the batch: sample b of n loses about b/n of its labels; at least one label stays."""
    labels = labels.clone()
    if labels.dim() == 0 or labels.shape[0] == 0:
        return labels
    if labels.dim() == 1:
        labels[2::3] = ignored
        return labels
    count = labels.shape[0]
    for sample in range(1, count):
        row = labels[sample].view(-1)
        row[len(row) - max(1, sample * len(row) // count) :] = ignored
    return labels


def integer_ranges(graph: Graph) -> Mapping[str, IntegerRange]:
    """Integer input -> its range, found by following it through ops that only move integers."""
    found = {}
    for name in graph.inputs:
        if not graph.tensor(name).dtype.startswith("int"):
            continue
        uses = _uses(graph, name)
        highs = [high for op, position in uses if (high := _range(graph, op, position)) is not None]
        if highs:
            ignored = [_ignored(op) for op, position in uses if op.target in _LABEL_OPS and position == 1]
            found[name] = IntegerRange(min(highs), ignored[0] if len(ignored) == len(highs) else None)
    return found


def _uses(graph: Graph, name: str) -> list[tuple[Op, int]]:
    """The (op, operand position) pairs that the input reaches, moved about but with its values unchanged."""
    uses, pending, seen = [], [name], {name}
    while pending:
        for op, position in graph.consumers[pending.pop()]:
            uses.append((op, position))
            if op.target in _MOVES and op.results[0] not in seen:
                seen.update(op.results)
                pending.extend(op.results)
    return uses


_MOVES = {
    f"aten.{name}" for name in (
        "view", "reshape", "flatten", "unsqueeze", "squeeze", "slice", "select", "clone", "contiguous", "to",
        "_to_copy", "pad", "constant_pad_nd", "expand", "transpose", "permute", "t", "alias", "detach", "split",
        "chunk", "cat", "roll",
    )
}  # fmt: skip


def _range(graph: Graph, op: Op, position: int) -> int | None:
    if op.target == "aten.embedding" and position == 1:
        return _shape(graph, op, 0)[0]
    if op.target in _LABEL_OPS and position == 1:
        logits = _shape(graph, op, 0)
        return logits[1] if len(logits) > 1 else logits[0]
    return None


def _shape(graph: Graph, op: Op, position: int) -> tuple[int, ...]:
    name = op.operands[position]
    assert name is not None
    return graph.tensor(name).shape


def _ignored(op: Op) -> int:
    named: dict[str, Any] = dict(op.attributes)
    return int(named.get("ignore_index", IGNORED))
