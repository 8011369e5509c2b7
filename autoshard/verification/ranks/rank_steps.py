"""Steps on every rank: the package's own model, gradients, clipping and optimizer, in float64 from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.program.step_check import input_layout
from autoshard.verification.comparison.compare import RankResult, RankStep, gives_loss_alone, local_part
from autoshard.verification.original.float64 import exact_precision
from autoshard.verification.original.optimizers import set_options
from autoshard.verification.original.reference import Reference, State
from autoshard.verification.ranks.loaded_package import LoadedPackage


@dataclass(frozen=True)
class Job:
    """Global tensors and settings, the same for every rank. `input_layouts` are text, in the order of the inputs."""

    mesh: str
    state: State  # parameters and buffers by original name
    batches: tuple[tuple[torch.Tensor, ...], ...]
    input_layouts: tuple[str, ...]
    loss: int  # position of the loss among the outputs, -1 without one
    optimizer: str
    max_norms: tuple[float, ...]  # of each step
    seed: int
    micro_batches: int = 1  # a batch has the inputs of each, one after another
    part_stages: tuple[int, ...] = (0,)  # of each part
    evaluates: bool = False  # the first micro-batch, before the first step
    places: tuple[str, ...] = ()  # the mesh of each
    place_layouts: tuple[tuple[str, ...], ...] = ()  # `input_layouts` on each

    def at(self, mesh: Any) -> Job:
        """Job for the place of that ParallelMesh."""
        if not self.places:
            return self
        index = mesh.stages.index
        return replace(self, mesh=self.places[index], input_layouts=self.place_layouts[index])


def job_of(program: Program, reference: Reference) -> Job:
    """The job of verifying `program` against `reference`."""
    alone = gives_loss_alone(program)
    return Job(
        mesh=str(program.mesh),
        state=reference.parameters | reference.buffers,
        batches=tuple(step.inputs for step in reference.steps),
        input_layouts=_input_layouts(program),
        loss=(0 if alone else program.outputs.index(program.loss)) if program.loss else -1,
        optimizer=program.optimizer,
        max_norms=tuple(step.max_norm for step in reference.steps),
        seed=reference.seed,
        micro_batches=reference.micro_batches,
        part_stages=program.step.part_stages,
        evaluates=bool(reference.evaluation),
        places=tuple(map(str, program.meshes)) if program.step.placed else (),
        place_layouts=tuple(_input_layouts(program.of_stage(stage)) for stage in range(program.step.stages)),
    )


def _input_layouts(program: Program) -> tuple[str, ...]:
    return tuple(str(input_layout(program, name)) for name in program.inputs)


def place_axes(program: Program) -> list[dict[str, int]]:
    """Axes of each place's mesh; none if the plan has no places."""
    return [dict(mesh.axes) for mesh in program.meshes] if program.step.placed else []


def run_rank(package: LoadedPackage, mesh: Any, job: Job) -> RankResult:
    """Trains the package's model on this rank, a step for each batch. `mesh` is a ParallelMesh of any transport."""
    job = job.at(mesh)
    mesh.random.exact, mesh.random.seed = True, job.seed
    with exact_precision():
        model = package.model.build_model(mesh)
        _load(package.runtime, model, job.state)
        optimizer = package.train.make_optimizer(model) if job.loss >= 0 else None
        if optimizer is not None:
            set_options(optimizer, job.optimizer)
        gradients: State = {}
        evaluation: tuple[torch.Tensor, ...] = ()
        if job.evaluates:
            first = _local_inputs(job.batches[0], job, mesh.rank)[: len(job.input_layouts)]
            evaluation = _outputs(package.evaluation.evaluated(model, mesh, first), job)
        steps = []
        for number, batch in enumerate(job.batches):
            mesh.random.step = number
            inputs: Any = _local_inputs(batch, job, mesh.rank)
            if optimizer is None:
                with torch.no_grad():
                    outputs, norm = [model(*inputs)], 0.0
            else:
                if job.micro_batches > 1:
                    count = len(job.input_layouts)
                    inputs = [inputs[i : i + count] for i in range(0, len(inputs), count)]
                norm = float(package.train.train_step(model, optimizer, mesh, inputs, job.max_norms[number])[1])
                seen = package.recorder.take(mesh.global_rank)
                outputs, gradients = seen.outputs, gradients or seen.gradients
            step_outputs = tuple(output for returned in outputs for output in _outputs(returned, job))
            steps.append(RankStep(step_outputs, norm, *_stored(package.runtime, model)))
        return RankResult(gradients, tuple(steps), evaluation)


def _load(runtime: Any, model: torch.nn.Module, state: State) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        sharding = runtime.sharding(tensor)
        runtime.assign(tensor, next(state[name] for name in (sharding.name, *sharding.ties) if name in state))


def _local_inputs(batch: Sequence[torch.Tensor], job: Job, rank: int) -> list[torch.Tensor]:
    mesh = Mesh.parse(job.mesh)
    pairs = zip(batch, job.input_layouts * job.micro_batches, strict=True)
    return [local_part(whole, Layout.parse(layout), mesh, rank).clone() for whole, layout in pairs]


def _outputs(outputs: Any, job: Job) -> tuple[torch.Tensor, ...]:
    """Outputs in the order of the original model; the package returns the loss first."""
    ordered = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if job.loss > 0:
        ordered.insert(job.loss, ordered.pop(0))
    return tuple(output.detach().clone() for output in ordered)


def _stored(runtime: Any, model: torch.nn.Module) -> tuple[State, State]:
    """Local parameters and buffers by original name."""
    return tuple(  # type: ignore[return-value]
        {runtime.sharding(t).name: runtime.local(t).detach().clone() for t in tensors}
        for tensors in (model.parameters(), model.buffers())
    )
