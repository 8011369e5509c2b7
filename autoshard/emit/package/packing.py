# mypy: ignore-errors
# ruff: noqa: I001
"""Documents packed into the rows of a batch: several in a row, each read as if it stood alone.

What keeps them apart is the model: its positions begin again with each document, or an input counts the documents. That
it does is tried before the first step, with documents of which one is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import model_parallel
from batches import local_part
from dynamic_sizes import SET, shape_at
from evaluation import evaluated, no_evaluation, whole_loss
from model_parallel import INPUTS, PACKED_BY
from runtime import ParallelMesh
from user_errors import BatchError, UserError

IGNORED = getattr(model_parallel, "IGNORED", {})
POSITIONS = ("position_ids", "positions")
LEAST = 6  # tokens of a row: a document of two, and one of which two come after two


def document_inputs() -> list[str]:
    """Inputs that a document has."""
    return [name for name in INPUTS if name not in PACKED_BY]


def packed(documents: Iterable[Any], first_counts: bool) -> Iterator[dict[str, Tensor]]:
    """Global batches of the run's sizes: each document goes to the first row that has room for it, and where none has,
    a new batch begins. What is left of a row is a document whose labels do not count.

    A document is a tensor of tokens, or a tuple or dict of tensors as long as it is. `first_counts`: does the first
    label of a document, or does the model compare it with what stands before? BatchError for one that no row holds.
    """
    rows, length = shape_at(document_inputs()[0], SET)
    held: list[list[dict[str, Tensor]]] = [[] for _ in range(rows)]
    for document in documents:
        parts = _parts(document, length)
        count = _length(parts)
        room = (row for row in held if sum(map(_length, row)) + count <= length)
        row = next(room, None)
        if row is None:
            yield _batch(held, length, first_counts)
            held = [[] for _ in range(rows)]
            row = held[0]
        row.append(parts)
    if any(held):
        yield _batch(held, length, first_counts)


def _length(parts: Mapping[str, Tensor]) -> int:
    return len(next(iter(parts.values())))


def _parts(document: Any, length: int) -> dict[str, Tensor]:
    names = document_inputs()
    if isinstance(document, Tensor):
        document = [document] * (len(names) if set(names[1:]) <= IGNORED.keys() else 1)
    values = [document.get(name) for name in names] if isinstance(document, Mapping) else list(document)
    if len(values) != len(names) or not all(isinstance(x, Tensor) and x.dim() == 1 for x in values):
        raise BatchError(f"--pack: a document must hold a tensor of one dim for each of {', '.join(names)}")
    counts = {len(x) for x in values}
    if len(counts) > 1 or not 0 < min(counts) <= length:
        numbers = " and ".join(map(str, sorted(counts)))
        raise BatchError(
            f"--pack: a document of {numbers} tokens: expected one length, from 1 to {length}\n"
            "  try: longer documents in pieces, or --sequence-length N"
        )
    return dict(zip(names, values, strict=True))


def _batch(held: Sequence[Sequence[dict[str, Tensor]]], length: int, first_counts: bool) -> dict[str, Tensor]:
    batch = {}
    for name, (_, dtype, *_) in INPUTS.items():
        rows = [_row(name, row, length, getattr(torch, dtype), first_counts) for row in held]
        batch[name] = torch.stack(rows)
    return batch


def _row(name: str, row: Sequence[dict[str, Tensor]], length: int, dtype: torch.dtype, first_counts: bool) -> Tensor:
    lengths = [*map(_length, row)]
    lengths.append(length - sum(lengths))  # what is left
    if name in POSITIONS:
        return torch.cat([torch.arange(count) for count in lengths]).to(dtype)
    if name in PACKED_BY:
        return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(dtype)
    tokens = [parts[name].to(dtype).clone() for parts in row]
    if name in IGNORED and not first_counts:
        for x in tokens:
            x[0] = IGNORED[name]
    return torch.cat([*tokens, torch.full((lengths[-1],), IGNORED.get(name, 0), dtype=dtype)])


def check_pack() -> None:
    """UserError where this package can't take packed documents."""
    if not IGNORED or not IGNORED.keys() < set(document_inputs()):
        why = "the model has no labels that can be left out of its loss"
    elif len(_shapes()) > 1 or len(min(_shapes())) != 2 or any("int" not in spec[1] for spec in INPUTS.values()):
        why = "the inputs are not all rows of tokens"
    elif min(_shapes())[1] < LEAST:
        why = f"rows of {min(_shapes())[1]} tokens hold no two documents"
    elif reason := no_evaluation():
        why = f"documents are seen to be kept apart by a loss without training: {reason}"
    else:
        return
    raise UserError(f"--pack: {why}\n  try: batches of one document a row, with --pad")


def _shapes() -> set[tuple[int, ...]]:
    """Shapes of the inputs, at the sizes that the command line fixes."""
    return {shape_at(name, SET) for name in INPUTS}


def first_label_counts(model: nn.Module, mesh: ParallelMesh) -> bool:
    """True if the first label of a document counts, False if the model compares it with what stands before, as one that
    shifts labels does. UserError where one document's tokens change another's loss, or no change can be seen.

    Losses are compared bit by bit: what is masked adds zeros.
    """
    length = shape_at(document_inputs()[0], SET)[1]
    start, late = length // 3, 2 * length // 3
    alone = _loss(model, mesh, start, late)
    if alone == _loss(model, mesh, start, late, slice(start, late)):
        raise UserError(
            "--pack: with these weights no token changes the loss of a later one, so that it can't be seen whether the "
            "model keeps documents apart\n  try: --weights or --resume, of a model that was trained for a while"
        )
    other = _loss(model, mesh, start, late, slice(0, start))
    if alone != other:
        raise UserError(
            f"--pack: the tokens of one document change the loss of another ({alone:.9g}, {other:.9g}): the model does "
            "not keep apart what stands in a row\n  try: a mask made of the positions, or batches of one document a row"
        )
    return _loss(model, mesh, start, start) == _loss(model, mesh, start, start, slice(0, start))


def _loss(model: nn.Module, mesh: ParallelMesh, start: int, counted: int, changed: slice = slice(0, 0)) -> float:
    """Loss of rows of two documents, the second from `start` on, over the labels from `counted` on; tokens are replaced
    where they are `changed`."""
    names, (rows, length) = document_inputs(), shape_at(document_inputs()[0], SET)
    generator = torch.Generator().manual_seed(0)
    documents = []
    for _ in range(rows):
        row = {}
        for name in names:
            low, high = INPUTS[name][3:5]
            x = row[name] = torch.randint(low, high, (length,), generator=generator)
            if name in IGNORED:
                x[:counted] = IGNORED[name]
            else:
                x[changed] = low + (x[changed] - low + 1) % (high - low)
        documents += [{name: x[part] for name, x in row.items()} for part in (slice(0, start), slice(start, length))]
    batch = next(packed(documents, first_counts=True))
    local = [local_part(name, batch[name], mesh, SET).to(mesh.device) for name in INPUTS]
    return whole_loss(evaluated(model, mesh, local)[0], mesh)
