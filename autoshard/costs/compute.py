"""Seconds of one operator on one device, forward and backward, from its local shapes.

Matrix products of m x k by k x n, and attention over heads of size d (docs/validation.md has the errors):

    t = launch + depth * (1 - exp(-k / split)) + soft(2 m n (k + fill) / (peak * compute), B / (bandwidth * memory))
        (times 1 / misaligned what is computed, where rows in half precision start at no multiples of 16 bytes)
    t = launch + chain * s * d / 128 + soft(F * (1 + head / d) / (peak * compute), B / (bandwidth * memory))

implemented in `compute.one_product_seconds` and `compute.one_attention_seconds`, the FLOP in `compute.product_flops`
and `compute.attention_flops`, with soft(a, b) = (a^q + b^q)^(1/q) (`formulas.roofline`), a soft maximum of arithmetic
and memory time: a kernel does both at once, never perfectly. `depth` is the loop over the summed dim, which is serial
until a library splits it; `fill` starts and ends that loop; `chain` is the row of key blocks that one block of queries
walks. Of a product that casts its factors to float8 (rules/algebra/float8_products.py) peak and bytes are those of
float8, and each pass of its casts is one over memory; no kernel in it was fitted to. All else: launch + bytes /
(bandwidth * efficiency), faster for what fits a cache (fitted on CPUs; implemented in `compute._memory_seconds`, the
bytes in `compute.traffic` or the operator's record). A term for operands of products that fit the L2 cache was tried:
on four GPUs it gained 0.1 %. Not modelled yet: tile quantisation, the additions that accumulate gradients of a value
with several consumers (but for those of residuals, charged to the addition that ends them). The host's dispatch is
`host.dispatch` seconds an operator, for whoever keeps a clock of the host: one for a linear in float8, too, whose casts
are kernels of their own.
"""

from __future__ import annotations

import math
from functools import lru_cache

from autoshard.cluster.hardware import Hardware
from autoshard.costs.formulas import pass_seconds, product_overhead, roofline
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.rules.algebra.float8_products import UNIT, casts, is_cast, joined_casts
from autoshard.rules.algebra.operator_record import Operator, Product, Work
from autoshard.rules.algebra.variant_record import OperatorVariant
from autoshard.rules.operators import VARIANTS, record

ATTENTION_BACKWARD_FLOPS = 2.5  # five products against two: the scores are computed again


@lru_cache(maxsize=65536)
def local_op_seconds(hardware: Hardware, op: LocalOp) -> tuple[float, float]:
    """Forward and backward seconds; no backward where no operand needs a gradient."""
    work = record(op.target).work
    if is_view(op):
        forward, backward = 0.0, _view_backward_seconds(hardware, op)
    elif isinstance(work, Product):
        forward, backward = _product_seconds(hardware, op, work)
    elif work is Work.ATTENTION:
        forward, backward = _attention_seconds(hardware, op)
    else:
        kernel = VARIANTS.get(op.variant) or record(op.target)
        forward, backward = (_memory_seconds(hardware, kernel, size) for size in traffic(op))
    return forward, backward if any(t is not None and t.requires_grad for t in op.operands) else 0.0


def is_view(op: LocalOp) -> bool:
    """True where the operator only makes a new description of the same storage."""
    aliased = {result for result, _ in op.saved.aliases}
    return record(op.target).work is Work.VIEW or (bool(op.results) and aliased >= set(range(len(op.results))))


def product_flops(op: LocalOp, product: Product) -> float:
    """FLOP of the forward: 2 per multiplication and addition."""
    return 2.0 * op.results[0].numel * summed_length(op, product)


def summed_length(op: LocalOp, product: Product) -> int:
    """Length of the loop that a product sums over."""
    position, first = product.summed
    return math.prod(op.operand(position).shape[first:])


def attention_flops(op: LocalOp) -> float:
    """FLOP of scores and weighted sum, half under a causal mask: q (..., s, d), k (..., t, d), v (..., t, e)."""
    query, key, value = (op.operand(position).shape for position in range(3))
    flops = 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return flops / 2 if op.causal else flops


