"""`autoshard sizes`: what a data loader yields, as a histogram of dynamic sizes."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from autoshard.errors import UsageError
from autoshard.graph_capture.dynamic_sizes.declared import Declared, Shape, dims_of, parse


def read(loader: str, texts: Sequence[str], most: int) -> list[dict[str, Any]]:
    """A row for each combination of sizes among its first `most` batches, with their number as `weight`; a size that is
    not allowed is rounded up to one that is, as padding would. UsageError for one above its largest."""
    from autoshard.graph_capture.load_model import find_callable

    declared = parse(texts)
    if not declared:
        raise UsageError("--dynamic: no sizes", "--dynamic batch=8..512/8")
    function = find_callable(loader)
    taken = inspect.signature(function).parameters
    batches = function(**{name: value for name, value in dict.fromkeys(("seed", "rank"), 0).items() if name in taken})
    counts: Counter[tuple[int, ...]] = Counter()
    places: list[tuple[int, int]] = []
    for batch in islice(batches, most):
        shapes = list(_shapes(batch))
        places = places or [dims_of(dynamic, shapes)[0] for dynamic in declared]
        sizes = [shapes[number].sizes[dim] for number, dim in places]
        counts[tuple(_up(dynamic, size) for dynamic, size in zip(declared, sizes, strict=True))] += 1
    if not counts:
        raise UsageError(f"{loader} yields no batch", "a loader of the training data")
    names = [dynamic.name for dynamic in declared]
    return [dict(zip(names, sizes, strict=True)) | {"weight": count} for sizes, count in sorted(counts.items())]


def _up(declared: Declared, size: int) -> int:
    symbol = declared.symbol
    rounded = max(symbol.least, -(-(size - symbol.remainder) // symbol.divisor) * symbol.divisor + symbol.remainder)
    if symbol.most and rounded > symbol.most:
        message = f"a batch has a {declared.name} of {size}, above the largest, {symbol.most}"
        raise UsageError(message, f"a larger range of {declared.name}")
    return rounded


def _shapes(batch: Any) -> Iterator[Shape]:
    pairs = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate(batch if isinstance(batch, tuple | list) else [batch])
    )
    for name, x in pairs:
        yield Shape(str(name), tuple(x.shape), bool(x.dtype.is_floating_point))


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Text of a file for `autoshard plan --sizes`."""
    return "[\n " + ",\n ".join(json.dumps(row) for row in rows) + "\n]\n"
