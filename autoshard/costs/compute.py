"""Seconds of one operator on one device, forward and backward, from its local shapes.

Matrix products of m x k by k x n, and attention over heads of size d (docs/validation.md has the errors):

    t = launch + depth * (1 - exp(-k / split)) + soft(2 m n (k + fill) / (peak * compute), B / (bandwidth * memory))
    t = launch + chain * s * d / 128 + soft(F * (1 + head / d) / (peak * compute), B / (bandwidth * memory))

with soft(a, b) = (a^q + b^q)^(1/q), a soft maximum of arithmetic and memory time: a kernel does both at once, never
perfectly. `depth` is the loop over the summed dim, which is serial until a library splits it; `fill` starts and ends
that loop; `chain` is the row of key blocks that one block of queries walks. All else: launch + bytes / (bandwidth *
efficiency), faster for what fits a cache (fitted on CPUs). A term for operands of products that fit the L2 cache was
tried: on four GPUs it gained 0.1 %.
Not modelled yet: tile quantisation, the additions that accumulate gradients of a value with several consumers (but for
those of residuals, charged to the addition that ends them). The host's dispatch is `host.dispatch` seconds an operator,
for whoever keeps a clock of the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from autoshard.cluster.hardware import Hardware
from autoshard.costs.formulas import pass_seconds, product_overhead, roofline
from autoshard.ir.graph import DTYPE_BYTES, Op, Saved


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as one device holds it: its local shape."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


_NOTHING = Saved()


@dataclass(frozen=True)
class LocalOp:
    """An operator on local tensors: all its seconds depend on. `extra_bytes` is the local part of what it saves."""

    target: str
    operands: tuple[LocalTensor | None, ...]
    results: tuple[LocalTensor, ...]
    saved: Saved = _NOTHING
    extra_bytes: float = 0.0
    causal: bool = False
    variant: str = ""

    def operand(self, position: int) -> LocalTensor:
        """An operand that must be there."""
        tensor = self.operands[position]
        assert tensor is not None, (self.target, position)
        return tensor


def local_op(
    op: Op, operands: tuple[LocalTensor | None, ...], results: tuple[LocalTensor, ...], extra_bytes: float, variant: str
) -> LocalOp:
    """The local operator of a graph operator; `extra_bytes` is what one device saves beside values."""
    causal = dict(op.attributes).get("is_causal") is True
    saved = replace(op.saved, extra_bytes=0)
    return LocalOp(op.target, operands, results, saved, extra_bytes, causal, variant)


@dataclass(frozen=True)
class Product:
    """A matrix product: the operands that are multiplied, the one added (or None), the length of the summed loop."""

    multiplied: tuple[int, int]
    added: int | None
    depth: Callable[[LocalOp], int]


def _last_dim(position: int) -> Callable[[LocalOp], int]:
    return lambda op: op.operand(position).shape[-1]


def _filter_size(op: LocalOp) -> int:
    return math.prod(op.operand(1).shape[1:])


_LINEAR = Product((0, 1), 2, _last_dim(0))
_MATMUL = Product((0, 1), None, _last_dim(0))
_ADDMM = Product((1, 2), 0, _last_dim(1))
_CONVOLUTION = Product((0, 1), 2, _filter_size)
PRODUCTS: dict[str, Product] = {
    "aten.linear": _LINEAR,
    "autoshard.linear_in_out": _LINEAR,
    "aten.matmul": _MATMUL,
    "aten.mm": _MATMUL,
    "aten.bmm": _MATMUL,
    "aten.addmm": _ADDMM,
    "aten.baddbmm": _ADDMM,
    "aten.convolution": _CONVOLUTION,
    "aten.conv1d": _CONVOLUTION,
    "aten.conv2d": _CONVOLUTION,
    "aten.conv3d": _CONVOLUTION,
}
ATTENTION = frozenset({"aten.scaled_dot_product_attention"})
ATTENTION_BACKWARD_FLOPS = 2.5  # five products against two: the scores are computed again

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view", "transpose", "permute", "t", "expand", "split", "split_with_sizes", "chunk", "unbind",
        "unsqueeze", "squeeze", "slice", "select", "narrow", "detach", "alias", "view_as", "expand_as",
        "unflatten", "movedim", "numpy_T",
    )
)  # fmt: skip
_EFFICIENCY = {
    "aten.layer_norm": "memory.normalisation",
    "aten.native_layer_norm": "memory.normalisation",
    "aten.rms_norm": "memory.normalisation",
    "aten._weight_norm": "memory.normalisation",
    "aten.group_norm": "memory.normalisation",
    "aten.batch_norm": "memory.normalisation",
    "aten.softmax": "memory.softmax",
    "aten.log_softmax": "memory.softmax",
    "aten.dropout": "memory.softmax",  # its source measured both together
    "aten.cross_entropy_loss": "memory.loss",
    "parallel_cross_entropy": "memory.parallel_loss",
    "aten.gelu": "memory.activation",
    "aten.silu": "memory.activation",
    "aten.tanh": "memory.activation",
    "aten.sigmoid": "memory.activation",
    "aten.add": "memory.elementwise",
    "aten.sub": "memory.elementwise",
    "aten.mul": "memory.elementwise",
    "aten.relu": "memory.elementwise",
    "aten.embedding": "memory.gather",
    "vocabulary_parallel_embedding": "memory.gather",
    "autoshard.embedding_bags": "memory.gather",
    "parallel_embedding_bag": "memory.gather",
    "aten.index_select": "memory.gather",
    "aten.gather": "memory.gather",
    "aten.index": "memory.gather",
    "aten.to": "memory.elementwise",
    "aten._to_copy": "memory.elementwise",
}

_ELSE = {"memory.loss": "memory.normalisation", "memory.parallel_loss": "memory.default"}  # where a constant is 0


def _embedding_traffic(op: LocalOp) -> tuple[float, float]:
    """Forward touches the gathered rows only; backward zeroes a whole gradient table and adds rows to it."""
    table, rows = op.operand(0).bytes, op.results[0].bytes
    return 2 * rows + op.operand(1).bytes, table + 3 * rows


def _bags_traffic(op: LocalOp) -> tuple[float, float]:
    """Forward reads the row of each id; backward zeroes a whole gradient table and adds a row to it for each id."""
    table, ids, bags = op.operand(0), op.operand(1), op.results[0]
    rows = float(table.bytes / max(table.shape[0], 1) * ids.numel)
    return rows + bags.bytes + ids.bytes, table.bytes + 2 * rows + bags.bytes


def _parallel_bags_traffic(op: LocalOp) -> tuple[float, float]:
    """As the bags, with a weight for each id that says whether its row is here, made in four passes."""
    forward, backward = _bags_traffic(op)
    return forward + 4 * op.operand(1).bytes, backward


def _cross_entropy_traffic(op: LocalOp) -> tuple[float, float]:
    """Log-softmax reads and writes the logits; backward fills a gradient, then reads it and the log-probabilities."""
    return 2 * op.operand(0).bytes, 4 * op.operand(0).bytes


def _parallel_cross_entropy_traffic(op: LocalOp) -> tuple[float, float]:
    """The runtime's own kernels in float32: maximum, difference, exponential, sum, quotient; backward two passes."""
    logits = op.operand(0)
    cast = 0 if logits.dtype in ("float32", "float64") else logits.bytes + 4 * logits.numel
    wide = max(logits.bytes, 4 * logits.numel)
    return 8 * wide + cast, 4 * wide + cast


