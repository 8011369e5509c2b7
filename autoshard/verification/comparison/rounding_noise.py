"""Measures how far rounding alone moves each tensor of the reference: gradients that are truly zero hold only that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.ir.graph import Graph
from autoshard.verification.comparison.tolerances import THRESHOLD, allowed_noise, largest
from autoshard.verification.original.randomise import generator
from autoshard.verification.original.reference import (
    Batch,
    MakeOptimizer,
    Reference,
    ReferenceStep,
    State,
    refilled,
    trained,
)

NUDGE = 2.0**-50  # relative: a few units in the last place
SAFETY = 64.0  # other orders of summation round worse than one nudged run


@dataclass(frozen=True)
class StepNoise:
    """Largest absolute differences in one step, by name (outputs by position)."""

    outputs: tuple[float, ...] = ()
    norm: float = 0.0
    parameters: Mapping[str, float] | None = None
    buffers: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Noise:
    """Noise of all steps; `gradients` are the first step's."""

    gradients: Mapping[str, float]
    steps: tuple[StepNoise, ...]


def measure_noise(
    module: torch.nn.Module,
    graph: Graph,
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer,
    reference: Reference,
    literal: torch.dtype,
) -> Noise:
    """Trains `module`, reset to the reference's start, from a state and batches that differ in the last bits."""
    for name in refilled(module, reference.buffers):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, reference.buffers[name].clone())
    with torch.no_grad():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            value.copy_({**reference.parameters, **reference.buffers}[name])
            value.copy_(_nudged(value, f"noise {name}"))
    nudged = [[_nudged(x, f"noise {step} {i}") for i, x in enumerate(batch)] for step, batch in enumerate(batches)]
    gradients: Mapping[str, float] = {}
    steps = []
    norms = [step.max_norm for step in reference.steps]
    seed, count = reference.seed, reference.micro_batches
    runs = trained(module, graph, nudged, make_optimizer, seed, literal, norms, count)
    for (grads, step), expected in zip(runs, reference.steps, strict=True):
        gradients = gradients or _differences(grads, reference.gradients)
        steps.append(_step_noise(step, expected))
    return Noise(gradients, tuple(steps))


def amplified(reference: Reference, noise: Noise) -> tuple[str, ...]:
    """Note on the step whose outputs have the loosest tolerance; none if only the threshold is allowed."""
    scale = largest(output for step in reference.steps for output in step.outputs)
    allowed = [
        (allowed_noise(difference, scale, number) / scale, number)
        for number, step in enumerate(noise.steps, 1)
        for difference in step.outputs
        if scale
    ]
    most, number = max(allowed, default=(0.0, 0))
    if most <= THRESHOLD:
        return ()
    moved = most / SAFETY
    return (f"outputs compared to {most:.0e} in step {number}: rounding alone moves the original's by {moved:.0e}",)


def _nudged(value: torch.Tensor, name: str) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    sign = torch.rand(value.shape, generator=generator(0, name), dtype=value.dtype) - 0.5
    return torch.where(torch.isfinite(value), value * (1 + 2 * NUDGE * sign), value)


def _step_noise(nudged: ReferenceStep, expected: ReferenceStep) -> StepNoise:
    return StepNoise(
        tuple(_difference(a, b) for a, b in zip(nudged.outputs, expected.outputs, strict=True)),
        SAFETY * abs(nudged.norm - expected.norm),
        _differences(nudged.parameters, expected.parameters),
        _differences(nudged.buffers, expected.buffers),
    )


def _differences(nudged: State, expected: State) -> dict[str, float]:
    return {name: _difference(value, expected[name]) for name, value in nudged.items()}


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or not a.numel() or not a.is_floating_point():
        return 0.0
    errors = (a - b).abs()
    return SAFETY * float(errors[torch.isfinite(errors)].max()) if bool(torch.isfinite(errors).any()) else 0.0