def _product_seconds(hardware: Hardware, op: LocalOp, product: Product) -> tuple[float, float]:
    """Seconds; backward: an equal product for each multiplied operand that needs a gradient, a sum for the added."""
    multiplied = [op.operand(position) for position in product.multiplied]
    flops, inner, dtype = product_flops(op, product), float(summed_length(op, product)), multiplied[0].dtype
    share = hardware.constant("matmul.misaligned") if is_misaligned(op, product) else 1.0
    cast = is_cast(op, product)
    if cast:
        dtype = product.cast_to

    def size_of(output: LocalTensor) -> float:
        """Bytes of a product that makes `output` of the other two."""
        tensors = (*multiplied, op.results[0])
        return float(sum(x.numel if cast and x is not output else x.bytes for x in tensors))

    forward = one_product_seconds(hardware, dtype, flops, inner, size_of(op.results[0]), share)
    there, back = cast_passes(op)
    forward += _passes_seconds(hardware, op, there)
    backward = _passes_seconds(hardware, op, back)
    for tensor, part in zip(multiplied, ("dgrad", "wgrad"), strict=True):
        if tensor.requires_grad:
            inner = flops / (2 * tensor.numel) if tensor.numel else 0.0
            relative = share * hardware.constant(f"matmul.{part}")
            backward += one_product_seconds(hardware, dtype, flops, inner, size_of(tensor), relative)
    added = op.operands[product.added] if product.added is not None and product.added < len(op.operands) else None
    if added is not None and added.requires_grad:
        backward += _memory_seconds(hardware, record(op.target), op.results[0].bytes + added.bytes)
    return forward, backward


def cast_passes(op: LocalOp, joined: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes of each pass that casts factors to float8, forward and backward; `joined`: as a compiler runs them."""
    product = record(op.target).work
    if not isinstance(product, Product) or not is_cast(op, product):
        return (), ()
    sizes = joined_casts(op, product) if joined else casts(op, product)
    first, second = (op.operand(position).requires_grad for position in product.multiplied)
    return sizes.forward, (*sizes.gradient, *(sizes.of_input if first else ()), *(sizes.of_weight if second else ()))


def cast_seconds(hardware: Hardware, op: LocalOp) -> tuple[float, float]:
    """Seconds of the casts of `cast_passes`, forward and backward, in eager torch."""
    there, back = cast_passes(op)
    return _passes_seconds(hardware, op, there), _passes_seconds(hardware, op, back)


def _passes_seconds(hardware: Hardware, op: LocalOp, passes: tuple[float, ...]) -> float:
    """Seconds of kernels that each move so many bytes over memory."""
    kernel = record(op.target)
    return sum((_memory_seconds(hardware, kernel, size) or hardware.launch_seconds for size in passes), 0.0)


def gradient_cast_seconds(hardware: Hardware, op: LocalOp) -> float:
    """Seconds in which a linear's backward casts its result's gradient, before either product."""
    product = record(op.target).work
    if not isinstance(product, Product) or not is_cast(op, product):
        return 0.0
    return _passes_seconds(hardware, op, casts(op, product).gradient)


def is_misaligned(op: LocalOp, product: Product) -> bool:
    """True if rows of the matrices, in half precision, do not start at multiples of 16 bytes (a vocabulary of 50,257).

    Then neither direction can use the libraries' fast kernels: each has such rows. Convolutions have none.
    """
    position, first = product.summed
    matrices = [*(op.operand(index) for index in product.multiplied), op.results[0]]
    if first != -1 or op.operand(position).item_bytes > 2:
        return False
    return any(tensor.shape and tensor.shape[-1] * tensor.item_bytes % UNIT for tensor in matrices)


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
    """Seconds of one fused kernel each way: the scores never reach memory."""
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
    """Seconds: 0 where nothing changes but the shape; else (slice, expand, split) the whole gradient is written."""
    source = next((tensor for tensor in op.operands if tensor is not None), None)
    if source is None or (len(op.results) == 1 and op.results[0].numel == source.numel):
        return 0.0
    return _memory_seconds(hardware, record(op.target), source.bytes + sum(result.bytes for result in op.results))


def _memory_seconds(hardware: Hardware, kernel: Operator | OperatorVariant, size_bytes: float) -> float:
    if size_bytes == 0:
        return 0.0
    bandwidth = hardware.memory_bandwidth * hardware.share(f"memory.{kernel.bandwidth}")
    gain, cache_bytes = hardware.constant("memory.cache"), hardware.constant("memory.cache_size")
    return hardware.launch_seconds + pass_seconds(float(size_bytes), bandwidth, gain, cache_bytes)


def traffic(op: LocalOp) -> tuple[float, float]:
    """Bytes read and written: forward operands and results, backward what is saved and the gradients."""
    variant = VARIANTS.get(op.variant)
    special = (variant and variant.traffic) or record(op.target).traffic
    if special is not None:
        return special(op)
    operands = [tensor for tensor in op.operands if tensor is not None]
    forward = sum(tensor.bytes for tensor in (*operands, *op.results)) + op.extra_bytes
    saved = sum(op.operand(position).bytes for position in op.saved.operands)
    saved += sum(op.results[position].bytes for position in op.saved.results)
    gradients = sum(tensor.bytes for tensor in (*operands, *op.results) if tensor.requires_grad)
    return forward, saved + op.extra_bytes + gradients
