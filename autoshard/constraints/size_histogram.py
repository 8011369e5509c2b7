"""Histogram of the dynamic sizes of steps: read from a file or from text, and grouped where there are many.

A file is JSON: a list of objects, each with a value for every size and a `weight` (1 where it is left out):
`[{"batch": 16, "sequence": 512, "weight": 3}, …]`, as `autoshard sizes` writes it. Text is
`batch=16,sequence=512:3;batch=32,sequence=128:1`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import InvalidFileError, UsageError
from autoshard.ir.dynamic import DynamicSize
from autoshard.system.files import parse_json, read_text

MOST_POINTS = (
    8  # also of a curve: each is searched and simulated by itself: a search of k points takes about k + 2 searches
)
_EXAMPLE = '--sizes "batch=16,sequence=512:3;batch=32,sequence=128:1", or a file that `autoshard sizes` wrote'


@dataclass(frozen=True)
class SizePoint:
    """Dynamic sizes of a step, by name, and the share of steps that have them."""

    sizes: tuple[tuple[str, int], ...]
    weight: float

    def words(self) -> str:
        """`batch 16, sequence 512`."""
        return ", ".join(f"{name} {size}" for name, size in self.sizes)


def read_histogram(text: str) -> tuple[SizePoint, ...]:
    """Histogram of --sizes, with weights that add up to 1. UsageError, or InvalidFileError for a file that is none."""
    if "=" in text and not Path(text).exists():
        return _normal([_point(part) for part in text.split(";") if part.strip()], "--sizes")
    data = parse_json(read_text(Path(text), "the histogram of sizes", _EXAMPLE), text, _EXAMPLE)
    if not isinstance(data, list) or not data or not all(isinstance(row, dict) for row in data):
        raise InvalidFileError(f"{text}: expected a list of objects, each with sizes and a weight", _EXAMPLE)
    return _normal([_row(row, text) for row in data], text)


def histogram(source: str | Path | Sequence[Mapping[str, Any]]) -> tuple[SizePoint, ...]:
    """Histogram given by a program: text, a file, or rows as a file has them."""
    if isinstance(source, str | Path):
        return read_histogram(str(source))
    return _normal([_row(row, "sizes") for row in source], "sizes")


def _point(text: str) -> SizePoint:
    sizes, _, weight = text.strip().partition(":")
    pairs = [part.partition("=") for part in sizes.split(",")]
    good = all(name.strip().isidentifier() and size.strip().isdecimal() for name, _, size in pairs)
    try:
        share = float(weight or 1)
    except ValueError:
        share = math.nan
    if not good or not share > 0 or not math.isfinite(share):
        raise UsageError(
            f"--sizes {text.strip()!r}: expected NAME=N,NAME=N:WEIGHT, and no such file is there", _EXAMPLE
        )
    return SizePoint(tuple((name.strip(), int(size)) for name, _, size in pairs), share)


def _row(row: Mapping[str, Any], where: str) -> SizePoint:
    sizes = tuple((name, size) for name, size in row.items() if name != "weight")
    weight = row.get("weight", 1)
    numbers = isinstance(weight, int | float) and not isinstance(weight, bool) and weight > 0 and math.isfinite(weight)
    if not sizes or not all(type(size) is int and size > 0 for _, size in sizes) or not numbers:
        raise InvalidFileError(f"{where}: {json.dumps(row)} has a size or weight that is no number above 0", _EXAMPLE)
    return SizePoint(sizes, float(weight))


def _normal(points: Sequence[SizePoint], where: str) -> tuple[SizePoint, ...]:
    if not points:
        raise UsageError(f"{where}: no sizes", _EXAMPLE)
    names = {tuple(sorted(name for name, _ in point.sizes)) for point in points}
    if len(names) > 1 or any(len({name for name, _ in point.sizes}) < len(point.sizes) for point in points):
        raise UsageError(f"{where}: the points name different sizes", _EXAMPLE)
    total = sum(point.weight for point in points)
    weights: dict[tuple[tuple[str, int], ...], float] = {}
    for point in points:
        key = tuple(sorted(point.sizes))
        weights[key] = weights.get(key, 0.0) + point.weight / total
    return tuple(SizePoint(sizes, weight) for sizes, weight in sorted(weights.items()))


def points_for(histogram: Iterable[SizePoint], dynamic: Sequence[DynamicSize]) -> tuple[SizePoint, ...]:
    """Points to plan for: with every size of the graph, allowed, and at most `MOST_POINTS`. UsageError for others."""
    known = {declared.name: declared for declared in dynamic}
    if not known:
        raise UsageError("--sizes: the model has no dynamic sizes", "--dynamic batch=8..512/8, or set_inputs")
    points = []
    for point in histogram:
        sizes = dict(point.sizes)
        if sizes.keys() != known.keys():
            message = f"--sizes: {point.words()}: expected a value for each of {', '.join(known)}"
            raise UsageError(message, _EXAMPLE)
        for name, size in sizes.items():
            if not known[name].allows(size):
                message = f"--sizes: {name} of {size}: expected {known[name].words()}"
                raise UsageError(message, "the sizes that steps have, padded; or another --dynamic")
        points.append(SizePoint(tuple((name, sizes[name]) for name in known), point.weight))
    return tuple(_grouped(points, known))


def _grouped(points: list[SizePoint], known: Mapping[str, DynamicSize]) -> list[SizePoint]:
    """Points in order of their product of sizes, grouped in runs of about equal share, each at the least allowed size
    that holds its mean, so that no step counts as shorter than it is on average."""
    if len(points) <= MOST_POINTS:
        return points
    ordered = sorted(points, key=lambda point: (math.prod(size for _, size in point.sizes), point.sizes))
    weights: dict[tuple[tuple[str, int], ...], float] = {}
    run: list[SizePoint] = []
    done = 0.0
    for point in ordered:
        run.append(point)
        done += point.weight
        if done >= (len(weights) + 1) / MOST_POINTS - 1e-9 or point is ordered[-1]:
            weight = sum(member.weight for member in run)
            sizes = tuple((name, _mean(run, name, weight, declared)) for name, declared in known.items())
            weights[sizes] = weights.get(sizes, 0.0) + weight
            run = []
    return [SizePoint(sizes, weight) for sizes, weight in weights.items()]


def _mean(run: Sequence[SizePoint], name: str, weight: float, declared: DynamicSize) -> int:
    mean = sum(dict(point.sizes)[name] * point.weight for point in run) / weight
    up = math.ceil((mean - declared.remainder) / declared.divisor - 1e-9) * declared.divisor + declared.remainder
    return min(max(up, declared.least), declared.most) if declared.most else max(up, declared.least)


def histogram_text(points: Iterable[SizePoint]) -> str:
    """Text of the points, as --sizes takes it."""
    parts = (",".join(f"{name}={size}" for name, size in point.sizes) + f":{point.weight:.17g}" for point in points)
    return ";".join(parts)
