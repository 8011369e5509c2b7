"""A whole training step: pieces on pipeline stages, gradient synchronisation, optimizer; and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cluster.hardware import Hardware, check_mesh
from autoshard.costs.bands import Band
from autoshard.costs.host_memory import host_of as host_of_node
from autoshard.errors import UsageError
from autoshard.estimate.gradient_sync import syncs
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.optimizer_step import send_seconds, stage_parameters, tail
from autoshard.estimate.stage_memory import StageMemory, fullest_of, stage_memory
from autoshard.estimate.stage_slots import Host, Part, Stages
from autoshard.estimate.transformer import PRECISIONS, SHARDED, TrainingRun, Transformer, check
from autoshard.estimate.transformer_program import build
from autoshard.ir.mesh import Mesh
from autoshard.program.schedules.pipeline_schedule import SCHEDULES, Placed, Slot, ends, run_pipeline
from autoshard.step_corrections.software import KERNELS, PACKAGES, host_figures, priced_as, with_software
from autoshard.step_corrections.step_bands import StepKind, step_kind, whole_step_band


@dataclass(frozen=True)
class Estimate:
    """One step. `parts` are seconds by name and add up to it, on the stage that ends last.

    `memory` is that of the fullest device. `flops` are the model's, forward and backward, of all devices, without
    recomputation. `band`: error band of the step. `recomputed`: number of layers by what they recompute, if not all do
    what the run says.
    """

    model: Transformer
    run: TrainingRun
    step_seconds: float
    parts: tuple[Part, ...]
    placed: tuple[Placed, ...]
    memory: StageMemory
    parameters: int
    flops: float
    band: Band
    recomputed: tuple[tuple[str, int], ...] = ()

    @property
    def flops_per_device(self) -> float:
        """FLOP/s that one device reaches."""
        return self.flops / self.step_seconds / self.run.devices

    @property
    def tokens_per_second(self) -> float:
        return self.run.batch * self.model.sequence / self.step_seconds


def estimate(model: Transformer, run: TrainingRun, hardware: Hardware, host: Host | None = None) -> Estimate:
    """The predicted step. Raises UsageError if the numbers are inconsistent or the cluster is too small.

    `host`: by default from the hardware's constants.
    """
    check(model, run)
    check_dtype(run, hardware)
    check_mesh(hardware, Mesh((("devices", run.devices),)))
    assert run.software != PACKAGES, "by packages/package_estimate.py"
    if run.offload:
        host_of_node(hardware)
    built = build(model, run, hardware)
    hardware = with_software(hardware, run.software, model.fused_attention, model.fused_loss)
    beside = hardware.constant("overlap.slowdown")
    exchanged, costs = syncs(built, run, hardware), pieces(built, hardware, run.compiled)
    stages = Stages(model, run, costs, exchanged, host or host_of(hardware, run.software), beside)
    orders = [SCHEDULES[run.schedule](s, run.pp, run.micro_batches, run.interleave) for s in range(run.pp)]
    send = send_seconds(model, run, hardware)
    kinds = [(s, slot) for s, order in enumerate(orders) for slot in _kinds(order)]
    seconds = {(s, slot.kind, slot.chunk): stages.seconds(s, slot) + send * hands_on(s, slot, run) for s, slot in kinds}
    placed = run_pipeline(orders, lambda s, slot: seconds[s, slot.kind, slot.chunk], _at_once)
    tails = [tail(built, model, run, hardware, s, stages.step_end_seconds(s)) for s in range(run.pp)]
    finished = [end + sum(s for _, s in after) for end, after in zip(ends(placed, run.pp), tails, strict=True)]
    last = max(range(run.pp), key=finished.__getitem__)
    busy = sum(p.duration_seconds for p in placed if p.stage == last)
    handed = ("sends to other stages", send * sum(hands_on(last, slot, run) for slot in orders[last]))
    bubble = ("pipeline bubble", ends(placed, run.pp)[last] - busy)
    parts = (*stages.parts(last, orders[last]), handed, bubble, *tails[last])
    counts = [stage_parameters(built, model, run, stage) for stage in range(run.pp)]
    memory = fullest_of([stage_memory(built, model, run, counts[s], s) for s in range(run.pp)])
    kind = step_kind(hardware, style_of(model, run), priced_as(run.software), run.devices, host is not None)
    band = _band(stages.families(last, orders[last]), (handed, *tails[last]), run, hardware, kind)
    return Estimate(
        model=model,
        run=run,
        step_seconds=finished[last],
        parts=parts,
        placed=tuple(placed),
        memory=memory,
        parameters=parameter_count(model),
        flops=model_flops(model, run),
        band=band,
    )


def _kinds(order: Sequence[Slot]) -> set[Slot]:
    """One slot for each direction and chunk: all micro-batches take equally long."""
    return {slot._replace(micro_batch=0) for slot in order}


def check_dtype(run: TrainingRun, hardware: Hardware) -> None:
    """Raises UsageError if the device does not compute in the run's precision."""
    known, dtype = dict(hardware.peaks), PRECISIONS[run.precision]
    if dtype not in known:
        fitting = " or ".join(f"--precision {name}" for name, other in PRECISIONS.items() if other in known)
        raise UsageError(f"--precision {run.precision}: {hardware.name} has no {dtype}", fitting)


