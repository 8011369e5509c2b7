"""Graph rewriting that the passes share: new ops in, one consistent Graph out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.rules.operators import drops_all, is_random

MARK = "\0"  # in an op's source: what stands behind it is a strategy asked for there


def rewrite(
    graph: Graph, ops: Iterable[Op], same: Mapping[str, str] | None = None, tensors: Iterable[Tensor] = ()
) -> Graph:
    """`graph` with other ops. `same` maps a value that went away to the one that stands for it (chains are followed);
    `tensors` are new or changed ones. Tensors that nothing makes any more are dropped."""
    same = same or {}

    def now(name: str) -> str:
        while name in same:
            name = same[name]
        return name

    ops = tuple(replace(op, operands=tuple(None if n is None else now(n) for n in op.operands)) for op in ops)
    known = graph.by_name | {tensor.name: tensor for tensor in tensors}
    stored = [stored.tensor for stored in graph.parameters + graph.buffers]
    names = [*graph.inputs, *stored, *(result for op in ops for result in op.results)]
    present, variables = {*names}, dict[str, str]()
    for name, variable in sorted(graph.variables, key=lambda pair: pair[0] in same):  # a value's own name goes first
        variables.setdefault(now(name), variable)
    return replace(
        graph,
        variables=tuple(variables.items()),
        widened=tuple(name for name in graph.widened if name in present),
        ops=ops,
        tensors=tuple(known[name] for name in names),
        outputs=tuple(now(name) for name in graph.outputs),
        loss=None if graph.loss is None else now(graph.loss),
        buffer_updates=tuple((buffer, now(value)) for buffer, value in graph.buffer_updates),
    )


def deadcode(graph: Graph) -> Graph:
    """Remove ops that no output, loss or buffer update needs; if they draw random numbers, that is noted."""
    needed = {*graph.outputs, *(value for _, value in graph.buffer_updates), graph.loss}
    live: list[Op] = []
    for op in reversed(graph.ops):
        if needed.intersection(op.results):
            live.append(op)
            needed.update(op.operands)
    drawing = [op.name for op in graph.ops if is_random(op) and not drops_all(op)]
    names = {op.name for op in live}
    unread = tuple(position for position, name in enumerate(drawing) if name not in names)
    return replace(rewrite(graph, reversed(live)), unread_draws=unread)
