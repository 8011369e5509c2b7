"""Work after the last backward of a stage: gradients summed over replicas and tied stages, weights updated."""

from __future__ import annotations

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.costs.device_bytes import optimizer_bandwidth
from autoshard.costs.host_memory import link_seconds, memory_seconds
from autoshard.estimate.gradient_sync import ParameterCounts, held
from autoshard.estimate.stage_layers import layers_of
from autoshard.estimate.stage_slots import Part
from autoshard.estimate.state_bytes import FLOAT32_BYTES, held_weight_bytes
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_graph import EMBEDDING, layer
from autoshard.estimate.transformer_program import LAYERS, BuiltTransformer
from autoshard.ir.mesh import Mesh

# Bytes that pass memory per parameter in the optimizer: AdamW reads p g m v and writes p m v in float32, clipping reads
# g; half-precision weights add unscaled gradients (read 2, write 4) and the copy back (write 2); a scaled loss, its
# gradients unscaled (read 4, write 4).
TRAFFIC_BYTES = {
    ("fp32", "adamw"): 32, ("bf16-mixed", "adamw"): 32, ("bf16", "adamw"): 40, ("fp16", "adamw"): 40,
    ("fp16-mixed", "adamw"): 40, ("fp16-mixed", "sgd"): 24,
    ("fp8", "adamw"): 40, ("fp8", "sgd"): 24, ("fp8-mixed", "adamw"): 32, ("fp8-mixed", "sgd"): 16,
    ("bf16-fsdp", "adamw"): 32, ("bf16-fsdp", "sgd"): 16, ("fp8-fsdp", "adamw"): 32, ("fp8-fsdp", "sgd"): 16,
    ("fp32", "sgd"): 16, ("bf16-mixed", "sgd"): 16, ("bf16", "sgd"): 24, ("fp16", "sgd"): 24,
}  # fmt: skip


def tail(
    built: BuiltTransformer,
    model: Transformer,
    run: TrainingRun,
    hardware: Hardware,
    stage: int,
    replica_seconds: float,
) -> tuple[Part, ...]:
    """Gradient synchronisation and optimizer of one device of `stage`; under ZeRO it updates its share.

    `replica_seconds`: what the step waits for its replicas once (`Stages.step_end_seconds`).
    """
    count = stage_parameters(built, model, run, stage)
    share = count.sharded(run, run.zero > 0)
    return (
        ("gradient synchronisation", replica_seconds + _tied_seconds(model, run, hardware, stage)),
        *_update(share, run, hardware),
    )


def _update(count: float, run: TrainingRun, hardware: Hardware) -> tuple[Part, ...]:
    """Seconds of the update of `count` parameters. On the host, in sequence as nothing else runs: gradients down in
    their sum's dtype, the same passes through the host's memory, shared by all devices of a node, new weights up."""
    traffic = count * TRAFFIC_BYTES[run.precision, run.optimizer]
    if not run.offload:
        return (("optimizer", traffic / optimizer_bandwidth(hardware)),)
    return (
        ("optimizer: gradients to the host", link_seconds(hardware, count * FLOAT32_BYTES)),
        ("optimizer: on the host", memory_seconds(hardware, traffic)),
        ("optimizer: weights from the host", link_seconds(hardware, count * held_weight_bytes(run))),
    )


def _tied_seconds(model: Transformer, run: TrainingRun, hardware: Hardware, stage: int) -> float:
    """Seconds to sum a tied embedding's gradients between the first stage and the last."""
    if not model.tied or run.pp == 1 or stage not in (0, run.pp - 1):
        return 0.0
    size = float(table_size(model, run) * run.gradient_bytes)
    return joint_seconds(hardware, whole_mesh(run), (0,), "send_receive", size)  # both ways at once


def whole_mesh(run: TrainingRun) -> Mesh:
    """Mesh of all devices, stages outermost."""
    return Mesh((("pp", run.pp), ("dp", run.dp), ("cp", run.cp), ("tp", run.tp)))


def send_seconds(model: Transformer, run: TrainingRun, hardware: Hardware) -> float:
    """Seconds to send a micro-batch's activations to the next stage: each tensor-parallel device sends a slice."""
    if run.pp == 1:
        return 0.0
    mesh = whole_mesh(run)
    size = float(run.micro_batch * model.sequence // run.cp * model.hidden * run.activation_bytes)
    gathered = 0.0 if run.sequence_parallel else joint_seconds(hardware, mesh, (mesh.index("tp"),), "all_gather", size)
    return joint_seconds(hardware, mesh, (0,), "send_receive", size / run.tp) + gathered


def stage_parameters(built: BuiltTransformer, model: Transformer, run: TrainingRun, stage: int) -> ParameterCounts:
    """Number of parameters that a device of `stage` holds."""
    total = held(built, layer(LAYERS - 1)).times(sum(layers_of(model, run, stage)))
    if stage == 0:
        total += held(built, EMBEDDING)
    if stage == run.pp - 1:
        total += held(built, "head") + ParameterCounts(table_size(model, run) if model.tied and run.pp > 1 else 0, 0)
    return total


def table_size(model: Transformer, run: TrainingRun) -> int:
    """Parameters of a device's share of the embedding."""
    return model.vocabulary * model.hidden // run.tp
