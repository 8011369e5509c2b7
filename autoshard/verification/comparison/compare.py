"""Compares every rank's tensors with its part of the reference, by the layouts of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from autoshard.ir.layout import Layout, Partial, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program, ProgramParameter
from autoshard.program.stage_programs import stage_programs
from autoshard.verification.comparison.rounding_noise import Noise, StepNoise
from autoshard.verification.comparison.tolerances import EVALUATION, Error, compare, largest
from autoshard.verification.original.reference import Reference, State

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class RankStep:
    """One optimizer step as one rank saw it: local tensors, parameters and buffers as they are after it."""

    outputs: tuple[Any, ...]
    norm: float
    parameters: State
    buffers: State


@dataclass(frozen=True)
class RankResult:
    """Result of one rank; tensors are local and have their names of the original state dict."""

    gradients: State  # of the first step, reduced, before clipping
    steps: tuple[RankStep, ...]
    evaluation: tuple[torch.Tensor, ...] = ()


def local_part(full: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Part of `full` that `rank` holds, by the definition of layouts (not by the runtime's arithmetic)."""
    for dim, size in enumerate(local_sizes(full.shape, layout, mesh)):
        if size.shards:
            runs = size.intervals(mesh, mesh.coordinates(rank))
            indices = [torch.arange(start, stop) for start, stop in runs]
            full = full.index_select(dim, torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64))
    return full


def compare_ranks(
    program: Program, reference: Reference, results: Sequence[RankResult], noise: Noise | None = None
) -> Iterator[Error]:
    """Error of every tensor of every rank, outputs first. `noise`: allowance for rounding."""
    assert len(results) == program.mesh.size
    noise = noise or Noise({}, tuple(StepNoise() for _ in reference.steps))
    yield from _outputs(program, reference, results, noise)
    for rank, result in enumerate(results):
        yield from _rank(program, reference, rank, result, noise)


def compare_stages(
    program: Program, reference: Reference, results: Sequence[RankResult], noise: Noise | None = None
) -> Iterator[Error]:
    """Error of every tensor of all stages: each stage's own tensors, and the loss on the last."""
    if not gives_loss_alone(program):
        yield from compare_ranks(program, reference, results, noise)
        return
    position = program.outputs.index(program.loss or "")
    reference, noise = _losses(reference, len(program.outputs), position), _loss_noise(noise, program, position)
    for stage, view in stage_views(program):
        for error in compare_ranks(view, reference, results[slice(*program.firsts[stage : stage + 2])], noise):
            yield replace(error, rank=error.rank + program.firsts[stage])


def gives_loss_alone(program: Program) -> bool:
    """Does a step return the loss alone? Other outputs stay in place with stages or unequal shares of the batch."""
    return bool(program.step.parts or program.step.batch_shares)


def stage_views(program: Program) -> Iterator[tuple[int, Program]]:
    """Pairs (stage, program with what that stage holds, and the loss if it computes it), the last stage first."""
    parts, step = stage_programs(program), program.step
    for stage in reversed(range(step.stages)):
        whole = program.of_stage(stage)
        stage_parts = [parts[number] for number in step.parts_of(stage)]
        yield (
            stage,
            replace(
                whole,
                others=(),
                parameters=tuple(dict.fromkeys(p for part in stage_parts for p in part.parameters)),
                buffers=tuple(dict.fromkeys(b for part in stage_parts for b in part.buffers)),
                outputs=(whole.loss or "",) if any(part.loss for part in stage_parts) else (),
            ),
        )


def _losses(reference: Reference, count: int, position: int) -> Reference:
    """The reference with the loss as its only output."""
    steps = [replace(step, outputs=step.outputs[position::count]) for step in reference.steps]
    return replace(reference, steps=tuple(steps), evaluation=reference.evaluation[position:][:1])


def _loss_noise(noise: Noise | None, program: Program, position: int) -> Noise | None:
    if noise is None:
        return None
    count = len(program.outputs)
    return replace(noise, steps=tuple(replace(step, outputs=step.outputs[position::count]) for step in noise.steps))


