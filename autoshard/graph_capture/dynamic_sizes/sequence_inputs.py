"""Which dims of a model's inputs hold the length of its sequences, found by their shapes alone."""

from __future__ import annotations

from collections.abc import Sequence


def sequence_dims(shapes: Sequence[tuple[int, ...]], floats: Sequence[bool]) -> tuple[int, list[tuple[int, ...]]]:
    """Sequence length, and the dims of each input that have it; 0 if no input has a sequence.

    It is dim 1 of most inputs of numbers (`floats`: those that are not), (batch, sequence); of most (batch, sequence,
    width) where none has numbers.
    """
    tokens = [shape[1] for shape, real in zip(shapes, floats, strict=True) if not real and len(shape) > 1]
    vectors = [shape[1] for shape, real in zip(shapes, floats, strict=True) if real and len(shape) == 3]
    lengths = tokens or vectors
    length = max(lengths, key=lengths.count, default=0)
    if length < 2:  # of 1 nothing tells where it is
        return 0, [() for _ in shapes]
    heads = [shape[0] for shape in shapes if len(shape) > 1]
    batch = max(heads, key=heads.count)
    return length, [_dims(shape, real, length, batch) for shape, real in zip(shapes, floats, strict=True)]


def _dims(shape: tuple[int, ...], real: bool, length: int, batch: int) -> tuple[int, ...]:
    if len(shape) == 1:
        return (0,) if not real and shape[0] == length != batch else ()
    first, last = (1, 2) if real and len(shape) == 3 else (1, len(shape))
    if real and len(shape) != 3:  # numbers added to scores: (batch, heads, sequence, sequence)
        first = len(shape) - 2 if len(shape) == 4 and shape[2] == shape[3] else last
    return tuple(dim for dim in range(first, last) if shape[dim] == length)
