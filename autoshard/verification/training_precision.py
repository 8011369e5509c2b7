"""Checks one step of a package in its own precision: float64 hides a wrong dtype or a surplus gradient.

Outputs and gradients must have the dtypes of the original under autocast (or without it, if it has none), be numbers,
and be as near to the float64 reference as the original itself is: if an activation is within rounding of the kink of a
ReLU, its gradient is there or not by chance, so the original also runs with rounded weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoshard.graph_capture.training.precision import PRECISIONS
from autoshard.graph_capture.two_runs.autocast import autocast_as_planned
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.program.step_check import input_layout
from autoshard.verification.comparison.compare import by_name, gives_loss_alone, local_part, stage_views, unsplit
from autoshard.verification.comparison.tolerances import OWN, Error, largest
from autoshard.verification.original.float8_rounding import float8_parameters, in_float8, storages
from autoshard.verification.original.random_draws import exact_dropout
from autoshard.verification.original.randomise import generator
from autoshard.verification.original.reference import (
    Reference,
    State,
    accumulated,
    as_captured,
    densify,
    outputs_of,
)
from autoshard.verification.ranks.loaded_package import LoadedPackage, load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from autoshard.verification.ranks.rank_steps import place_axes

TIMES = 8.0  # the original's own error
ROUNDINGS = 32.0  # of the largest of a tensor
NUDGED_RUNS = 3  # each gives an activation next to a kink the other sign half of the time
MOVED_TIMES = 2.0  # what they move an element by: two signs may differ at once
SCALES = tuple(2.0**power for power in range(16, -9, -4))  # of a loss in float16, until no gradient overflows
NORM_ERROR = 0.1  # relative, of what rounds in float16
ROOM = 16.0  # a device's part of a sum may be larger than the whole


@dataclass(frozen=True)
class TrainingPrecisionStep:
    """The original's first step in its own precision: outputs, and gradients by name (those that exist)."""

    dtypes: Mapping[str, torch.dtype]  # of parameters and buffers
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    gradients: State
    scale: float = 1.0  # of the loss, where the precision needs one; `gradients` are without it
    moved: State = field(default_factory=dict)  # by element, the largest error of gradients with nudged weights


def run_in_precision(
    module: torch.nn.Module, graph: Graph, reference: Reference, dtypes: Mapping[str, torch.dtype]
) -> TrainingPrecisionStep | str:
    """The step, or why it can't be run. Restores the module to its float64 state before the first step."""
    state = reference.parameters | reference.buffers
    count = reference.micro_batches
    pairs = zip(reference.steps[0].inputs, graph.inputs * count, strict=True)
    inputs = tuple(_narrow(x, graph.tensor(name).dtype) for x, name in pairs)
    try:
        for scale in SCALES if graph.precision == "fp16-mixed" else (1.0,):
            module.zero_grad(set_to_none=True)
            _hold(module, state, dtypes)
            outputs = _step(module, graph, inputs, reference.seed, count, scale)
            gradients = _gradients(module, scale)
            if all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
                break  # as torch's GradScaler would find it
        detached = tuple(output.detach().clone() for output in outputs)
        moved = _moved(module, graph, inputs, reference, dtypes, scale) if gradients else {}
        return TrainingPrecisionStep(dtypes, inputs, detached, gradients, scale, moved)
    except Exception as error:  # the model's own code
        reason = (str(error).strip().splitlines() or [""])[0]
        what = f"{type(error).__name__}: {reason}".removesuffix(": ")
        return f"one step in {graph.precision}: the original fails in it ({what})"
    finally:
        module.zero_grad(set_to_none=True)
        _hold(module, state, {})


def _step(
    module: torch.nn.Module, graph: Graph, inputs: Sequence[torch.Tensor], seed: int, count: int, scale: float
) -> list[torch.Tensor]:
    """Runs forward, and backward from the loss times `scale`; returns the outputs."""
    weights = storages(module, float8_parameters(graph))
    float8 = partial(in_float8, weights=weights) if weights else None
    if count > 1:
        with autocast_as_planned(graph.precision, float8):
            outputs = accumulated(module, graph, inputs, seed, 0, count, scale)
    else:
        with autocast_as_planned(graph.precision, float8), exact_dropout(seed, 0, graph):
            outputs = outputs_of(module(*as_captured(graph, inputs)))
        if graph.loss is not None:
            (outputs[graph.outputs.index(graph.loss)] * scale).backward()
    densify(module.parameters())
    return outputs