def _rank(program: Program, reference: Reference, rank: int, result: RankResult, noise: Noise) -> Iterator[Error]:
    trainable = [p for p in program.parameters if p.trainable] if program.loss else []
    where = program.mesh, rank, 1
    yield from _stored("gradient", trainable, reference.gradients, result.gradients, where, noise.gradients)
    scale = max((step.norm for step in reference.steps), default=0.0)
    for number, (step, expected) in enumerate(zip(result.steps, reference.steps, strict=True), 1):
        where, step_noise = (program.mesh, rank, number), noise.steps[number - 1]
        if program.loss:
            norm, wanted = (torch.tensor(n, dtype=torch.float64) for n in (step.norm, expected.norm))
            yield compare("gradient", "global norm", rank, number, norm, wanted, scale, step_noise.norm)
        parameters, buffers = step_noise.parameters or {}, step_noise.buffers or {}
        yield from _stored("parameter", program.parameters, expected.parameters, step.parameters, where, parameters)
        yield from _stored("buffer", program.buffers, expected.buffers, step.buffers, where, buffers)


def _stored(
    kind: str,
    parameters: Sequence[ProgramParameter],
    expected: State,
    actual: State,
    where: tuple[Mesh, int, int],  # rank, step
    noise: Mapping[str, float],
) -> Iterator[Error]:
    mesh, rank, step = where
    whole = {p.path: by_name(expected, p) for p in parameters}
    scale = largest(value for value in whole.values() if value is not None)
    for parameter in parameters:
        full = whole[parameter.path]
        assert full is not None, f"the original model has no {parameter.path}"
        part = local_part(full, parameter.layout, mesh, rank)
        held = unsplit(by_name(actual, parameter), part)
        yield compare(kind, parameter.path, rank, step, held, part, scale, by_name(noise, parameter) or 0.0)


def by_name(state: Mapping[str, _Value], parameter: ProgramParameter) -> _Value | None:
    """Entry of `state` under the parameter's path or any of its ties; None if there is none."""
    return next((state[name] for name in (parameter.path, *parameter.ties) if name in state), None)


def unsplit(actual: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor | None:
    """Tensor in the shape of `part`. A blocked parameter is held unflattened: the same elements in the same order."""
    if actual is None or actual.numel() != part.numel():
        return actual
    return actual.reshape(part.shape)


def _outputs(program: Program, reference: Reference, results: Sequence[RankResult], noise: Noise) -> Iterator[Error]:
    scale = largest(output for step in reference.steps for output in step.outputs)  # a loss may vanish as it is learnt
    if reference.evaluation:
        first, first_noise = [result.evaluation for result in results], noise.steps[0].outputs
        yield from _all(EVALUATION, program, program.outputs, reference.evaluation, first, (1, scale), first_noise)
    for number, step in enumerate(reference.steps):
        names, actual = program.outputs * reference.micro_batches, [result.steps[number].outputs for result in results]
        where = number + 1, scale
        yield from _all("output", program, names, step.outputs, actual, where, noise.steps[number].outputs)


def _all(
    kind: str, program: Program, names: Sequence[str], expected: Sequence[torch.Tensor],
    actual: Sequence[Sequence[torch.Tensor]], where: tuple[int, float], noise: Sequence[float],
) -> Iterator[Error]:  # fmt: skip
    """Error of each output of each rank. `where`: the step, and the largest magnitude of their kind."""
    for position, name in enumerate(names):
        locals_ = [outputs[position] if position < len(outputs) else None for outputs in actual]
        label = "loss" if name == program.loss else program.value(name).tensor
        layout, (step, scale) = program.value(name).layout, where
        for rank, summed in enumerate(_summed(locals_, layout, program.mesh)):
            part = local_part(expected[position], layout, program.mesh, rank)
            yield compare(kind, label, rank, step, summed, part, scale, noise[position] if noise else 0.0)


def _summed(locals_: Sequence[torch.Tensor | None], layout: Layout, mesh: Mesh) -> list[torch.Tensor | None]:
    """Each rank's value, summed over the axes on which it is partial."""
    partial = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        coordinates = [0 if axis in partial else c for axis, c in enumerate(mesh.coordinates(rank))]
        groups.setdefault(tuple(coordinates), []).append(rank)
    result: list[torch.Tensor | None] = [None] * mesh.size
    for ranks in groups.values():
        parts = [part for rank in ranks if (part := locals_[rank]) is not None]
        complete = len(parts) == len(ranks) and len({part.shape for part in parts}) == 1
        for rank in ranks:
            result[rank] = torch.stack(parts).sum(0) if complete else locals_[rank] if len(ranks) == 1 else None
    return result
