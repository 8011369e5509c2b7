"""Builds batches from the model's example inputs: values keep their meaning, samples change places.

Only what carries no information (one number everywhere) is drawn: equal samples would hide faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.graph_capture.dynamic_export.concrete import resized
from autoshard.ir.graph import Graph, Op
from autoshard.rules.operators import record
from autoshard.verification.original.randomise import generator

IGNORED = torch.nn.CrossEntropyLoss().ignore_index


@dataclass(frozen=True)
class IntegerRange:
    """Meaning of an integer input: indices in [0, high), or labels with this `ignored` value if it is not None."""

    high: int
    ignored: int | None = None


def example_inputs(examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The unchanged examples, floating ones in float64."""
    return [x.double() if x.is_floating_point() else x.clone() for x in examples]


def at_shapes(graph: Graph, examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Examples at the dynamic sizes of the graph, except for the number of samples: along other dims their numbers are
    repeated or truncated."""
    places = {(name, dim) for size in graph.dynamic for name, dim in size.dims if dim}
    shaped = []
    for name, x in zip(graph.inputs, examples, strict=True):
        for dim in (dim for input_name, dim in sorted(places) if input_name == name):
            x = resized(x, dim, graph.tensor(name).shape[dim])
        shaped.append(x)
    return shaped


def at_batch(graph: Graph, examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Examples with as many samples as the graph has. Further samples are modified copies: numbers that occur once in a
    sample change places, floating ones move along its last dim."""
    return [
        x if not x.dim() or len(x) == (count := graph.tensor(name).shape[0]) else _samples(x, count, generator(0, name))
        for name, x in zip(graph.inputs, examples, strict=True)
    ]


def _samples(example: torch.Tensor, count: int, source: torch.Generator) -> torch.Tensor:
    rows = [example[number % len(example)] for number in range(count)]
    for number in range(len(example), count):
        row = rows[number]
        if row.is_floating_point() and row.dim():
            rows[number] = row.roll(number // len(example), -1)
        elif row.dim() and row.dtype != torch.bool and not row.is_complex():
            rows[number] = _shuffled(row, source)
    return torch.stack(rows)


def varied_inputs(graph: Graph, examples: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """One global batch of `examples` (order of `graph.inputs`), floating ones in float64.

    All inputs change the order of their samples (dim 0) alike. Equal samples are made different: an input that is one
    number everywhere, or out of its range, is drawn (integers from the range of the embedding or loss that they reach);
    in equal rows of integers, the numbers that occur once in a row change places, as words may and a padding or image
    token may not. Some labels are ignored, a different share in each sample.
    """
    ranges = integer_ranges(graph)
    order = _order(examples, generator(seed, "samples"))
    return [
        _varied(example if order is None else example[order], ranges.get(name), generator(seed, f"input {name}"))
        for name, example in zip(graph.inputs, example_inputs(examples), strict=True)
    ]


def varied_micro_batch(graph: Graph, examples: Sequence[torch.Tensor], seed: int, number: int) -> list[torch.Tensor]:
    """Inputs of micro-batch `number` of a step; each micro-batch has other labels ignored than the last."""
    ranges = integer_ranges(graph)
    inputs = varied_inputs(graph, examples, seed + 1000 * number)
    for position, name in enumerate(graph.inputs):
        ignored = ranges[name].ignored if name in ranges else None
        if ignored is not None and number:
            inputs[position] = _with_fewer(inputs[position], ignored, number)
    return inputs


def _with_fewer(labels: torch.Tensor, ignored: int, number: int) -> torch.Tensor:
    """Labels with more ignored: of those that count, every second in micro-batch 1, every third in micro-batch 2, …"""
    flat = labels.clone().reshape(-1)
    counted = (flat != ignored).nonzero().view(-1)
    flat[counted[1 :: number + 1]] = ignored
    return flat.reshape(labels.shape)


def _order(examples: Sequence[torch.Tensor], source: torch.Generator) -> torch.Tensor | None:
    """New order of the samples; None if the inputs do not all have as many."""
    counts = {len(example) for example in examples if example.dim()}
    if len(counts) != 1 or not all(example.dim() for example in examples):
        return None
    return torch.randperm(counts.pop(), generator=source)


def _varied(example: torch.Tensor, meaning: IntegerRange | None, source: torch.Generator) -> torch.Tensor:
    if example.dtype == torch.bool or not example.numel():
        return example
    if example.is_floating_point():
        return _drawn(example, source) if _placeholder(example) else example
    if meaning is None:
        return example
    values = example
    if _constant(example) or _outside(example, meaning):
        values = torch.randint(0, meaning.high, example.shape, generator=source, dtype=example.dtype)
    elif _equal_rows(example):
        values = torch.stack([_shuffled(row, source) for row in example])
    return values if meaning.ignored is None else _with_ignored(values, meaning.ignored)


def _outside(example: torch.Tensor, meaning: IntegerRange) -> bool:
    """Is the example out of the model's range? It may be, as a capture needs only its shape."""
    ignored = example == meaning.ignored if meaning.ignored is not None else torch.zeros_like(example, dtype=torch.bool)
    return bool((((example < 0) | (example >= meaning.high)) & ~ignored).any())


def _constant(example: torch.Tensor) -> bool:
    return bool((example == example.reshape(-1)[0]).all())


def _equal_rows(example: torch.Tensor) -> bool:
    return example.dim() > 0 and len(example) > 1 and bool((example == example[:1]).all())


def _placeholder(example: torch.Tensor) -> bool:
    """Does the example carry no information: one number everywhere, or equal samples that are no mask?"""
    if _constant(example):
        return bool(torch.isfinite(example).all())
    return _equal_rows(example) and bool(torch.isfinite(example).all()) and len(example.unique()) > 2


def _drawn(example: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Normal numbers with the example's mean and spread; probabilities stay probabilities."""
    spread = float(example.std()) if example.numel() > 1 else 0.0
    values = float(example.mean()) + (spread or 1.0) * torch.randn(example.shape, generator=source, dtype=torch.float64)
    return values.abs().remainder(1) if _within_one(example) else values


def _shuffled(row: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """The row with the numbers that occur once permuted."""
    flat = row.reshape(-1).clone()
    _, place, count = flat.unique(return_inverse=True, return_counts=True)
    single = (count[place] == 1).nonzero().reshape(-1)
    flat[single] = flat[single[torch.randperm(len(single), generator=source)]]
    return flat.reshape(row.shape)


def _within_one(example: torch.Tensor) -> bool:
    """Are these probabilities, which some losses need, and not zeros and ones alone?"""
    return bool(((example >= 0) & (example <= 1)).all()) and bool((example.frac() != 0).any())


def _with_ignored(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """Labels ignored unevenly over the batch: sample b of n loses about b/n of its labels; at least one label stays.

    Labels whose samples already have unequal shares ignored are returned unchanged.
    """
    labels = labels.clone()
    if labels.dim() == 0 or labels.shape[0] == 0:
        return labels
    if labels.dim() == 1:
        if not bool((labels == ignored).any()):
            labels[2::3] = ignored
        return labels
    count = labels.shape[0]
    left = (labels != ignored).reshape(count, -1).sum(1)
    if len(left.unique()) > 1:
        return labels
    for sample in range(1, count):
        row = labels[sample].view(-1)
        counted = (row != ignored).nonzero().view(-1)
        row[counted[len(counted) - max(1, sample * len(counted) // count) :]] = ignored
    return labels


def integer_ranges(graph: Graph) -> Mapping[str, IntegerRange]:
    """Integer input -> its range, found by following it through ops that only move integers."""
    ranges = {}
    for name in graph.inputs:
        if not graph.tensor(name).dtype.startswith("int"):
            continue
        uses = _uses(graph, name)
        highs = [high for op, position in uses if (high := _range(graph, op, position)) is not None]
        if highs:
            labelled = [op for op, position in uses if position == 1 and record(op.target).chooses == "classes"]
            ignored = [_ignored(op) for op in labelled]
            ranges[name] = IntegerRange(min(highs), ignored[0] if len(ignored) == len(highs) else None)
    return ranges


def _uses(graph: Graph, name: str) -> list[tuple[Op, int]]:
    """Pairs (op, operand position) that the input reaches, moved about but with its values unchanged."""
    uses, pending, seen = [], [name], {name}
    while pending:
        for op, position in graph.consumers[pending.pop()]:
            uses.append((op, position))
            if record(op.target).moves and op.results[0] not in seen:
                seen.update(op.results)
                pending.extend(op.results)
    return uses


def _range(graph: Graph, op: Op, position: int) -> int | None:
    chooses = record(op.target).chooses if position == 1 else ""
    if chooses == "rows":
        return _shape(graph, op, 0)[0]
    if chooses == "classes":
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
