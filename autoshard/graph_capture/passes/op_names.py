"""Readable names whatever the passes dropped: the operator's own name, numbered in order: `linear`, `linear_1`."""

from __future__ import annotations

import builtins
from dataclasses import replace
from keyword import kwlist

from autoshard.ir.graph import Graph, Op


def rename(graph: Graph) -> Graph:
    """Ops and results renamed; inputs, parameters and buffers keep their names."""
    fixed = [*graph.inputs, *(stored.tensor for stored in graph.parameters + graph.buffers)]
    taken, counts = {*fixed, *kwlist, *dir(builtins)}, dict[str, int]()
    names = {name: name for name in fixed}
    ops: list[Op] = []
    for op in graph.ops:
        name = _fresh(op.target.rpartition(".")[2].strip("_"), counts, taken)
        results = (name,) if len(op.results) == 1 else tuple(f"{name}_out{i}" for i in range(len(op.results)))
        taken.update(results)
        names |= dict(zip(op.results, results, strict=True))
        ops.append(
            replace(
                op, name=name, operands=tuple(None if n is None else names[n] for n in op.operands), results=results
            )
        )
    return replace(
        graph,
        ops=tuple(ops),
        tensors=tuple(replace(tensor, name=names[tensor.name]) for tensor in graph.tensors),
        variables=tuple((names[name], variable) for name, variable in graph.variables if name in names),
        widened=tuple(names[name] for name in graph.widened),
        outputs=tuple(names[name] for name in graph.outputs),
        loss=None if graph.loss is None else names[graph.loss],
        buffer_updates=tuple((buffer, names[value]) for buffer, value in graph.buffer_updates),
    )


def _fresh(base: str, counts: dict[str, int], taken: set[str]) -> str:
    while True:
        number = counts.get(base, 0)
        counts[base] = number + 1
        name = f"{base}_{number}" if number else base
        if name not in taken:
            taken.add(name)
            return name
