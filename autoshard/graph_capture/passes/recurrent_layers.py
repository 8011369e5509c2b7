"""A recurrent operator of several layers with dropout between them becomes one operator a layer, and plain dropouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Graph, Op, Tensor

RECURRENT = frozenset({"aten.gru", "aten.lstm", "aten.rnn_relu", "aten.rnn_tanh"})


def split_layers(graph: Graph) -> Graph:
    """`graph` where no recurrent operator draws masks inside."""
    tensors: dict[str, Tensor] = {}
    ops = [part for op in graph.ops for part in (_layers(graph, op, tensors) if _draws(op) else [op])]
    return rewrite(graph, ops, tensors=tensors.values()) if tensors else graph


def _draws(op: Op) -> bool:
    attrs = dict(op.attributes)
    return op.target in RECURRENT and bool(attrs["train"] and attrs["dropout"] and cast(int, attrs["num_layers"]) > 1)


def _layers(graph: Graph, op: Op, tensors: dict[str, Tensor]) -> Iterator[Op]:
    attrs = dict(op.attributes)
    states = 2 if op.target == "aten.lstm" else 1
    count, ways = cast(int, attrs["num_layers"]), 1 + bool(attrs["bidirectional"])
    x, initial, weights = op.operands[0], op.operands[1 : 1 + states], op.operands[1 + states :]
    each = len(weights) // count
    attributes = tuple({**attrs, "num_layers": 1, "dropout": 0.0, "batch_first": False}.items())
    turned = bool(attrs["batch_first"])  # torch drops with time first
    ends: list[list[str]] = [[] for _ in initial]

    def named(name: str, like: str, shape: tuple[int, ...]) -> str:
        tensors[name] = replace(graph.tensor(like), name=name, shape=shape)
        return name

    def transposed(name: str, operand: str | None) -> Op:
        dims = (("dim0", 0), ("dim1", 1))
        return Op(name, "aten.transpose", (operand,), dims, (name,), op.module, op.source)

    steps = graph.tensor(op.results[0]).shape
    if turned:
        assert x is not None
        first, second, *tail = graph.tensor(x).shape
        steps = (steps[1], steps[0], *steps[2:])
        yield transposed(named(f"{op.name}_time_first", x, (second, first, *tail)), x)
        x = f"{op.name}_time_first"
    for layer in range(count):
        last, prefix = layer == count - 1, f"{op.name}_layer{layer}"
        starts = []
        for i, state in enumerate(initial):
            assert state is not None
            shape = (ways, *graph.tensor(state).shape[1:])
            begin = named(f"{prefix}_start{i}", state, shape)
            bounds = (("dim", 0), ("start", layer * ways), ("end", (layer + 1) * ways), ("step", 1))
            yield Op(begin, "aten.slice", (state,), bounds, (begin,), op.module, op.source)
            starts.append(begin)
            ends[i].append(named(f"{prefix}_end{i}", op.results[1 + i], shape))
        whole = last and not turned
        out = op.results[0] if whole else named(f"{prefix}_out", op.results[0], steps)
        operands = (x, *starts, *weights[layer * each : (layer + 1) * each])
        yield replace(
            op, name=prefix, operands=operands, attributes=attributes, results=(out, *(end[-1] for end in ends))
        )
        if not last:
            x = named(f"{prefix}_dropout", op.results[0], steps)
            yield Op(x, "aten.dropout", (out,), (("p", attrs["dropout"]), ("train", True)), (x,), op.module, op.source)
    if turned:
        yield transposed(op.results[0], out)
    for i, end in enumerate(ends):
        result = op.results[1 + i]
        yield Op(result, "aten.cat", tuple(end), (("dim", 0),), (result,), op.module, op.source)
