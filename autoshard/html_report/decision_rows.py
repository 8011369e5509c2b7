"""The decisions of a plan as table rows, repeated blocks folded."""

from __future__ import annotations

import re
from typing import Any

from autoshard import rules
from autoshard.errors import NAMED
from autoshard.ir.graph import DTYPE_BYTES, Graph
from autoshard.ir.layout import parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, RedistributionPlan, TensorPlan
from autoshard.ir.program import Program
from autoshard.program.weight_buckets import paths_by_dtype
from autoshard.redistribute import BY_INDEX, reason
from autoshard.text import plan_labels
from autoshard.text.collective_lines import move_lines, moved_bytes
from autoshard.units import format_bytes, format_seconds, signed_seconds

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def blocks(plan: Plan, graph: Graph) -> list[dict[str, Any]]:
    """One entry for each distinct block: name, note, rows."""
    entries, known = [], rules.granularities(graph, plan.mesh)
    for index, block in enumerate(plan_labels.blocks(plan, graph)):
        seconds = sum(row.plan.forward_seconds + row.plan.backward_seconds for row in block.rows)
        times = f", {len(block.names)} times" if len(block.names) > 1 else ""
        note = f"{len(block.rows)} operators, {format_seconds(seconds, 3)} forward and backward{times}"
        rows = [_row(row, plan, graph, known) for row in block.rows]
        entries.append({"name": block.title, "note": note, "rows": rows, "open": index < NAMED})
    return entries


def _row(row: plan_labels.BlockRow, plan: Plan, graph: Graph, known: rules.Granularities) -> tuple[str, ...]:
    variant = f"\n{row.plan.variant}" if row.plan.variant else ""
    other = plan_labels.runner_up_words(row.plan, plan, graph, known)
    return (
        row.module,
        row.op.target.partition(".")[2],
        row.words + variant,
        row.result,
        "\n".join(move_lines(row.moves, plan, graph)),
        format_seconds(row.plan.forward_seconds, 3),
        format_seconds(row.plan.backward_seconds, 3),
        f"{other}: {signed_seconds(row.plan.parts.runner_up_seconds)}" if other else "",
        row.plan.decided_by,
    )


def redistributions(plan: Plan, graph: Graph) -> list[tuple[str, ...]]:
    """Every redistribution, those of equal blocks folded into one row that says how often."""
    rows = []
    for block in plan_labels.blocks(plan, graph):
        for row in block.rows:
            where = f"{row.module or block.names[0]} {row.op.target.partition('.')[2]}".strip()
            rows += [_move(move, graph, plan.mesh, where, len(block.names)) for move in row.moves]
    outside = [move for move in plan.redistributions if move.consumers[0] not in graph.by_op]
    return rows + [_move(move, graph, plan.mesh, f"the {move.consumers[0]}", 1) for move in outside]


def _move(move: RedistributionPlan, graph: Graph, mesh: Mesh, consumer: str, times: int) -> tuple[str, ...]:
    paths = {stored.tensor: stored.path for stored in (*graph.parameters, *graph.buffers)}
    name = paths.get(move.tensor, move.tensor)
    why = [
        reason(
            step.axes,
            [parse_placement(text) for text in step.before],
            [parse_placement(text) for text in step.after],
            step.forward in BY_INDEX,
            name.rpartition(".")[2],
            consumer,
        )
        for step in move.steps
    ]
    return (
        _NUMBER.sub("#", name) if times > 1 else name,
        str(move.source),
        str(move.target),
        "\n".join(map(str, move.steps)),
        "\n".join(why),
        f"{times}x",
        format_bytes(moved) if (moved := moved_bytes(move, graph, mesh)) else "",
        format_seconds(move.forward_seconds, 3),
        format_seconds(move.backward_seconds, 3),
    )


def stored(plan: Plan, graph: Graph) -> list[tuple[str, ...]]:
    """Inputs, parameters and buffers: kind, name (numbers folded), shape, layout, bytes on one device."""
    rows: dict[tuple[str, ...], int] = {}
    for kind, tensors in (("input", plan.inputs), ("parameter", plan.parameters), ("buffer", plan.buffers)):
        for tensor in tensors:
            key = (kind, _NUMBER.sub("#", tensor.path), *_place(tensor, plan, graph))
            rows[key] = rows.get(key, 0) + 1
    return [(key[0], key[1] + (f" ({count}x)" if count > 1 else ""), *key[2:]) for key, count in rows.items()]


def _place(tensor: TensorPlan, plan: Plan, graph: Graph) -> tuple[str, str, str]:
    from autoshard.ir.layout import largest_shape

    info = graph.tensor(tensor.name)
    size = DTYPE_BYTES[info.dtype]
    for length in largest_shape(info.shape, tensor.layout, plan.mesh):
        size *= length
    return " × ".join(map(str, info.shape)) or "scalar", plan_labels.stored_words(tensor, plan), format_bytes(size)


def buckets(program: Program) -> list[tuple[str, str, str]]:
    """Gradients that are reduced once a step: axes, number of parameters, bytes on one device."""
    parameters = {p.path: p for p in program.parameters}
    rows = []
    for bucket in program.gradient_buckets:
        size = 0
        for path in bucket.parameters:
            numel = DTYPE_BYTES[bucket.dtype]
            for length in program.value(parameters[path].value).local_shape:
                numel *= length.largest(program.mesh)
            size += numel
        rows.append((" and ".join(bucket.axes), str(len(bucket.parameters)), format_bytes(size)))
    return rows


def weight_buckets(program: Program) -> list[tuple[str, ...]]:
    """Stored weights that are gathered together: block, axes, number of weights, dtype, and for how long."""
    return [
        (
            str(bucket.block),
            " and ".join(bucket.axes),
            str(len(bucket.gathers)),
            " and ".join(paths_by_dtype(program, bucket)),
            "whole until backward has used them" if bucket.retained else "gathered again in backward",
        )
        for bucket in program.weight_buckets
    ]