def _parallel_embedding_traffic(op: LocalOp) -> tuple[float, float]:
    """As the embedding, with rows of other devices masked out."""
    forward, backward = _embedding_traffic(op)
    return forward + 2 * op.results[0].bytes, backward + 2 * op.results[0].bytes


def _sum_traffic(op: LocalOp) -> tuple[float, float]:
    """Backward hands the gradient on, and sums it for an operand that was broadcast. Where two whole branches join,
    their gradients are added once more where they parted (a residual): that addition is charged here."""
    result = op.results[0]
    operands = [tensor for tensor in op.operands if tensor is not None]
    differentiable = [tensor for tensor in operands if tensor.requires_grad]
    sums = sum(result.bytes + tensor.bytes for tensor in differentiable if tensor.numel < result.numel)
    branches = sum(tensor.numel == result.numel for tensor in differentiable)
    return sum(tensor.bytes for tensor in (*operands, result)), sums + (3 * result.bytes if branches > 1 else 0)


def _passes(forward: int, backward: int) -> Callable[[LocalOp], tuple[float, float]]:
    """Passes of the runtime's own kernels over the first operand, in float32 at least, and its casts."""

    def traffic(op: LocalOp) -> tuple[float, float]:
        x = op.operand(0)
        wide = max(x.bytes, 4 * x.numel)
        cast = 0 if wide == x.bytes else 2 * (x.bytes + wide)
        return forward * wide + cast, backward * wide + cast

    return traffic


