"""Bytes on a device of one pipeline stage: resident state, what micro-batches in flight keep, and the working peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.gradient_sync import ParameterCounts
from autoshard.estimate.layer_costs import saved_operators
from autoshard.estimate.stage_layers import layers_of
from autoshard.estimate.state_bytes import head_gradients, states, widened_gradients
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_graph import EMBEDDING, HEAD, core, layer
from autoshard.estimate.transformer_program import LAYERS, BuiltTransformer
from autoshard.ir.layout import Shard
from autoshard.ir.program import Collective
from autoshard.program.module_scopes import results_of
from autoshard.program.schedules.pipeline_schedule import REPEATS, SCHEDULES, most_in_flight
from autoshard.simulation.memory_curve import Span, plan_memory
from autoshard.step_corrections.software import held_bytes

HOST_STATE_BYTES = {"adamw": 16, "sgd": 8}  # float32 weights, gradients and moments, where the host updates them
MADE = ("gradient", "input", "activation", "extra")  # by a step
LASTING = ("parameter", "optimizer", "buffer", *MADE)
WORKING = "working"  # copies inside kernels; a fused loss, Megatron-LM's, works in place and has none


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that one micro-batch keeps for backward in each piece; `operators`: those of a layer that is recomputed by
    operators. `working` is the peak above what is kept.

    `layer_working`: the backward of a layer, above all that it and those before it keep. `first_working`: like
    `working` down to the backward of the last layer if no gradients exist before it, including those of parameters that
    are made until then, whole.
    """

    embedding: float
    layer: float
    core: float
    operators: float
    head: float
    input: float  # of a layer
    working: float
    layer_working: float
    first_working: float


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of the fullest device; `host`: peak bytes of the fullest host's memory, per device. `outside`: the
    part of `working` that was measured as the context, communicators and the allocator's reserve, for which a device's
    usable memory leaves room already."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    host: float = 0.0
    outside: float = 0.0

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working

    def fits(self, hardware: Hardware) -> bool:
        usable = self.peak - self.outside <= hardware.usable_memory_bytes and self.peak <= hardware.memory_bytes
        return usable and self.host <= hardware.host_memory_bytes


def fullest_of(stages: Sequence[StageMemory]) -> StageMemory:
    """The device that holds most, and the host that does: devices of one stage may fill a node."""
    return replace(max(stages, key=lambda memory: memory.peak), host=max(memory.host for memory in stages))


@lru_cache(maxsize=1024)
def layer_saved(built: BuiltTransformer, fused_loss: bool, gathered: bool = False) -> KeptBytes:
    """Bytes that the program's last layer keeps, which stands for all. `gathered`: gathered weights are kept whole."""
    program = replace(built.program, gradient_buckets=(), weight_buckets=())
    plan = plan_memory(program, built.graph, accumulates=True)
    turn = len(program.instructions) - 1  # the last step of the forward
    alive = [
        span for span in plan.spans if span.start <= turn < span.last and span.held.kind in ("activation", "extra")
    ]
    module = [getattr(instruction, "module", "") for instruction in program.instructions]

    def of(path: str) -> float:
        inside = (module[s.start] == path or module[s.start].startswith(f"{path}.") for s in alive)
        return sum(span_bytes(s, built, gathered) for s, within in zip(alive, inside, strict=True) if within)

    last = layer(LAYERS - 1)
    first = min(i for i, m in enumerate(module) if m.startswith(last))
    input_bytes = sum(span.held.bytes for span in alive if _feeds(span, first, module))
    everything = sum(span.held.bytes for span in alive)
    working = (WORKING,) * (not fused_loss)
    fresh = plan_memory(program, built.graph).bytes_of(*MADE, *working)
    positions = [i for i, name in enumerate(module) if name == last or name.startswith(f"{last}.")]
    level, steps = plan.bytes_of(*LASTING, WORKING), 2 * len(program.instructions) - 1
    return KeptBytes(
        of(EMBEDDING),
        of(last),
        of(core(LAYERS - 1)),
        _of_operators(built, alive),
        of(HEAD),
        input_bytes,
        max(plan.bytes_of(*LASTING, *working)) - plan.static_bytes - everything,
        max(0.0, max(level[steps - i] for i in positions) - plan.static_bytes - (everything - of(HEAD))),
        max(fresh[: 2 * len(program.instructions) - first]) - everything,
    )


def _of_operators(built: BuiltTransformer, alive: Sequence[Span]) -> float:
    """Bytes of the last layer's results that are not recomputed, and of what attention keeps in addition."""
    program, positions = built.program, saved_operators(built)
    results = sum(program.largest[name].bytes for i in positions for name in results_of(program.instructions[i]))
    return results + sum(s.held.bytes for s in alive if s.held.kind == "extra" and s.start in positions)


