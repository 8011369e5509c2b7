"""`autoshard estimate` of a run of any software, packages included."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cluster.hardware import Hardware, check_mesh
from autoshard.constraints.step_request import RECOMPUTE
from autoshard.estimate.packages.package_program import Layers, package_costs
from autoshard.estimate.packages.package_step import (
    layers_by_keep,
    layers_of_parts,
    priced,
    step_band,
    step_memory,
    step_parts,
)
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import Estimate, check_dtype, estimate, model_flops, parameter_count
from autoshard.estimate.transformer import TrainingRun, Transformer, check
from autoshard.ir.mesh import Mesh
from autoshard.simulation.step_timeline import simulate_step
from autoshard.step_corrections.software import PACKAGES


def estimate_any(model: Transformer, run: TrainingRun, hardware: Hardware, host: Host | None = None) -> Estimate:
    """Like `estimate`, for packages too."""
    if run.software != PACKAGES:
        return estimate(model, run, hardware, host)
    check(model, run)
    check_dtype(run, hardware)
    check_mesh(hardware, Mesh((("devices", run.devices),)))
    return package_estimate(model, run, layers_of_parts(model, run), priced(hardware, model, host))


def package_estimate(model: Transformer, run: TrainingRun, parts: Sequence[Layers], hardware: Hardware) -> Estimate:
    """Estimate of a package. `parts`: what their layers keep, overriding `run`; `hardware` as in `priced`."""
    timeline = simulate_step(package_costs(model, run, parts, hardware))
    seconds = step_parts(timeline)
    return Estimate(
        model=model,
        run=run,
        step_seconds=timeline.step_seconds,
        parts=seconds,
        placed=timeline.placed,
        memory=step_memory(model, run, parts, timeline, hardware),
        parameters=parameter_count(model),
        flops=model_flops(model, run),
        band=step_band(model, run, seconds[-2:], hardware),
        recomputed=_mixed(parts),
    )


def _mixed(parts: Sequence[Layers]) -> tuple[tuple[str, int], ...]:
    counts = layers_by_keep(parts)
    pairs = tuple((word, counts[keep]) for word, keep in RECOMPUTE.items() if counts.get(keep))
    return pairs if len(pairs) > 1 else ()