_VARIANT_TRAFFIC: dict[str, Callable[[LocalOp], tuple[float, float]]] = {
    "parallel_cross_entropy": _parallel_cross_entropy_traffic,
    "vocabulary_parallel_embedding": _parallel_embedding_traffic,
    "parallel_embedding_bag": _parallel_bags_traffic,
    **dict.fromkeys(("parallel_group_norm", "parallel_layer_norm", "synchronised_batch_norm"), _passes(7, 21)),
    "parallel_rms_norm": _passes(7, 17),
    **dict.fromkeys(("parallel_softmax", "parallel_log_softmax"), _passes(8, 9)),
}
_TRAFFIC: dict[str, Callable[[LocalOp], tuple[float, float]]] = {
    "aten.add": _sum_traffic,
    "aten.sub": _sum_traffic,
    "aten.embedding": _embedding_traffic,
    "autoshard.embedding_bags": _bags_traffic,
    "aten.cross_entropy_loss": _cross_entropy_traffic,
}


@lru_cache(maxsize=65536)
def local_op_seconds(hardware: Hardware, op: LocalOp) -> tuple[float, float]:
    """Forward and backward seconds; no backward where no operand needs a gradient."""
    if is_view(op):
        forward, backward = 0.0, _view_backward_seconds(hardware, op)
    elif op.target in PRODUCTS:
        forward, backward = _product_seconds(hardware, op, PRODUCTS[op.target])
    elif op.target in ATTENTION:
        forward, backward = _attention_seconds(hardware, op)
    else:
        kernel = op.variant or op.target
        forward, backward = (_memory_seconds(hardware, kernel, size) for size in _traffic(op))
    return forward, backward if any(t is not None and t.requires_grad for t in op.operands) else 0.0


def is_view(op: LocalOp) -> bool:
    """True where the operator only makes a new description of the same storage."""
    aliased = {result for result, _ in op.saved.aliases}
    return op.target in VIEWS or (bool(op.results) and aliased >= set(range(len(op.results))))


def product_flops(op: LocalOp, product: Product) -> float:
    """2 per multiplication and addition, of the forward."""
    return 2.0 * op.results[0].numel * product.depth(op)


def attention_flops(op: LocalOp) -> float:
    """q (..., s, d), k (..., t, d), v (..., t, e): scores and weighted sum; half of them under a causal mask."""
    query, key, value = (op.operand(position).shape for position in range(3))
    flops = 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return flops / 2 if op.causal else flops


def _product_seconds(hardware: Hardware, op: LocalOp, product: Product) -> tuple[float, float]:
    """Backward: a product of the same size for each multiplied operand that needs a gradient, a sum for the added."""
    multiplied = [op.operand(position) for position in product.multiplied]
    size = float(sum(tensor.bytes for tensor in (*multiplied, op.results[0])))
    flops, inner, dtype = product_flops(op, product), float(product.depth(op)), multiplied[0].dtype
    forward = one_product_seconds(hardware, dtype, flops, inner, size)
    backward = 0.0
    for tensor, part in zip(multiplied, ("dgrad", "wgrad"), strict=True):
        if tensor.requires_grad:
            inner = flops / (2 * tensor.numel) if tensor.numel else 0.0
            backward += one_product_seconds(hardware, dtype, flops, inner, size, hardware.constant(f"matmul.{part}"))
    added = op.operands[product.added] if product.added is not None and product.added < len(op.operands) else None
    if added is not None and added.requires_grad:
        backward += _memory_seconds(hardware, op.target, op.results[0].bytes + added.bytes)
    return forward, backward


