"""An estimate as the command prints it, as JSON, and its pipeline as a Chrome trace."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.stage_layers import part_layers
from autoshard.estimate.step import Estimate, used_parameters
from autoshard.estimate.text.reserved_memory import reserved_memory
from autoshard.estimate.transformer import PRECISIONS
from autoshard.step_corrections.software import PACKAGES
from autoshard.units import MICROSECONDS, format_bytes, format_flop_rate, format_seconds


def text(step: Estimate, hardware: Hardware) -> str:
    """Text of an estimate: its inputs, where a step's time goes, and what fills the memory."""
    model, run = step.model, step.run
    shared = f"cp={run.cp}," if run.cp > 1 else ""
    shared += f"ep={run.ep} of dp," if run.ep > 1 else ""
    compiled = ", layers compiled" if run.compiled else ""
    where = f"dp={run.dp},{shared}tp={run.tp},pp={run.pp} ({run.devices} devices) of {hardware.name}"
    lines = [
        f"transformer of {step.parameters / 1e9:.4g} billion parameters: {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads, sequence {model.sequence}",
        f"{run.batch} sequences a step on {where}, {run.precision}, {run.optimizer}: {run.micro_batches} micro-batches "
        f"of {run.micro_batch} a replica, {run.schedule}, recompute {run.recompute}, ZeRO {run.zero}{compiled}",
        *_experts(step),
        *_uneven(step),
        "",
        f"step {format_seconds(step.step_seconds)}: {step.tokens_per_second:,.0f} tokens/s, "
        f"{format_flop_rate(step.flops_per_device)} a device{_utilisation(step, hardware)}",
        *(
            f"  {name:<40} {format_seconds(seconds):>10}  {seconds / step.step_seconds:6.1%}"
            for name, seconds in _shown(step)
        ),
        f"  error band {step.band}",
        *_ignored(step),
        "",
        f"memory of the fullest device {format_bytes(step.memory.peak)}: {_fits(step, hardware)}",
        *(
            f"  {name:<40} {format_bytes(size):>10}"
            for name, size in asdict(step.memory).items()
            if size and name != "host"
        ),
        *_reserved(step, hardware),
    ]
    return "\n".join(lines)


def _reserved(step: Estimate, hardware: Hardware) -> list[str]:
    size = _reserved_bytes(step, hardware)
    return [] if size is None else [f"  {'reserved by the caching allocator':<40} {format_bytes(size):>10}"]


def _reserved_bytes(step: Estimate, hardware: Hardware) -> float | None:
    """Reserved bytes, at least the peak; None for packages, whose simulation has none."""
    size = None if step.run.software == PACKAGES else reserved_memory(step.model, step.run, hardware)
    return None if size is None else max(size, step.memory.peak)


def _experts(step: Estimate) -> list[str]:
    """Line on the experts that replace the layers' feed-forward layer."""
    model = step.model
    if not model.experts:
        return []
    shared = f", {model.shared_experts} more for every token" if model.shared_experts else ""
    uneven = f", the fullest device with {model.imbalance:g} times the average" if model.imbalance != 1 else ""
    return [
        f"{model.experts} experts of {model.expert_width}, {model.active_experts} a token{shared}{uneven}; "
        f"a token passes {used_parameters(model) / 1e9:.4g} billion parameters"
    ]


def _uneven(step: Estimate) -> list[str]:
    """Layers of each part of the pipeline, if they differ."""
    layers = part_layers(step.model, step.run)
    if len(set(layers)) == 1:
        return []
    runs = [(count, len(list(same))) for count, same in groupby(layers)]
    parts = "chunks" if step.run.interleave > 1 else "stages"
    return [f"layers of its {parts}: {', '.join(f'{count} x {n}' if n > 1 else f'{count}' for count, n in runs)}"]


def _ignored(step: Estimate) -> list[str]:
    """Settings without effect at these sizes."""
    run = step.run
    idle = {
        "--sequence-parallel": run.sequence_parallel and run.tp == 1,
        f"--zero {run.zero}": run.zero > 0 and run.replicas == 1,
        f"--imbalance {step.model.imbalance:g}": step.model.imbalance != 1 and run.ep == 1,
        f"--schedule {run.schedule}": run.schedule != "1f1b" and run.pp == 1,
    }
    names = [name for name, holds in idle.items() if holds]
    return [f"ignored: {', '.join(names)}, there is nothing to share it with"] if names else []


def _shown(step: Estimate) -> list[tuple[str, float]]:
    """Parts to show: not a soft maximum's residue where one side dominates, nanoseconds in a step of seconds."""
    return [(name, seconds) for name, seconds in step.parts if seconds > 1e-6 * step.step_seconds]


def _utilisation(step: Estimate, hardware: Hardware) -> str:
    return f", {step.flops_per_device / hardware.peak_flops(PRECISIONS[step.run.precision]):.1%} of peak"


def _fits(step: Estimate, hardware: Hardware) -> str:
    memory = step.memory
    verdict = _verdict(memory.peak, hardware.usable_memory_bytes)
    if not memory.host:
        return verdict
    return f"{verdict}; {format_bytes(memory.host)} of its host: {_verdict(memory.host, hardware.host_memory_bytes)}"


def _verdict(size: float, room: float) -> str:
    verdict = "fits" if size <= room else f"does not fit, {format_bytes(size - room)} too much for"
    return f"{verdict} the {format_bytes(room)} that may be used"


def as_dict(step: Estimate, hardware: Hardware) -> dict[str, Any]:
    """The estimate as a dict, in SI units."""
    return {
        "model": asdict(step.model),
        "run": asdict(step.run),
        "hardware": hardware.name,
        "devices": step.run.devices,
        "parameters": step.parameters,
        "step_seconds": step.step_seconds,
        "error_band": asdict(step.band),
        "parts_seconds": dict(step.parts),
        "tokens_per_second": step.tokens_per_second,
        "flops_per_device": step.flops_per_device,
        "memory_bytes": asdict(step.memory) | {"peak": step.memory.peak},
        "reserved_bytes": _reserved_bytes(step, hardware),
        "layers_computed_again": dict(step.recomputed) or {step.run.recompute: step.model.layers},
        "fits": step.memory.fits(hardware),
    }


def pipeline_trace(step: Estimate) -> dict[str, Any]:
    """Chrome trace JSON: a thread per stage, an event per forward and backward of a micro-batch."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in range(step.run.pp)
    ]
    kinds = {"F": "forward", "B": "backward"}
    events = [
        {
            "ph": "X",
            "name": f"{kinds[p.slot.kind]} {p.slot.micro_batch}"
            + (f".{p.slot.chunk}" if step.run.interleave > 1 else ""),
            "cat": kinds[p.slot.kind],
            "pid": 0,
            "tid": p.stage,
            "ts": p.start_seconds * MICROSECONDS,
            "dur": p.duration_seconds * MICROSECONDS,
        }
        for p in step.placed
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events, "otherData": {"step_seconds": step.step_seconds}}
