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


def text(made: Estimate, hardware: Hardware) -> str:
    """What is estimated, where a step's time goes, and what fills the memory."""
    model, run = made.model, made.run
    shared = f"cp={run.cp}," if run.cp > 1 else ""
    shared += f"ep={run.ep} of dp," if run.ep > 1 else ""
    compiled = ", layers compiled" if run.compiled else ""
    where = f"dp={run.dp},{shared}tp={run.tp},pp={run.pp} ({run.devices} devices) of {hardware.name}"
    lines = [
        f"transformer of {made.parameters / 1e9:.4g} billion parameters: {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads, sequence {model.sequence}",
        f"{run.batch} sequences a step on {where}, {run.precision}, {run.optimizer}: {run.micro_batches} micro-batches "
        f"of {run.micro_batch} a replica, {run.schedule}, recompute {run.recompute}, ZeRO {run.zero}{compiled}",
        *_experts(made),
        *_uneven(made),
        "",
        f"step {format_seconds(made.step_seconds)}: {made.tokens_per_second:,.0f} tokens/s, "
        f"{format_flop_rate(made.flops_per_device)} a device{_utilisation(made, hardware)}",
        *(
            f"  {name:<40} {format_seconds(seconds):>10}  {seconds / made.step_seconds:6.1%}"
            for name, seconds in _shown(made)
        ),
        f"  error band {made.band}",
        *_ignored(made),
        "",
        f"memory of the fullest device {format_bytes(made.memory.peak)}: {_fits(made, hardware)}",
        *(
            f"  {name:<40} {format_bytes(size):>10}"
            for name, size in asdict(made.memory).items()
            if size and name != "host"
        ),
        *_reserved(made, hardware),
    ]
    return "\n".join(lines)


def _reserved(made: Estimate, hardware: Hardware) -> list[str]:
    size = _reserved_bytes(made, hardware)
    return [] if size is None else [f"  {'reserved by the caching allocator':<40} {format_bytes(size):>10}"]


def _reserved_bytes(made: Estimate, hardware: Hardware) -> float | None:
    """Reserved bytes; None for packages, whose simulation has none."""
    return None if made.run.software == PACKAGES else reserved_memory(made.model, made.run, hardware)


def _experts(made: Estimate) -> list[str]:
    """What the layers have in place of a feed-forward layer."""
    model = made.model
    if not model.experts:
        return []
    shared = f", {model.shared_experts} more for every token" if model.shared_experts else ""
    uneven = f", the fullest device with {model.imbalance:g} times the average" if model.imbalance != 1 else ""
    return [
        f"{model.experts} experts of {model.own_expert_hidden}, {model.own_top_k} a token{shared}{uneven}; "
        f"a token passes {used_parameters(model) / 1e9:.4g} billion parameters"
    ]


def _uneven(made: Estimate) -> list[str]:
    """Layers of each part of the pipeline, where they differ."""
    own = part_layers(made.model, made.run)
    if len(set(own)) == 1:
        return []
    runs = [(count, len(list(same))) for count, same in groupby(own)]
    parts = "chunks" if made.run.interleave > 1 else "stages"
    return [f"layers of its {parts}: {', '.join(f'{count} x {n}' if n > 1 else f'{count}' for count, n in runs)}"]


def _ignored(made: Estimate) -> list[str]:
    """Settings that say nothing at these sizes."""
    run = made.run
    idle = {
        "--sequence-parallel": run.sequence_parallel and run.tp == 1,
        f"--zero {run.zero}": run.zero > 0 and run.replicas == 1,
        f"--imbalance {made.model.imbalance:g}": made.model.imbalance != 1 and run.ep == 1,
        f"--schedule {run.schedule}": run.schedule != "1f1b" and run.pp == 1,
    }
    names = [name for name, holds in idle.items() if holds]
    return [f"ignored: {', '.join(names)}, there is nothing to share it with"] if names else []


def _shown(made: Estimate) -> list[tuple[str, float]]:
    """But what is left of a soft maximum where one side decides: nanoseconds of waiting in a step of seconds."""
    return [(name, seconds) for name, seconds in made.parts if seconds > 1e-6 * made.step_seconds]


def _utilisation(made: Estimate, hardware: Hardware) -> str:
    return f", {made.flops_per_device / hardware.peak_flops(PRECISIONS[made.run.precision]):.1%} of peak"


def _fits(made: Estimate, hardware: Hardware) -> str:
    own = made.memory
    verdict = _verdict(own.peak, hardware.usable_memory_bytes)
    if not own.host:
        return verdict
    return f"{verdict}; {format_bytes(own.host)} of its host: {_verdict(own.host, hardware.host_memory_bytes)}"


def _verdict(size: float, room: float) -> str:
    verdict = "fits" if size <= room else f"does not fit, {format_bytes(size - room)} too much for"
    return f"{verdict} the {format_bytes(room)} that may be used"


def as_dict(made: Estimate, hardware: Hardware) -> dict[str, Any]:
    """The same, in SI units."""
    return {
        "model": asdict(made.model),
        "run": asdict(made.run),
        "hardware": hardware.name,
        "devices": made.run.devices,
        "parameters": made.parameters,
        "step_seconds": made.step_seconds,
        "error_band": asdict(made.band),
        "parts_seconds": dict(made.parts),
        "tokens_per_second": made.tokens_per_second,
        "flops_per_device": made.flops_per_device,
        "memory_bytes": asdict(made.memory) | {"peak": made.memory.peak},
        "reserved_bytes": _reserved_bytes(made, hardware),
        "layers_computed_again": dict(made.again) or {made.run.recompute: made.model.layers},
        "fits": made.memory.fits(hardware),
    }


def pipeline_trace(made: Estimate) -> dict[str, Any]:
    """Chrome trace JSON: a thread per stage, an event per forward and backward of a micro-batch."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in range(made.run.pp)
    ]
    kinds = {"F": "forward", "B": "backward"}
    events = [
        {
            "ph": "X",
            "name": f"{kinds[p.slot.kind]} {p.slot.micro_batch}"
            + (f".{p.slot.chunk}" if made.run.interleave > 1 else ""),
            "cat": kinds[p.slot.kind],
            "pid": 0,
            "tid": p.stage,
            "ts": p.start_seconds * MICROSECONDS,
            "dur": p.duration_seconds * MICROSECONDS,
        }
        for p in made.placed
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events, "otherData": {"step_seconds": made.step_seconds}}