def one_product_seconds(
    hardware: Hardware, dtype: str, flops: float, inner: float, size_bytes: float, relative: float = 1.0
) -> float:
    """A product whose summed dim is `inner` long, at `relative` of the arithmetic rate of a forward."""
    launch, compute, memory, exponent, fill, depth, split = (
        hardware.constant(f"matmul.{key}")
        for key in ("launch", "compute", "memory", "exponent", "fill", "depth", "split")
    )
    rate = hardware.peak_flops(dtype) * compute * relative
    filled = flops * (1 + fill / inner) if inner else flops
    return (
        launch
        + product_overhead(inner, depth, split)
        + roofline(filled, size_bytes, rate, hardware.memory_bandwidth * memory, exponent)
    )


def _attention_seconds(hardware: Hardware, op: LocalOp) -> tuple[float, float]:
    """One fused kernel each way: the scores never reach memory."""
    flops = attention_flops(op)
    size = float(sum(tensor.bytes for tensor in (*op.operands[:3], op.results[0]) if tensor is not None))
    keys, head = op.operand(1).shape[-2:]
    back = ATTENTION_BACKWARD_FLOPS
    relative = hardware.constant("attention.backward")
    dtype = op.operand(0).dtype
    forward = one_attention_seconds(hardware, dtype, flops, keys, head, size)
    return forward, one_attention_seconds(hardware, dtype, back * flops / relative, back * keys, head, 2 * size)


def one_attention_seconds(
    hardware: Hardware, dtype: str, flops: float, keys: float, head: float, size_bytes: float
) -> float:
    """A fused attention over `keys` of size `head`."""
    launch, compute, memory, exponent, narrow, chain = (
        hardware.constant(f"attention.{key}") for key in ("launch", "compute", "memory", "exponent", "head", "chain")
    )
    rate = hardware.peak_flops(dtype) * compute
    return (
        launch
        + chain * keys * head / 128
        + roofline(flops * (1 + narrow / head), size_bytes, rate, hardware.memory_bandwidth * memory, exponent)
    )


def _view_backward_seconds(hardware: Hardware, op: LocalOp) -> float:
    """Free where nothing changes but the shape; else (slice, expand, split) the whole gradient is written."""
    source = next((tensor for tensor in op.operands if tensor is not None), None)
    if source is None or (len(op.results) == 1 and op.results[0].numel == source.numel):
        return 0.0
    return _memory_seconds(hardware, op.target, source.bytes + sum(result.bytes for result in op.results))


def _memory_seconds(hardware: Hardware, target: str, size_bytes: float) -> float:
    if size_bytes == 0:
        return 0.0
    key = _EFFICIENCY.get(target, "memory.default")
    share = hardware.constant(key) or hardware.constant(_ELSE[key])
    bandwidth = hardware.memory_bandwidth * share
    gain, cache_bytes = hardware.constant("memory.cache"), hardware.constant("memory.cache_size")
    return hardware.launch_seconds + pass_seconds(float(size_bytes), bandwidth, gain, cache_bytes)


def _traffic(op: LocalOp) -> tuple[float, float]:
    """Bytes read and written: forward operands and results, backward what is saved and the gradients."""
    special = _VARIANT_TRAFFIC.get(op.variant) or _TRAFFIC.get(op.target)
    if special:
        return special(op)
    operands = [tensor for tensor in op.operands if tensor is not None]
    forward = sum(tensor.bytes for tensor in (*operands, *op.results)) + op.extra_bytes
    saved = sum(op.operand(position).bytes for position in op.saved.operands)
    saved += sum(op.results[position].bytes for position in op.saved.results)
    gradients = sum(tensor.bytes for tensor in (*operands, *op.results) if tensor.requires_grad)
    return forward, saved + op.extra_bytes + gradients