def span_bytes(span: Span, built: BuiltTransformer, gathered: bool) -> float:
    """Bytes of a value saved for backward. Values gathered for use are kept as shards, as in Megatron-LM: the second
    gather is hidden by a product."""
    instruction = built.program.instructions[span.start]
    if isinstance(instruction, Collective) and not gathered:
        pairs = zip(instruction.axes, instruction.before, strict=True)
        return span.held.bytes / math.prod(built.mesh.axis_size(a) for a, p in pairs if isinstance(p, Shard))
    return span.held.bytes


def _feeds(span: Span, first: int, module: Sequence[str]) -> bool:
    """Is this the residual stream that enters the last layer, the last kept value of the layer before?"""
    before = [i for i in range(first) if module[i] == layer(LAYERS - 2)]
    return bool(before) and span.start == before[-1]


@dataclass(frozen=True)
class InFlight:
    """Most that has run forward but not backward: micro-batches of the first chunk, layers, chunks."""

    first_chunk: int
    layers: int
    chunks: int


def in_flight(model: Transformer, run: TrainingRun, stage: int) -> InFlight:
    """Micro-batches in flight on a stage of the run's schedule."""
    micro_batches = run.micro_batches if run.schedule == "gpipe" else min(run.micro_batches, REPEATS * run.pp)
    return _in_flight(run.schedule, stage, run.pp, micro_batches, layers_of(model, run, stage))


@lru_cache(maxsize=4096)
def _in_flight(schedule: str, stage: int, stages: int, micro_batches: int, chunks: tuple[int, ...]) -> InFlight:
    order = SCHEDULES[schedule](stage, stages, micro_batches, len(chunks))
    each = (1,) * len(chunks)
    return InFlight(
        most_in_flight(order, 0), most_in_flight(order, weights=chunks), most_in_flight(order, weights=each)
    )


@dataclass(frozen=True)
class _Moment:
    """Bytes of a step on a device at one moment."""

    gradients: float
    activations: float
    working: float

    @property
    def bytes(self) -> float:
        return self.gradients + self.activations + self.working


def stage_memory(
    built: BuiltTransformer, model: Transformer, run: TrainingRun, parameters: ParameterCounts, stage: int
) -> StageMemory:
    """Peak memory of a stage: at the loss, or while a layer is recomputed. The first stage keeps what its embedding
    does, the last what its head does."""
    chunks = layers_of(model, run, stage)
    weights, gradients, optimizer = states(built, run, parameters, sum(chunks))
    software = held_bytes(run.software, run.precision)
    kept_bytes = layer_saved(built, model.fused_loss, software.gathered_inputs > 0)
    each, recomputed = {
        "none": (kept_bytes.layer, 0.0),
        "selective": (kept_bytes.layer - kept_bytes.core, kept_bytes.core),
        "operators": (kept_bytes.input + kept_bytes.operators, kept_bytes.layer),
        "full": (kept_bytes.input, kept_bytes.layer),
    }[run.recompute]
    first, last = stage == 0, stage == run.pp - 1
    # A layer counts one end of the stream, as large as its input: the head keeps one more, and of the embedding it is
    # that of the first layer.
    flight = in_flight(model, run, stage)
    embedding = (kept_bytes.embedding - kept_bytes.input) * flight.first_chunk * first
    stage_ends = software.stage_tensors * (run.pp > 1)
    layers = flight.layers * each + embedding + stage_ends * kept_bytes.input * flight.chunks
    loss = loss_copies(model, run) * software.parallel_loss_copies * (run.tp > 1)
    recomputed += kept_bytes.layer_working
    moments = [_Moment(gradients, layers, recomputed)]
    if run.keeps_gradients and last:
        moments.append(_Moment(gradients, layers + kept_bytes.head + kept_bytes.input, kept_bytes.working + loss))
    elif last:
        moments = [
            _Moment(0.0, layers + kept_bytes.head + kept_bytes.input, kept_bytes.first_working + loss),
            _Moment(head_gradients(built, model, run), layers, recomputed),
            _Moment(gradients, each + embedding, recomputed),
        ]
    if widened := widened_gradients(run, parameters):
        moments.append(_Moment(gradients, 0.0, widened))  # when the optimizer begins
    fullest = max(moments, key=lambda moment: moment.bytes)
    host = parameters.sharded(run, run.zero > 0) * HOST_STATE_BYTES[run.optimizer] if run.offload else 0.0
    return StageMemory(
        weights,
        fullest.gradients,
        0.0 if run.offload else optimizer,
        fullest.activations,
        fullest.working + software.outside,
        host,
        software.outside,
    )


def loss_copies(model: Transformer, run: TrainingRun) -> float:
    """Bytes of a device's logits in float32."""
    return 0.0 if model.fused_loss else 4.0 * run.micro_batch * model.sequence // run.cp * (model.vocabulary / run.tp)
