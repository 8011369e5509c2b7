"""How values lie in memory when each op runs on whole tensors: strides in elements, and who shares storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from autoshard.ir.graph import Graph, Op, Tensor

Strides = tuple[int, ...]
_POINTWISE = """
    add sub mul div neg relu gelu silu tanh sigmoid exp log sqrt rsqrt pow dropout where to masked_fill clamp
    abs sin cos erf
"""
_KEEP_ORDER = frozenset(f"aten.{name}" for name in _POINTWISE.split())


@dataclass
class StridedMemory:
    """`strides` by value name; `aliases` by op name: (result, operand) pairs that share storage."""

    strides: dict[str, Strides] = field(default_factory=dict)
    aliases: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)


def memory_layout(graph: Graph) -> StridedMemory:
    """Strides of every value and the storage each op shares with its operand."""
    memory = StridedMemory({t.name: contiguous(t.shape) for t in graph.tensors})
    for op in graph.ops:
        view = _VIEWS.get(op.target)
        if view is None:
            for name in op.results[:1]:
                memory.strides[name] = _fresh(op, graph, memory.strides)
            continue
        operand = cast(str, op.operands[0])
        results = view(op, graph.tensor(operand), memory.strides[operand], [graph.tensor(r) for r in op.results])
        if results is not None:
            memory.strides |= dict(zip(op.results, results, strict=True))
            memory.aliases[op.name] = tuple((i, 0) for i in range(len(op.results)))
    return memory


def contiguous(shape: Sequence[int]) -> Strides:
    """Row-major strides."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def viewed(shape: Sequence[int], strides: Strides, target: Sequence[int]) -> Strides | None:
    """Strides of `target` over the same memory, None where a reshape must copy (the rule of Tensor.view)."""
    chunks: list[tuple[int, int]] = []  # (elements, innermost stride) of runs of dims that lie as one
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if chunks and chunks[-1][1] == size * stride:
            chunks[-1] = (chunks[-1][0] * size, stride)
        else:
            chunks.append((size, stride))
    result: list[int] = []
    left, step = chunks.pop() if chunks else (1, 1)
    for size in reversed(target):
        if left == 1 and size != 1 and chunks:
            left, step = chunks.pop()
        if left % max(size, 1):
            return None
        result.append(step)
        left, step = left // max(size, 1), step * size
    return tuple(reversed(result)) if left == 1 and not chunks else None


def _fresh(op: Op, graph: Graph, strides: dict[str, Strides]) -> Strides:
    """Strides of a newly made result."""
    shape = graph.tensor(op.results[0]).shape
    if op.target == "aten.scaled_dot_product_attention" and len(shape) == 4:
        return _dense(shape, (0, 2, 1, 3))  # the flash kernels write (batch, sequence, heads, dim)
    if op.target in _KEEP_ORDER:
        for operand in op.operands:
            if operand is not None and graph.tensor(operand).shape == shape:
                lying = strides[operand]
                return _dense(shape, sorted(range(len(shape)), key=lambda d: -lying[d]))
    return contiguous(shape)


def _dense(shape: Sequence[int], order: Sequence[int]) -> Strides:
    inner = contiguous([shape[d] for d in order])
    return tuple(inner[order.index(d)] for d in range(len(shape)))


View = Callable[[Op, Tensor, Strides, list[Tensor]], "list[Strides] | None"]


def _reshape(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides] | None:
    made = viewed(operand.shape, strides, results[0].shape)
    return None if made is None else [made]


def _same(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    return [strides for _ in results]


def _transpose(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    order = list(range(len(strides)))
    a, b = cast(int, op.attribute("dim0")), cast(int, op.attribute("dim1"))
    order[a], order[b] = order[b], order[a]
    return [tuple(strides[d] for d in order)]


def _permute(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    return [tuple(strides[d] for d in cast("tuple[int, ...]", op.attribute("dims")))]


def _expand(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    shape, new = operand.shape, len(results[0].shape) - len(operand.shape)
    kept = (s if shape[d] == results[0].shape[d + new] else 0 for d, s in enumerate(strides))
    return [(0,) * new + tuple(kept)]


def _slice(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    dim, step = cast(int, op.attribute("dim")), cast(int, op.attribute("step"))
    return [tuple(s * step if d == dim else s for d, s in enumerate(strides))]


def _without(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    dim = cast(int, op.attribute("dim"))
    return [strides[:dim] + strides[dim + 1 :] for _ in results]


_VIEWS: dict[str, View] = {
    "aten.reshape": _reshape, "aten.unsqueeze": _reshape, "aten.squeeze": _reshape, "aten.detach": _same,
    "aten.alias": _same, "aten.split": _same, "aten.transpose": _transpose, "aten.permute": _permute,
    "aten.expand": _expand, "aten.slice": _slice, "aten.select": _without, "aten.unbind": _without,
}  # fmt: skip
