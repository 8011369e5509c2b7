"""Records of variants: how an operator runs on shards that communicate inside it, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autoshard.ir.graph import DTYPE_BYTES, Op
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import LocaliseVariant

ACCUMULATED = DTYPE_BYTES["float32"]  # bytes of an element in float32, in which statistics and losses are computed
Call = tuple[int, str, float]  # (axis index, kind, full bytes)
LocalTensors = tuple[LocalTensor | None, ...]
Layouts = tuple[Layout | None, ...]
WholeShapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Inside:
    """Collectives inside a variant, in order of execution. `beside`: the kinds of those that run while the operator
    computes (the blocks of a ring); they come first."""

    forward: tuple[Call, ...] = ()
    backward: tuple[Call, ...] = ()
    beside: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Temporary:
    """Bytes that are held only while the forward or the backward runs."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class KeptTensors:
    """Tensors kept for backward in place of the operator's own: none of the operands `without`, and `extra_bytes`
    (None: the operator's) in addition to the others."""

    without: tuple[int, ...] = ()
    extra_bytes: float | None = None
    more_bytes: float = 0.0


Traffic = Callable[[LocalOp], tuple[float, float]]
Collectives = Callable[[Mesh, Op, LocalTensors, Layouts], Inside]
Holds = Callable[[Mesh, Op, LocalTensors, Layouts, LocalTensors], Temporary]
Formulas = Mapping[int, float]  # operand -> tensors that the formula of its gradient makes before this
Keeps = Callable[[Mesh, Op, LocalTensors, Layouts, LocalTensors], KeptTensors]


@dataclass(frozen=True, kw_only=True)
class OperatorVariant:
    """A function of the runtime (emit/runtime) of the variant's name.

    `localise` gives its arguments and axes; `collectives` those that it runs, with an all-to-all where it `exchanges`.
    Seconds: as of the operator at the constant `memory.<bandwidth>`, of `traffic` bytes (None: those of the operator),
    on `widened` operands, and `more_traffic` at the default rate. Memory: what it `holds` while it runs, and `keeps`.
    """

    localise: LocaliseVariant
    collectives: Collectives | None = None
    exchanges: bool = False
    bandwidth: str = "default"
    traffic: Traffic | None = None
    widened: Callable[[LocalOp, WholeShapes], LocalOp] | None = None
    more_traffic: Traffic | None = None
    holds: Holds | None = None
    keeps: Keeps | None = None


def passes(forward: int, backward: int) -> Traffic:
    """Passes of the runtime's own kernels over the first operand, in float32 at least, and its casts."""

    def traffic(op: LocalOp) -> tuple[float, float]:
        x = op.operand(0)
        wide = max(x.bytes, 4 * x.numel)
        cast = 0 if wide == x.bytes else 2 * (x.bytes + wide)
        return forward * wide + cast, backward * wide + cast

    return traffic


def shards(layout: Layout | None) -> Iterator[tuple[int, int]]:
    """(axis, dim) of everything that is cut, in mesh order."""
    if layout is not None:
        yield from ((axis, p.dim) for axis, p in enumerate(layout.placements) if isinstance(p, Shard))


def first(operands: LocalTensors) -> LocalTensor:
    """The first operand, which must be there."""
    assert operands[0] is not None
    return operands[0]


def bytes_of(*tensors: LocalTensor | None) -> float:
    return float(sum(x.bytes for x in tensors if x is not None))


def wide_bytes(x: LocalTensor) -> float:
    """Bytes of `x` in float32 at least."""
    return float(x.numel * max(ACCUMULATED, DTYPE_BYTES[x.dtype]))


def temporaries(formulas: Formulas, forward: float = 0.0) -> Holds:
    """Tensors that formulas of backward (torch's derivatives.yaml) make on the way to the gradient of each operand, in
    the order in which torch makes these (by name). Each is as large as the result, or as the operand where that is
    larger. The gradient of an operand that was broadcast has that size, too: all are summed after the last formula.
    An operand without a formula is handed the result's gradient. `forward`: as many tensors there."""

    def rule(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
        gradients = {i: float(x.bytes) for i, x in enumerate(operands) if x is not None and x.requires_grad}
        size = max((bytes_of(results[0]), *gradients.values()))
        with_formula = [i for i in formulas if i in gradients]
        peaks = [(before + 1 + formulas[i]) * size for before, i in enumerate(with_formula)]
        peaks += [len(with_formula) * size + gradients[i] for i in with_formula if gradients[i] < size]
        counted = sum({op.operands[i]: size for i, size in gradients.items()}.values())  # of x * x one, the sum of both
        return Temporary(forward * size, max((0.0, *(peak - counted for peak in peaks))))

    return rule
