"""A graph in mixed precision as FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32) gathers it.

Tables that are looked up are cast before they are gathered, as weights of products are. Norms' few numbers stay in
float32 and travel with their block.

For the figures of baselines alone: it is not the model under `torch.autocast`, which reads rows of a table unrounded.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.graph_capture.training.overwritten_buffers import note_saved
from autoshard.graph_capture.training.precision import PRECISIONS
from autoshard.graph_capture.training.requires_grad import mark_gradients
from autoshard.ir.graph import CAST, Graph, Op, Tensor

LOOK_UP = "aten.embedding"  # rows of a table in the low precision are cast, not the table


def with_low_weights(graph: Graph) -> Graph:
    """`graph` itself where its precision is not mixed."""
    low = PRECISIONS.get(graph.precision, "")
    return _LowWeights(graph, low).run() if low else graph


class _LowWeights:
    def __init__(self, graph: Graph, low: str) -> None:
        self.graph, self.low = graph, low
        self.wide = {p.tensor for p in graph.parameters if graph.tensor(p.tensor).dtype == "float32"}
        self.ops: list[Op] = []
        self.tensors: dict[str, Tensor] = {}
        self.same: dict[str, str] = {}  # a cast that the model's own comes after -> the one before it
        self.casts: dict[tuple[str, str], str] = {}

    def run(self) -> Graph:
        for op in self.graph.ops:
            self._add(op)
        return note_saved(mark_gradients(rewrite(self.graph, self.ops, self.same, self.tensors.values())))

    def _add(self, op: Op) -> None:
        first = op.operands[0] if op.operands else None
        if op.target == CAST and first in self.wide and self.graph.tensor(op.results[0]).dtype == self.low:
            known = self.casts.get((str(first), self.low))
            if known is None:
                self.casts[str(first), self.low] = op.results[0]
                self.ops.append(op)
            elif known != op.results[0]:
                self.same[op.results[0]] = known
        elif op.target == LOOK_UP and first in self.wide:
            self._look_up(op, str(first))
        else:
            self.ops.append(op)

    def _look_up(self, op: Op, table: str) -> None:
        (result,) = op.results
        rows = f"{result}_{self.low}"
        while rows in self.graph.by_name:  # of a layer that reads the rows at once
            rows += "_"
        self.tensors[rows] = replace(self.graph.tensor(result), name=rows, dtype=self.low)
        self.ops.append(
            replace(op, name=rows, operands=(self._cast(table, table, self.low, op), *op.operands[1:]), results=(rows,))
        )
        self.ops.append(self._op(rows, result, "float32", op))

    def _cast(self, weight: str, value: str, dtype: str, user: Op) -> str:
        if (weight, dtype) not in self.casts:
            result = self.casts[weight, dtype] = f"{weight}_{dtype}"
            self.tensors[result] = replace(self.graph.tensor(weight), name=result, dtype=dtype)
            self.ops.append(self._op(value, result, dtype, user))
        return self.casts[weight, dtype]

    def _op(self, value: str, result: str, dtype: str, user: Op) -> Op:
        return Op(result, CAST, (value,), (("dtype", dtype),), (result,), user.module)
