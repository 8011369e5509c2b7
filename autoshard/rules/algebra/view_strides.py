"""Strides in elements of what a view makes: a new description of its operand's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from autoshard.ir.graph import Op, Tensor

Strides = tuple[int, ...]
View = Callable[[Op, Tensor, Strides, list[Tensor]], list[Strides] | None]  # None: these sizes need a copy


def contiguous(shape: Sequence[int]) -> Strides:
    """Row-major strides."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Strides without gaps, the dims from outermost to innermost in this `order`."""
    inner = contiguous([shape[d] for d in order])
    return tuple(inner[order.index(d)] for d in range(len(shape)))


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


def reshaped(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides] | None:
    new_strides = viewed(operand.shape, strides, results[0].shape)
    return None if new_strides is None else [new_strides]


def same(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    return [strides for _ in results]


def transposed(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    order = list(range(len(strides)))
    a, b = cast(int, op.attribute("dim0")), cast(int, op.attribute("dim1"))
    order[a], order[b] = order[b], order[a]
    return [tuple(strides[d] for d in order)]


def permuted(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    return [tuple(strides[d] for d in cast("tuple[int, ...]", op.attribute("dims")))]


def expanded(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    shape, new = operand.shape, len(results[0].shape) - len(operand.shape)
    tail = (s if shape[d] == results[0].shape[d + new] else 0 for d, s in enumerate(strides))
    return [(0,) * new + tuple(tail)]


def sliced(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    dim, step = cast(int, op.attribute("dim")), cast(int, op.attribute("step"))
    return [tuple(s * step if d == dim else s for d, s in enumerate(strides))]


def without_dim(op: Op, operand: Tensor, strides: Strides, results: list[Tensor]) -> list[Strides]:
    dim = cast(int, op.attribute("dim"))
    return [strides[:dim] + strides[dim + 1 :] for _ in results]
