"""Which sizes of its inputs a model takes others of and computes the same: asked of the model itself, captured there.

Asked only where a package is written, or a graph saved. One capture with fewer samples and shorter sequences and one
with more of both answer for batch and sequence; only where they don't, each is asked alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    own_length,
    relengthened,
    slopes_between,
)
from autoshard.rules.resize.longest_sequence import longest
from autoshard.rules.resize.rebatch import batch_size, rebatched

BATCH = "batch"
LESS, MORE = 2, 64  # the batch captured, divided and multiplied
SHORTER, LONGER = 4, 8  # the sequence
Again = Callable[[int, int], Graph]  # (samples, length; 0 without sequences) -> the same model, captured with these


def with_free_sizes(graph: Graph, again: Again, more: int = MORE) -> Graph:
    """`graph`, just captured, with what was tried: which of its sizes can change while nothing else does.

    Tried are a `LESS`th and `more` times its batch, a `SHORTER`th and `LONGER` times its length: a model could do
    something else of fewer, or of more (`if len(x) < 4`).
    """
    return replace(graph, free_sizes=_asked(graph, _quiet(again), more))


def _asked(graph: Graph, again: Again, more: int) -> tuple[FreeSize, ...]:
    try:
        batches = _tried_batches(graph, more)
    except UserError as error:
        return (FreeSize(BATCH, error.message, 0, 0),)
    own = own_length(graph)
    if own <= _shorter(own):
        short = f"from sequences of {own} nothing tells what follows their length"
        return (_batch_alone(graph, again, batches), *([FreeSize(SEQUENCE, short, 0, 0)] if own else []))
    try:
        slopes, lengths = _followed(graph, again, batches)
    except UserError as error:
        batch = _batch_alone(graph, again, batches)
        return batch, FreeSize(SEQUENCE, error.message, 0, 0) if not batch.fixed else _length_alone(graph, again)
    return FreeSize(BATCH, "", *batches), FreeSize(SEQUENCE, "", *lengths, follows_of(slopes))


def _tried_batches(graph: Graph, more: int) -> tuple[int, int]:
    own = batch_size(graph)
    return max(1, own // LESS), own * more


def _batch_alone(graph: Graph, again: Again, tried: tuple[int, int]) -> FreeSize:
    return FreeSize(BATCH, _why_fixed(graph, batch_size(graph), tried, again), *tried)


def _why_fixed(graph: Graph, own: int, tried: Iterable[int], again: Again) -> str:
    """Why a package can't take another batch, "" where the model does nothing else of those tried."""
    try:
        for samples in tried:
            carried = rebatched(graph, samples)
            message = followed_numbers(with_numbers_of(carried, again(samples, own_length(graph)), own), carried)
            if message:
                return message[0]
    except UserError as error:
        return error.message
    return ""


def _length_alone(graph: Graph, again: Again) -> FreeSize:
    own = batch_size(graph)
    try:
        slopes, lengths = _followed(graph, again, (own, own))
    except UserError as error:
        return FreeSize(SEQUENCE, error.message, 0, 0)
    return FreeSize(SEQUENCE, "", *lengths, follows_of(slopes))


def _shorter(own: int) -> int:
    """Odd: what is padded to a multiple is no odd length unseen."""
    return max(3, own // SHORTER | 1)


def _followed(graph: Graph, again: Again, batches: tuple[int, int]) -> tuple[Slopes, tuple[int, int]]:
    """What follows the length, and from where to where it can go: captured with a shorter one and the smaller of
    `batches`, and near the longest that its tables allow with the larger, or where that is its own with another shorter
    one. UserError where the second capture tells otherwise, or anything differs."""
    own = own_length(graph)
    shorter = _shorter(own)
    slopes = slopes_between(graph, rebatched(graph, batches[0]), again(batches[0], shorter), shorter)
    longer = longest(graph, slopes, shorter, LONGER * own)
    if longer < own:
        what = f"of sequences of {own} the model looks up {own - longer} more positions than its tables have"
        raise UsageError(what, "a plan of its own for another length")
    samples = batches[1] + (batches[1] > batch_size(graph))
    second = _second(own, shorter, longer, batch_size(graph))
    least = min(shorter, second)
    known = replace(graph, free_sizes=(FreeSize(SEQUENCE, "", least, longer, follows_of(slopes)),))
    check_same(rebatched(relengthened(known, second), samples), again(samples, second), own)
    return slopes, (least, longer)


def _second(own: int, shorter: int, longer: int, batch: int) -> int:
    """The last up to `longer` of which no divisor of both steps hides what is padded or cut to a multiple of it:
    neither of sequences, nor, at one sample more than a multiple of the batch, of all tokens."""
    steps = range(longer, own, -1) if longer > own else range((shorter + own) // 2, 1, -1)
    apart = (length for length in steps if length != shorter and gcd(own - shorter, length - own) == 1)
    first = next(apart)
    return next((length for length in (first, *islice(apart, 100)) if gcd(length, own * batch) == 1), first)


def _quiet(again: Again) -> Again:
    """What a model prints as it is built was printed before."""

    def asked(samples: int, length: int) -> Graph:
        with redirect_stdout(StringIO()):
            return again(samples, length)

    return asked
