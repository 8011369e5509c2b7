"""Input sizes that a model takes other values of and computes the same: tested by capturing the model there.

Tested only when a package is written, or a graph saved. One capture with fewer samples and shorter sequences and one
with more of both answer for batch and sequence; only if they don't, each is tested alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import islice
from math import gcd

from autoshard.errors import UsageError, UserError
from autoshard.ir.graph import FreeSize, Graph
from autoshard.rules.resize.captured_batch import followed_numbers, with_numbers_of
from autoshard.rules.resize.captured_length import (
    SEQUENCE,
    Slopes,
    check_same,
    follows_of,
    relengthened,
    sequence_length,
    slopes_between,
)
from autoshard.rules.resize.longest_sequence import longest
from autoshard.rules.resize.rebatch import batch_size, rebatched

BATCH = "batch"
LESS, MORE = 2, 64  # the batch captured, divided and multiplied
SHORTER, LONGER = 4, 8  # the sequence
Again = Callable[[int, int], Graph]  # (samples, length; 0 without sequences) -> the same model, captured with these


def with_free_sizes(graph: Graph, recapture: Again, more: int = MORE) -> Graph:
    """`graph`, just captured, with what was tried: which of its sizes can change while nothing else does.

    Tried are a `LESS`th and `more` times its batch, a `SHORTER`th and `LONGER` times its length: a model could do
    something else of fewer, or of more (`if len(x) < 4`).
    """
    return replace(graph, free_sizes=_probed(graph, _quiet(recapture), more))


def _probed(graph: Graph, recapture: Again, more: int) -> tuple[FreeSize, ...]:
    try:
        batches = _tried_batches(graph, more)
    except UserError as error:
        return (FreeSize(BATCH, error.message, 0, 0),)
    base = sequence_length(graph)
    if base <= _shorter(base):
        short = f"from sequences of {base} nothing tells what follows their length"
        return (_batch_alone(graph, recapture, batches), *([FreeSize(SEQUENCE, short, 0, 0)] if base else []))
    try:
        slopes, lengths = _followed(graph, recapture, batches)
    except UserError as error:
        batch = _batch_alone(graph, recapture, batches)
        return batch, FreeSize(SEQUENCE, error.message, 0, 0) if not batch.fixed else _length_alone(graph, recapture)
    return FreeSize(BATCH, "", *batches), FreeSize(SEQUENCE, "", *lengths, follows_of(slopes))


def _tried_batches(graph: Graph, more: int) -> tuple[int, int]:
    batch = batch_size(graph)
    return max(1, batch // LESS), batch * more


def _batch_alone(graph: Graph, recapture: Again, tried: tuple[int, int]) -> FreeSize:
    return FreeSize(BATCH, _why_fixed(graph, batch_size(graph), tried, recapture), *tried)


def _coprime(samples: int, batch: int) -> int:
    """One sample more than a multiple of the batch: padding to a multiple then does not go unseen."""
    return samples + (samples > batch)


def _why_fixed(graph: Graph, batch: int, tried: tuple[int, int], recapture: Again) -> str:
    """Reason why a package can't take another batch, "" if the model does nothing else at those tried."""
    try:
        for samples in (tried[0], _coprime(tried[1], batch)):
            carried = rebatched(graph, samples)
            message = followed_numbers(
                with_numbers_of(carried, recapture(samples, sequence_length(graph)), batch), carried
            )
            if message:
                return message[0]
    except UserError as error:
        return error.message
    return ""


def _length_alone(graph: Graph, recapture: Again) -> FreeSize:
    batch = batch_size(graph)
    try:
        slopes, lengths = _followed(graph, recapture, (batch, batch))
    except UserError as error:
        return FreeSize(SEQUENCE, error.message, 0, 0)
    return FreeSize(SEQUENCE, "", *lengths, follows_of(slopes))


def _shorter(base: int) -> int:
    """Odd shorter length: padding to a multiple then does not go unseen."""
    return max(3, base // SHORTER | 1)


def _followed(graph: Graph, recapture: Again, batches: tuple[int, int]) -> tuple[Slopes, tuple[int, int]]:
    """Slopes of what follows the length, and the range of lengths: captured with a shorter one and the smaller of
    `batches`, and near the longest that its tables allow with the larger, or if that is its own with another shorter
    one. UserError if the second capture disagrees, or anything differs."""
    base = sequence_length(graph)
    shorter = _shorter(base)
    slopes = slopes_between(graph, rebatched(graph, batches[0]), recapture(batches[0], shorter), shorter)
    longer = longest(graph, slopes, shorter, LONGER * base)
    if longer < base:
        what = f"of sequences of {base} the model looks up {base - longer} more positions than its tables have"
        raise UsageError(what, "a plan of its own for another length")
    samples = _coprime(batches[1], batch_size(graph))
    second = _second(base, shorter, longer, batch_size(graph))
    least = min(shorter, second)
    known = replace(graph, free_sizes=(FreeSize(SEQUENCE, "", least, longer, follows_of(slopes)),))
    check_same(rebatched(relengthened(known, second), samples), recapture(samples, second), base)
    return slopes, (least, longer)


def _second(base: int, shorter: int, longer: int, batch: int) -> int:
    """Last length up to `longer` at which no divisor of both steps hides padding or truncation to a multiple of it:
    neither of sequences, nor, at one sample more than a multiple of the batch, of all tokens."""
    steps = range(longer, base, -1) if longer > base else range((shorter + base) // 2, 1, -1)
    apart = (length for length in steps if length != shorter and gcd(base - shorter, length - base) == 1)
    first = next(apart)
    return next((length for length in (first, *islice(apart, 100)) if gcd(length, base * batch) == 1), first)


def _quiet(recapture: Again) -> Again:
    """`recapture` without the output that a model prints as it is built, which was printed before."""

    def quiet(samples: int, length: int) -> Graph:
        with redirect_stdout(StringIO()):
            return recapture(samples, length)

    return quiet
