"""Bytes of weights, gradients and optimizer states on a device, and of those that ZeRO gathers and scatters."""

from __future__ import annotations

from autoshard.estimate.gradient_sync import ParameterCounts, held
from autoshard.estimate.transformer import FP8_FSDP, FSDP, MEGATRON, SHARDED, TrainingRun, Transformer
from autoshard.estimate.transformer_graph import EMBEDDING, HEAD, layer
from autoshard.estimate.transformer_program import LAYERS, BuiltTransformer
from autoshard.ir.graph import DTYPE_BYTES
from autoshard.step_corrections.software import held_bytes

# (weights, gradient, optimizer) bytes per parameter; half-precision weights have float32 gradients, masters, moments.
# In float8 the weight is there for both products, as TransformerEngine keeps it: a byte, and one for its transpose.
STATE_BYTES = {
    "fp32": (4, 4, 8), "bf16-mixed": (4, 4, 8), "fp16-mixed": (4, 4, 8), "bf16": (2, 4, 12), "fp16": (2, 4, 12),
    "fp8": (2, 4, 12), "fp8-mixed": (4, 4, 8), FSDP: (4, 4, 8), FP8_FSDP: (4, 4, 8),
}  # fmt: skip
SGD_STATE_BYTES = {
    "fp32": (4, 4, 0), "bf16-mixed": (4, 4, 0), "fp16-mixed": (4, 4, 0), "bf16": (2, 4, 4), "fp16": (2, 4, 4),
    "fp8": (2, 4, 4), "fp8-mixed": (4, 4, 0), FSDP: (4, 4, 0), FP8_FSDP: (4, 4, 0),
}  # fmt: skip
FLOAT32_BYTES = DTYPE_BYTES["float32"]  # main gradients, and what adds up gradients over micro-batches


def held_weight_bytes(run: TrainingRun) -> int:
    """Bytes of one parameter as a device holds it."""
    return STATE_BYTES[run.precision][0]


def _gradient_bytes(run: TrainingRun) -> float:
    """Bytes of one parameter's gradient as a device holds it. Megatron's buffers have the dtype in which gradients are
    summed (`grad_dtype` of megatron.core.distributed.distributed_data_parallel: float32 with grad_reduce_in_fp32, else
    that of the weights), if that is given."""
    size_bytes = held_bytes(run.software, run.precision).gradient
    if size_bytes is None and run.precision in MEGATRON and run.reduced:
        return run.gradient_bytes
    return STATE_BYTES[run.precision][1] if size_bytes is None else size_bytes


def widened_gradients(run: TrainingRun, parameters: ParameterCounts) -> float:
    """Bytes of the float32 copies that the optimizer makes of half-precision gradients, for its own share
    (`_copy_model_grads_to_main_grads` of megatron.core.optimizer.distrib_optimizer)."""
    copies = run.precision in MEGATRON and _gradient_bytes(run) < FLOAT32_BYTES and not run.offload
    return parameters.sharded(run, run.zero >= 1) * FLOAT32_BYTES * copies


def head_gradients(built: BuiltTransformer, model: Transformer, run: TrainingRun) -> float:
    """Bytes of gradients when the layers' backward begins: the head's, and the whole one of the layer in progress."""
    head = held(built, HEAD)
    count = head + held(built, EMBEDDING) if model.tied else head
    return count.sharded(run, run.zero >= 2) * _gradient_bytes(run) + scattering(built, run, 1)


def scattering(built: BuiltTransformer, run: TrainingRun, layers: int) -> float:
    """Bytes of layers' whole gradients that are being scattered; FSDP casts those it reduces."""
    fsdp = run.precision in SHARDED
    per_param = _gradient_bytes(run) + run.weight_bytes * fsdp
    return held(built, layer(LAYERS - 1)).all * layers * per_param * (run.zero >= 2) * (run.replicas > 1)


def gathered_weights(built: BuiltTransformer, run: TrainingRun) -> float:
    """Bytes of a layer that is gathered for use; 0 if none is."""
    gathers = run.replicas > 1 and (run.zero == 3 or run.precision in SHARDED)
    return float(held(built, layer(LAYERS - 1)).all * run.weight_bytes * gathers)


def gathered_outside(built: BuiltTransformer, run: TrainingRun, parameters: ParameterCounts, layers: int) -> float:
    """Gathered bytes of parameters outside layers, which FSDP's outermost module gathers."""
    outside = max(0, parameters.all - held(built, layer(LAYERS - 1)).all * layers)
    return float(outside * run.weight_bytes * (run.precision in SHARDED) * (run.replicas > 1))


def layer_gradients(built: BuiltTransformer, run: TrainingRun) -> float:
    """Bytes of a layer's gradients, once they are reduced."""
    return held(built, layer(LAYERS - 1)).sharded(run, run.zero >= 2) * _gradient_bytes(run)


def resident(built: BuiltTransformer, run: TrainingRun, parameters: ParameterCounts) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer that are resident all the time. FSDP keeps its float32 weights in
    shards."""
    sizes = (STATE_BYTES if run.optimizer == "adamw" else SGD_STATE_BYTES)[run.precision]
    software = held_bytes(run.software, run.precision)
    least = 2 if run.precision in SHARDED else 3
    buffers = held(built, layer(LAYERS - 1)).all * run.weight_bytes * software.weight_gradient_buffers
    return (
        parameters.sharded(run, run.zero >= least) * sizes[0],
        parameters.sharded(run, run.zero >= 2) * _gradient_bytes(run)
        + buffers
        + software.bucket * (run.zero > 0) * (run.replicas > 1),
        parameters.sharded(run, run.zero >= 1) * sizes[2],
    )


def states(built: BuiltTransformer, run: TrainingRun, parameters: ParameterCounts, layers: int) -> tuple[float, ...]:
    """`resident` bytes, plus those gathered or scattered at the moment.

    ZeRO 3 holds the layer in use whole, 2 and 3 the gradient being scattered; with overlap the next one too. If FSDP
    gathers once for both directions (ZeRO 2), gathered layers stay for backward; parameters outside layers always do.
    """
    weights, gradients, optimizer = resident(built, run, parameters)
    ahead = min(1 + run.overlap, layers)
    weights += gathered_weights(built, run) * (ahead if run.zero == 3 else layers)
    weights += gathered_outside(built, run, parameters, layers)
    return weights, gradients + scattering(built, run, ahead), optimizer
