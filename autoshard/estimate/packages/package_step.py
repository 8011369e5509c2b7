"""A step of a package that `autoshard plan` writes (`--software autoshard`): its parts, memory and error band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.step_request import RECOMPUTE
from autoshard.costs.bands import Band
from autoshard.estimate.layer_costs import families
from autoshard.estimate.packages.package_blocks import FIRST, LAST, LAYER, store_of
from autoshard.estimate.packages.package_program import Layers
from autoshard.estimate.stage_layers import part_layers
from autoshard.estimate.stage_memory import StageMemory
from autoshard.estimate.stage_slots import Host, Part
from autoshard.estimate.transformer import PRECISIONS, TrainingRun, Transformer
from autoshard.estimate.transformer_program import BuiltTransformer
from autoshard.simulation.step_timeline import StepTimeline
from autoshard.step_corrections.software import KERNELS, PACKAGES, with_software
from autoshard.step_corrections.step_bands import step_kind, whole_step_band
from autoshard.whole_step_search.blocks.block_costs import HeldParameters, held_together
from autoshard.whole_step_search.blocks.context_expert_axes import TENSOR


def priced(hardware: Hardware, model: Transformer, host: Host | None) -> Hardware:
    """Hardware with the attention and the loss of `model`, and with the dispatch time of `host`."""
    adjusted = with_software(hardware, KERNELS, model.fused_attention, model.fused_loss)
    if host is None:
        return adjusted
    constants = dict(adjusted.constants) | {"host.dispatch": host.dispatch_seconds}
    return replace(adjusted, constants=tuple(constants.items()))


def layers_of_parts(model: Transformer, run: TrainingRun) -> tuple[Layers, ...]:
    """Layers of each part of the model; all keep what `run` says."""
    return tuple({RECOMPUTE[run.recompute]: count} for count in part_layers(model, run))


def layers_by_keep(parts: Sequence[Layers]) -> dict[str, int]:
    """Number of layers by what they keep."""
    counts: dict[str, int] = {}
    for keep, count in (pair for layers in parts for pair in layers.items()):
        counts[keep] = counts.get(keep, 0) + count
    return counts


def step_parts(timeline: StepTimeline) -> tuple[Part, ...]:
    """Seconds of the stage that ends last, by name; they add up to the step."""
    stage = max(range(timeline.stages), key=timeline.stage_seconds.__getitem__)
    slots, tail = timeline.by_stage[stage], timeline.costs.stages[stage].tail
    forward = backward = 0.0
    for placed in slots:
        number = placed.slot.chunk * timeline.stages + stage
        if placed.slot.kind == "F":
            forward += placed.duration_seconds - timeline.costs.sent_seconds(number)
        else:
            backward += timeline.costs.parts[number].backward_seconds
    busy = sum(placed.duration_seconds for placed in slots)
    waits = timeline.stage_seconds[stage] - busy - sum(seconds for _, seconds in tail)
    return (
        ("forward", forward),
        ("backward, with recompute", backward),
        ("sends to other stages", busy - forward - backward),
        ("pipeline bubble", waits),
        *tail,
    )


def step_memory(
    model: Transformer, run: TrainingRun, parts: Sequence[Layers], timeline: StepTimeline, hardware: Hardware
) -> StageMemory:
    """Memory of the fullest device."""
    stage = max(range(timeline.stages), key=timeline.peak_bytes.__getitem__)
    static, peak = timeline.costs.stages[stage].static_bytes, timeline.peak_bytes[stage]
    held = _held(model, run, parts, stage, hardware)
    shares = run.dp if run.zero else 1
    gradients = (held.gradient_bytes / shares + held.gradient_bytes * (run.zero == 1)) * (run.micro_batches > 1)
    optimizer = held.optimizer_bytes / shares
    working = max(timeline.costs.part(stage, chunk).working_bytes for chunk in range(timeline.costs.chunks))
    late = gradients if run.dp > 1 and not run.zero else 0.0  # each layer's, from its first backward on
    static, working = static + late, max(0.0, working - late)
    weights, working = max(0.0, static - gradients - optimizer), min(working, peak - static)
    return StageMemory(weights, static - weights - optimizer, optimizer, peak - static - working, working)


def _held(
    model: Transformer, run: TrainingRun, parts: Sequence[Layers], stage: int, hardware: Hardware
) -> HeldParameters:
    """Bytes of the parameters of a stage, including its copies of parameters that another one holds too."""
    costs, held = store_of(model, run, hardware).costs(((TENSOR, run.tp),), run.micro_batch)[0].costs, HeldParameters()
    for number in range(stage, len(parts), run.pp):
        kinds = [FIRST] * (number == 0) + [LAYER] * sum(parts[number].values()) + [LAST] * (number == len(parts) - 1)
        for cost in (costs[kind] for kind in kinds):
            held = held_together(held, cost.held)
            held = held_together(held, cost.shared) if run.pp > 1 else held
    return held


def step_band(model: Transformer, run: TrainingRun, tail: Sequence[Part], hardware: Hardware) -> Band:
    """Error band as for a plan: nobody measured steps of this kind."""
    split = store_of(model, run, hardware).costs(((TENSOR, run.tp),), run.micro_batch)[0].split
    seconds = families(BuiltTransformer(split.program, split.graph, split.mesh), hardware, model.layers)
    seconds = {name: duration * run.micro_batches / run.pp for name, duration in seconds.items()}
    for name, duration in tail:
        family = "memory" if name == "optimizer" else "collective"
        seconds[family] = seconds.get(family, 0.0) + duration
    kind = step_kind(hardware, PACKAGES, KERNELS, run.devices)
    return whole_step_band(hardware, seconds, PRECISIONS[run.precision], kind)