def style_of(model: Transformer, run: TrainingRun) -> str:
    """Style of a run: fsdp if weights are kept in shards, else megatron; compiled steps, and those with experts or an
    optimizer on the host (of which nobody measured any), are separate styles."""
    if model.experts or run.offload:
        return "experts" if model.experts else "offload"
    style = "fsdp" if run.zero == 3 or run.precision in SHARDED else "megatron"
    return f"compiled {style}" if run.compiled else style


def _band(
    families: dict[str, float], others: Sequence[Part], run: TrainingRun, hardware: Hardware, kind: StepKind
) -> Band:
    """Error band of a stage's slots and what surrounds them. A bubble is other stages' work: as certain as this
    stage's."""
    for name, seconds in others:
        family = "memory" if name.startswith("optimizer") else "collective"
        families[family] = families.get(family, 0.0) + seconds
    return whole_step_band(hardware, families, PRECISIONS[run.precision], kind)


def hands_on(stage: int, slot: Slot, run: TrainingRun) -> bool:
    """Does another stage wait for the slot's output? Its own is busy until that is sent, as in Megatron-LM."""
    part = slot.chunk * run.pp + stage
    return run.pp > 1 and part != (run.pp * run.interleave - 1 if slot.kind == "F" else 0)


def _at_once(giver: int, taker: int) -> float:
    """Zero seconds: a send is part of the slot that makes it."""
    return 0.0


def host_of(hardware: Hardware, software: str = KERNELS) -> Host:
    """The host by the hardware's constants, or by known figures of the software."""
    figures = host_figures(hardware, software)
    dispatch, stall = (figures.get(key, hardware.constant(f"host.{key}")) for key in ("dispatch", "stall"))
    return Host(dispatch, hardware.constant("host.exponent"), stall)


def _layer_weights(model: Transformer, experts: int) -> int:
    """Parameters in the matrices of a layer, with that many of its experts."""
    width, kv_width = model.heads * model.head_dim, model.kv_head_count * model.head_dim
    inner, matrices = model.feedforward_width, 3 if model.activation == "swiglu" else 2
    if model.experts:
        inner = (experts + model.shared_experts) * model.expert_width
    return model.hidden * (2 * width + 2 * kv_width + matrices * inner + model.experts)


def parameter_count(model: Transformer) -> int:
    """Parameters in matrices and embeddings; biases and norms are left out (below 0.1 %)."""
    return _parameters(model, model.experts)


def used_parameters(model: Transformer) -> int:
    """Parameters as in `parameter_count`, but only of those experts that one token passes."""
    return _parameters(model, model.active_experts)


def _parameters(model: Transformer, experts: int) -> int:
    tables = (1 if model.tied else 2) * model.vocabulary * model.hidden
    positions = model.sequence * model.hidden if model.positions == "learned" else 0
    return model.layers * _layer_weights(model, experts) + tables + positions


def model_flops(model: Transformer, run: TrainingRun) -> float:
    """Model FLOPs: 2 per multiplication and addition, backward twice forward; attention counted whole (as in Megatron's
    formula, Narayanan et al. 2021, equation 3, without its factor for recomputation), experts as those of a token."""
    attention = 2 * model.sequence * model.heads * model.head_dim
    each = model.layers * (_layer_weights(model, model.active_experts) + attention) + model.hidden * model.vocabulary
    return 6.0 * run.batch * model.sequence * each
