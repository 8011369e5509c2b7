"""Finds tensors that nothing keeps once they were read: the code frees their variables there, as the simulator does.

Python holds a variable to the end of its function. What backward keeps is there anyway, and what is small makes no
difference to a peak; of the rest, each storage is listed with all values that share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autoshard.costs.temporaries import keeps_otherwise, saved_difference
from autoshard.ir.graph import Graph
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Compute, Instruction, LocalValue
from autoshard.program.gradient_buckets import local_bytes
from autoshard.program.instruction_storage import facts, storage_roots

SMALL = 1 / 256  # of what is stored and kept: what is less than that does not matter


def short_lived(
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    mesh: Mesh,
    graph: Graph,
    fixed: Iterable[str],
    ends: Iterable[str],
) -> tuple[tuple[str, ...], ...]:
    """Values of each of these storages, in order. `fixed`: inputs and what is stored; `ends`: outputs and updates."""
    root = storage_roots(instructions, graph, fixed)
    backward = _saved_storages(instructions, values, mesh, graph, root) if graph.loss else set()
    lasting = {*backward, *fixed}
    enough = SMALL * sum(local_bytes(values[name], mesh) for name in lasting)
    lasting |= {root[name] for name in ends}
    together: dict[str, list[str]] = {}
    for name, first in root.items():
        if first not in lasting and local_bytes(values[first], mesh) >= enough:
            together.setdefault(first, []).append(name)
    return tuple(map(tuple, together.values()))


def _saved_storages(
    instructions: Sequence[Instruction],
    values: Mapping[str, LocalValue],
    mesh: Mesh,
    graph: Graph,
    root: Mapping[str, str],
) -> set[str]:
    """The storages that backward reads."""

    def local(name: str) -> LocalTensor:
        value = values[name]
        return LocalTensor(tuple(size.largest(mesh) for size in value.local_shape), value.dtype, value.requires_grad)

    storages = set()
    for step in instructions:
        without: tuple[int, ...] = ()
        if isinstance(step, Compute) and keeps_otherwise(graph.by_op[step.op], step.variant):
            operands = tuple(None if name is None else local(name) for name in step.operands)
            layouts = tuple(None if name is None else values[name].layout for name in step.operands)
            op, results = graph.by_op[step.op], tuple(map(local, step.results))
            without = saved_difference(mesh, op, step.variant, operands, layouts, results).without
        storages |= {root[name] for name in facts(step, graph).retained_without(without)}
    return storages