def _hold(module: torch.nn.Module, state: State, dtypes: Mapping[str, torch.dtype]) -> None:
    """Sets the module to the values of `state`, in `dtypes` (else in their own); skips names not in `state`."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in state:
            tensor.data = state[name].to(dtypes.get(name, state[name].dtype), copy=True)


def _moved(
    module: torch.nn.Module, graph: Graph, inputs: Sequence[torch.Tensor], reference: Reference,
    dtypes: Mapping[str, torch.dtype], scale: float,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """`TrainingPrecisionStep.moved`, only for a low precision: float32 is too fine to meet a kink."""
    moved: dict[str, torch.Tensor] = {}
    for number in range(NUDGED_RUNS if PRECISIONS[graph.precision] else 0):
        module.zero_grad(set_to_none=True)
        _hold(module, _nudged(reference.parameters, number, _rounding(graph.precision)) | reference.buffers, dtypes)
        _step(module, graph, inputs, reference.seed, reference.micro_batches, scale)
        for path, gradient in _gradients(module, scale).items():
            if (exact := reference.gradients.get(path)) is not None:
                error = (gradient - exact).abs().nan_to_num(0.0, 0.0)  # what overflows allows nothing
                moved[path] = error.maximum(moved.get(path, error))
    return moved


def _gradients(module: torch.nn.Module, scale: float) -> dict[str, torch.Tensor]:
    return {path: p.grad.detach() / scale for path, p in module.named_parameters() if p.grad is not None}


def _nudged(state: State, number: int, rounding: float) -> dict[str, torch.Tensor]:
    """State with each element moved by up to half of a rounding, by random draws with seed `number`."""
    return {
        name: x * (1 + rounding * (torch.rand(x.shape, generator=generator(number, name), dtype=x.dtype) - 0.5))
        for name, x in state.items()
    }


def _rounding(precision: str) -> float:
    return float(torch.finfo(getattr(torch, PRECISIONS[precision] or "float32")).eps)


def _narrow(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.detach().to(getattr(torch, dtype)).clone() if x.is_floating_point() else x.clone()


# --- the package ---


@dataclass(frozen=True)
class _Rank:
    outputs: tuple[torch.Tensor, ...]
    gradients: State
    parameters: State
    norm: float = 0.0


def check_precision(
    original: TrainingPrecisionStep, reference: Reference, program: Program, folder: Path, timeout_seconds: float
) -> list[Error]:
    """Error of every tensor of every rank, in lock-step. Raises LockstepError if the package can't be run."""
    package = load_package(folder)
    axes, step = dict(program.mesh.axes), program.step
    kinds = package.runtime.ParallelMesh, getattr(package.runtime, "Stages", None)

    def work(mesh: Any) -> _Rank:
        return _run(package, mesh, original, reference, program)

    ranks = run_lockstep(axes, work, timeout_seconds, *kinds, step.part_stages, place_axes(program))
    if not gives_loss_alone(program):
        return list(_compared(original, reference, program, ranks))
    alone = replace(original, outputs=original.outputs[program.outputs.index(program.loss or "") :][:1])
    return [
        replace(error, rank=error.rank + program.firsts[stage])
        for stage, view in stage_views(program)
        for own_ranks in (ranks[slice(*program.firsts[stage : stage + 2])],)
        for error in _compared(alone, _only_loss(reference, program), view, own_ranks)
    ]


def _only_loss(reference: Reference, program: Program) -> Reference:
    position = program.outputs.index(program.loss or "")
    first = replace(reference.steps[0], outputs=reference.steps[0].outputs[position:][:1])
    return replace(reference, steps=(first, *reference.steps[1:]))


def _run(
    package: LoadedPackage, mesh: Any, original: TrainingPrecisionStep, reference: Reference, program: Program
) -> _Rank:
    program = program.of_stage(0 if mesh.stages is None else mesh.stages.index)
    mesh.random.exact, mesh.random.seed, mesh.random.step = True, reference.seed, 0
    runtime, model = package.runtime, package.model.build_model(mesh)
    state = reference.parameters | reference.buffers
    for tensor in (*model.parameters(), *model.buffers()):
        sharding = runtime.sharding(tensor)
        runtime.assign(tensor, next(state[name] for name in (sharding.name, *sharding.ties) if name in state))
    count = reference.micro_batches
    layouts = [input_layout(program, name) for name in program.inputs * count]
    inputs = [_part(x, layout, program.mesh, mesh.rank) for x, layout in zip(original.inputs, layouts, strict=True)]
    norm = 0.0
    if program.loss is None:
        with torch.no_grad():
            returned = model(*inputs)
    else:
        optimizer = package.train.make_optimizer(model)
        scaling = {}
        if program.precision == "fp16-mixed":
            scaling = {"scaler": package.train.make_scaler(mesh, original.scale / ROOM)}
        norm = float(package.train.train_step(model, optimizer, mesh, _batches(inputs, count), math.inf, **scaling)[1])
        seen = package.recorder.take(mesh.global_rank).outputs
        returned = seen[0] if seen else []
    outputs = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    if program.loss is not None and not program.step.parts:  # the package returns the loss first
        outputs.insert(program.outputs.index(program.loss), outputs.pop(0))
    named = {runtime.sharding(p).name: p for p in model.parameters()}
    gradients = {name: runtime.local(p.grad).detach() for name, p in named.items() if p.grad is not None}
    parameters = {name: runtime.local(p).detach() for name, p in named.items()}
    return _Rank(tuple(o.detach() for o in outputs), gradients, parameters, norm)


