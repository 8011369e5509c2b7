"""Mixed precision as casts in the graph, by the rules of torch.autocast; parameters stay float32 masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.errors import UsageError
from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.graph_capture.training.float8_layers import with_float8
from autoshard.graph_capture.training.overwritten_buffers import note_saved
from autoshard.graph_capture.training.requires_grad import mark_gradients
from autoshard.ir.graph import DTYPE_BYTES, Graph, Op, Tensor
from autoshard.rules.algebra.operator_record import Autocast
from autoshard.rules.operators import OPERATORS, record

PRECISIONS = {"fp32": "", "bf16-mixed": "bfloat16", "fp16-mixed": "float16", "fp8-mixed": "bfloat16"}
FP8 = "fp8-mixed"  # bf16-mixed, whose linear layers multiply in float8


def _on(lists: set[Autocast]) -> frozenset[str]:
    return frozenset(target for target, known in OPERATORS.items() if known.autocast in lists)


# The lists of CUDA's autocast, which are those of ATen/autocast_mode.h; what torch makes of these operators alone (a
# cross entropy is a log-softmax and an nll_loss) stands with them. What is in no list runs as its operands are.
LOW, HIGH, HIGH_UNLESS_TOLD, WIDEST = (_on({name}) for name in ("low", "high", "high_by_default", "widest"))


def apply_precision(graph: Graph, precision: str) -> Graph:
    """`graph` as it runs under `precision`, one of `PRECISIONS` ("fp32": as written). A cast is made once and shared.
    UsageError where a parameter in half precision would be trained by gradients of a scaled loss."""
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}", f"one of {', '.join(PRECISIONS)}")
    if not PRECISIONS[precision]:
        return replace(graph, precision=precision, widened=())
    if precision == "fp16-mixed":
        _check_masters(graph)
    caster = _Caster(graph, PRECISIONS[precision])
    ops, tensors = caster.run()
    cast = replace(rewrite(graph, ops, tensors=tensors.values()), precision=precision)
    cast = _returning(replace(cast, widened=()), caster.wide)
    return note_saved(mark_gradients(with_float8(cast) if precision == FP8 else cast))


def _returning(graph: Graph, wide: Mapping[str, str]) -> Graph:
    """Return in float32 what the forward casts to it."""
    return replace(
        graph,
        outputs=tuple(wide.get(name, name) for name in graph.outputs),
        loss=None if graph.loss is None else wide.get(graph.loss, graph.loss),
        buffer_updates=tuple((buffer, wide.get(name, name)) for buffer, name in graph.buffer_updates),
    )


def _check_masters(graph: Graph) -> None:
    """Gradients of a scaled loss are unscaled in what their parameters are: in half precision they would vanish."""
    held = [(p.path, graph.tensor(p.tensor).dtype) for p in graph.parameters if p.trainable]
    for path, dtype in held:
        if dtype not in ("float16", "bfloat16"):
            continue
        raise UsageError(
            f"--precision fp16-mixed trains parameters in float32: {path} is {dtype}",
            "model.float() in the function that builds it, or --precision fp32, which leaves the model as it is",
        )


class _Caster:
    def __init__(self, graph: Graph, low: str) -> None:
        self.graph, self.low = graph, low
        self.tensors = dict(graph.by_name)
        self.casts: dict[tuple[str, str], str] = {}
        self.wide: dict[str, str] = {}  # what the forward casts to float32, to that
        self.ops: list[Op] = []

    def run(self) -> tuple[list[Op], dict[str, Tensor]]:
        for op in self.graph.ops:
            self._add(op)
        for buffer, value in self.graph.buffer_updates:
            value = self.wide.get(value, value)
            assert self.tensors[buffer].dtype == self.tensors[value].dtype, f"the update of {buffer} changed its dtype"
        return self.ops, self.tensors

    def _add(self, op: Op) -> None:
        known = record(op.target)
        op = replace(op, operands=tuple(None if n is None else self.wide.get(n, n) for n in op.operands))
        lowered = range(len(op.operands)) if known.low_operands is None else known.low_operands
        wanted = self._wanted(op)
        if wanted and self._is_floating(op):
            op = replace(
                op, operands=tuple(self._cast(n, wanted, op) if i in lowered else n for i, n in enumerate(op.operands))
            )
        dtype = None if known.explicit_dtype or _names_dtype(op) else wanted or self._promoted(op)
        for position, name in enumerate(op.results):
            if dtype and self._changes(name) and not (known.first_decides_dtype and position):
                self.tensors[name] = replace(self.tensors[name], dtype=dtype)
        self.ops.append(op)
        for name in op.results:
            if name in self.graph.widened and self.tensors[name].dtype == self.low:
                self.wide[name] = str(self._cast(name, "float32", op))

    def _wanted(self, op: Op) -> str:
        """The dtype that the operator's floating operands are cast to, "" where they stay unchanged."""
        known = record(op.target)
        if known.autocast == "low" or known.low_operands is not None:
            return self.low
        if known.autocast == "high" or (known.autocast == "high_by_default" and not _names_dtype(op)):
            return "float32"
        if known.autocast == "widest":
            kinds = {self.tensors[name].dtype for name in op.operands if name is not None}
            return "float32" if {"float32", self.low} <= kinds else ""
        return ""

    def _changes(self, name: str) -> bool:
        return self.tensors[name].dtype in ("float32", self.low)

    def _is_floating(self, op: Op) -> bool:
        return any(name is not None and "float" in self.tensors[name].dtype for name in op.operands)

    def _promoted(self, op: Op) -> str | None:
        operands = [self.tensors[name] for name in op.operands if name is not None]
        return result_dtype(operands[:1] if record(op.target).first_decides_dtype else operands)

    def _cast(self, name: str | None, dtype: str, user: Op) -> str | None:
        """The value in `dtype`; the cast stands before its first reader. float64 stays, as under autocast."""
        if name is None or not self._changes(name) or self.tensors[name].dtype == dtype:
            return name
        cast = self.casts.get((name, dtype))
        if cast is None:
            cast = self.casts[name, dtype] = self._fresh(f"{name}_{dtype}")
            self.tensors[cast] = replace(self.tensors[name], name=cast, dtype=dtype)
            self.ops.append(Op(cast, "aten.to", (name,), (("dtype", dtype),), (cast,), user.module, user.source))
        return cast

    def _fresh(self, name: str) -> str:
        while name in self.tensors:
            name += "_"
        return name


def _names_dtype(op: Op) -> bool:
    """Does the operator name the dtype of its result?"""
    if record(op.target).autocast != "high_by_default":
        return False
    return any(name == "dtype" and value is not None for name, value in op.attributes)


def result_dtype(operands: Sequence[Tensor]) -> str | None:
    """The floating dtype that torch promotes `operands` to, None without floating ones; 0-d ones only count alone."""
    floating = [tensor for tensor in operands if "float" in tensor.dtype]
    dims = [tensor for tensor in floating if tensor.shape] or floating
    if not dims:
        return None
    kinds = {tensor.dtype for tensor in dims}
    if kinds == {"bfloat16", "float16"}:
        return "float32"
    return max(kinds, key=lambda kind: DTYPE_BYTES[kind])
