"""Chooses the size to verify at: full if that is quick, else reduced without loss of unevenness."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autoshard import costs
from autoshard.cluster.hardware import Hardware
from autoshard.cluster.links_and_constants import DTYPES
from autoshard.constraints.verify_request import MOST_BYTES
from autoshard.ir.graph import Graph
from autoshard.ir.layout import LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Compute, Program
from autoshard.program.lower import chosen_strategies
from autoshard.replay.resize import keyed_ops
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.operators import record

FULL_SECONDS = 60.0  # full size is verified where it is predicted to take no longer than this
ISSUE_SECONDS = 5e-4  # of Python for one operator of a rank, forward and backward
COPIES = 15  # of a float64 parameter in the parent: as built, value, gradient, two of AdamW, before and after each step
RANK_COPIES = 8

Arguments = Mapping[str, Any]


def reduced_arguments(planned: Arguments, sizes: Arguments, overrides: Arguments) -> dict[str, Any]:
    """Arguments to verify at: `sizes` (the model's VERIFY) if smaller than planned, then `overrides`."""
    smaller = {
        name: min(value, planned[name]) if _is_number(value) and _is_number(planned.get(name)) else value
        for name, value in sizes.items()
    }
    return {**planned, **smaller, **overrides}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def changed(planned: Arguments, verified: Arguments) -> tuple[tuple[str, str, str], ...]:
    """Triples (argument, verified, planned) of those that differ; one not given when planning is the default."""
    return tuple(
        (name, str(value), str(planned.get(name, "default")))
        for name, value in sorted(verified.items())
        if planned.get(name) != value
    )


def is_quick(plan: Plan, graph: Graph, steps: int, this_machine: Hardware, ranks: int, in_turns: bool) -> bool:
    """Can the full size be verified here, by predicted seconds on `this_machine` (a profile) and by bytes?

    `ranks` of the plan's devices run, in lock-step if `in_turns`.
    """
    seconds = predicted_seconds(plan, graph, steps, this_machine, ranks, in_turns)
    return seconds <= FULL_SECONDS and _bytes(plan, graph, ranks) <= MOST_BYTES


def predicted_seconds(plan: Plan, graph: Graph, steps: int, machine: Hardware, ranks: int, in_turns: bool) -> float:
    """Seconds to verify. Processes share the cores, ranks in lock-step take turns; float64 takes twice the time; the
    reference does at most the work of all ranks. Fewer ranks do the work of all the plan's devices together."""
    slowest = min(flops for _, flops in machine.peaks)  # of a dtype that the machine computes in some other one
    machine = replace(machine, peaks=(*((name, slowest) for name in DTYPES), *machine.peaks))
    strategies = chosen_strategies(plan, graph)
    chosen = {name: replace(choice, host=False) for name, choice in strategies.items()}  # here the device is its host
    device = sum(sum(costs.local_seconds(machine, plan.mesh, graph, op, chosen[op.name])) for op in graph.ops)
    at_once = 1 if in_turns else min(ranks, os.cpu_count() or 1)
    issued = ISSUE_SECONDS * len(graph.ops) * ranks * steps / at_once
    return device * plan.mesh.size / at_once * 2 * 2 * steps + issued


def _bytes(plan: Plan, graph: Graph, ranks: int) -> float:
    """Bytes in float64: many copies of the parameters, and every activation once a rank."""
    parameters = sum(graph.tensor(p.tensor).numel for p in graph.parameters)
    results = sum(graph.tensor(name).numel for op in graph.ops for name in op.results)
    return 8.0 * (parameters * (COPIES + RANK_COPIES * ranks) + 2 * results)


# --- evenness -------------------------------------------------------------------------------------------------------


def lost_evenness(full: Program, full_graph: Graph, small: Program, small_graph: Graph) -> Iterator[str]:
    """Description of every tensor split evenly at one size and unevenly, or down to nothing, at the other."""
    planned = dict(_splits(full, full_graph))
    for where, sizes in _splits(small, small_graph):
        for dim, (local, wanted) in enumerate(zip(sizes, planned.get(where, ()), strict=False)):
            if local.shards and wanted.shards:
                now, before = evenness(local, small.mesh), evenness(wanted, full.mesh)
                if now != before:
                    yield f"{where}: dim {dim} of length {local.size} is split {now}, planned {wanted.size} is {before}"


def _splits(program: Program, graph: Graph) -> Iterator[tuple[str, tuple[LocalSize, ...]]]:
    """Local sizes of stored tensors and of ops' results, under names that hold across sizes."""
    for parameter in (*program.parameters, *program.buffers):
        yield parameter.path, program.value(parameter.value).local_shape
    for position, name in enumerate(program.inputs):
        yield f"input {position}", program.value(name).local_shape
    results = {i.op: i.results for i in program.instructions if isinstance(i, Compute)}
    for (module, target, number), op in keyed_ops(graph).items():
        for position, name in enumerate(results.get(op.name, ())):
            yield f"result {position} of {target} {number} in {module or 'the model'}", program.value(name).local_shape


def evenness(size: LocalSize, mesh: Mesh) -> str:
    if size.is_even(mesh):
        return "evenly"
    last = tuple(n - 1 for n in mesh.sizes)
    return "unevenly" if size.evaluate(mesh, last) else "down to nothing"


def heads_per_device(program: Program) -> set[tuple[int, int]]:
    """Pairs (heads of a device, heads in all) of every attention whose heads are split."""
    counts = set()
    for instruction in program.instructions:
        if isinstance(instruction, Compute) and record(instruction.target).work is Work.ATTENTION:
            value = program.value(instruction.results[0])
            heads = value.local_shape[-3] if len(value.shape) > 3 else None
            if heads is not None and heads.shards:
                counts.add((heads.largest(program.mesh), heads.size))
    return counts