def _batches(inputs: list[torch.Tensor], count: int) -> list[Any]:
    """Inputs as `train_step` takes them: those of one batch, or a list for each micro-batch."""
    per_batch = len(inputs) // count
    return inputs if count == 1 else [inputs[i * per_batch : (i + 1) * per_batch] for i in range(count)]


def _part(x: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    return local_part(x, layout, mesh, rank).clone()


# --- comparing ---


def _compared(
    original: TrainingPrecisionStep, reference: Reference, program: Program, ranks: Sequence[_Rank]
) -> Iterator[Error]:
    scale = largest(reference.gradients.values())
    for rank, result in enumerate(ranks):
        for position, name in enumerate(program.outputs):
            value = program.value(name)
            label = "loss" if name == program.loss else value.tensor
            whole = "P" not in str(value.layout).split()
            yield _error(
                f"output {label}", rank, result.outputs[position], original.outputs[position],
                reference.steps[0].outputs[position], value.layout if whole else None, program, 0.0,
            )  # fmt: skip
        for parameter in program.parameters if program.loss is not None else ():
            name, gradient = parameter.path, by_name(result.gradients, parameter)
            expected, exact = by_name(original.gradients, parameter), by_name(reference.gradients, parameter)
            if expected is None or exact is None or gradient is None:
                if (expected is None) != (gradient is None) and 0 not in parameter.shape:
                    has = "has none" if expected is None else "has one"
                    yield Error(OWN, f"gradient {name}", rank, 1, math.inf, f"the original {has}")
                continue
            part = local_part(exact, parameter.layout, program.mesh, rank)
            found_part = unsplit(gradient, part)
            moved = by_name(original.moved, parameter)
            yield _error(f"gradient {name}", rank, found_part, expected, exact, parameter.layout, program, scale, moved)
        if original.scale != 1:  # what is clipped must be without the scale
            yield _norm_error(rank, result.norm, original, reference.steps[0].norm)
        for parameter in program.parameters:
            held = by_name(result.parameters, parameter)
            wanted = next(original.dtypes[n] for n in (parameter.path, *parameter.ties) if n in original.dtypes)
            right = held is not None and held.dtype == wanted and bool(torch.isfinite(held).all())
            what = "" if right or held is None else f"{held.dtype} after a step, expected {wanted}"
            yield Error(OWN, f"parameter {parameter.path}", rank, 1, 0.0 if right else math.inf, what)


def _norm_error(rank: int, norm: float, original: TrainingPrecisionStep, exact: float) -> Error:
    norms = [gradient.double().norm() for gradient in original.gradients.values()]
    expected = float(torch.stack(norms).norm()) if norms else 0.0
    right = abs(norm - exact) <= TIMES * abs(expected - exact) + NORM_ERROR * exact or not math.isfinite(expected)
    what = "" if right else f"{norm:.4g}, the original's is {expected:.4g}"
    return Error(OWN, "norm of all gradients", rank, 1, 0.0 if right else math.inf, what)


def _error(
    name: str, rank: int, actual: Any, expected: torch.Tensor, exact: torch.Tensor, layout: Layout | None,
    program: Program, scale: float,
    moved: torch.Tensor | None = None,
) -> Error:  # fmt: skip
    """Error of one tensor. `expected` is the original's in its own precision, `exact` in float64; without a layout only
    dtypes are compared. `scale`: the largest of its kind; `moved`: the original's errors with nudged weights."""
    rounding = _rounding(program.precision)

    def said(problem: str) -> Error:
        return Error(OWN, name, rank, 1, math.inf, problem.replace("torch.", ""))

    if not isinstance(actual, torch.Tensor) or actual.dtype != expected.dtype:
        return said(f"{getattr(actual, 'dtype', 'missing')}, the original's is {expected.dtype}")
    if not actual.is_floating_point() or not actual.numel():
        return Error(OWN, name, rank, 1, 0.0)
    if not bool(torch.isfinite(actual).all()):
        return Error(OWN, name, rank, 1, 0.0) if not bool(torch.isfinite(expected).all()) else said("NaN or inf")
    if layout is None:
        return Error(OWN, name, rank, 1, 0.0)
    own_error = float((expected.double() - exact).abs().max())
    allowed = TIMES * own_error + rounding * (ROUNDINGS * float(exact.abs().max()) + scale)
    errors = (actual.double() - local_part(exact, layout, program.mesh, rank)).abs()
    over = errors if moved is None else errors - MOVED_TIMES * local_part(moved, layout, program.mesh, rank)
    if float(over.max()) > allowed:
        error = float(errors.flatten()[over.argmax()])
        return said(f"{error:.2e} away from the exact values, the original {own_error:.2e}, allowed {allowed:.2e}")
    return Error(OWN, name, rank, 1, 0.0)
