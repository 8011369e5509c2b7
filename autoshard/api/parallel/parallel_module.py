"""`parallelize(model, plan)`: this rank's module, called, trained and saved as the original is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from autoshard.api import ranks
from autoshard.api.live_model import called_with, same_tensors
from autoshard.api.parallel.boundary import (
    fits,
    full_value,
    held_slices,
    local_shape,
    of_pairs,
    part_of,
    remaining_part,
    undistributed,
)
from autoshard.api.parallel.call_sizes import call_sizes
from autoshard.api.parallel.gradient_step import GradientStep, run_on_ranks, step_gradients
from autoshard.api.parallel.held_module import HeldModule, register
from autoshard.api.parallel.rank_model import RankModel, check_one_stage, fill, rank_model
from autoshard.api.planned import PlannedModel
from autoshard.emit.runtime import LossScaler, full_state_dict
from autoshard.errors import UsageError
from autoshard.graph_capture.call_form import Container, FixedValue, Form, ModelCall, rebuilt, user_forward
from autoshard.graph_capture.call_record import read
from autoshard.graph_capture.dynamic_sizes.graph_numbers import shape_at
from autoshard.graph_capture.plain_attributes import complex_buffers, keep_tensors
from autoshard.ir.program import LocalValue

_AGAIN = "autoshard.plan(model, inputs, …) with a batch of this form"


def parallelize(model: nn.Module, plan: PlannedModel, *, device: str | torch.device | None = None) -> ParallelModule:
    """The part of `model` that this rank of torchrun's runs under `plan`.

    It is called as the original: with the global batch, the same on every rank, or with this rank's part of it. It
    returns what the original does; a loss is that of the global batch, on every rank. Parameters are DTensors with the
    original's names, filled from rank 0's `model`: give them to any optimizer. After a backward their gradients are
    complete. A step of several micro-batches is taken by its `backward`. `device`: CPU, GPU or Ascend; default: what
    the process group is for, else what there is.
    """
    check_one_stage(plan.plan)
    module = same_tensors(model)
    keep_tensors(module)
    live = plan.live
    planned, call = (live.module, live.call) if live is not None else (module, _call_of(plan))
    kind = ranks.device_type(device)
    mesh = ranks.parallel_mesh(plan.plan.mesh, kind, ranks.on_host(plan.plan))
    part = rank_model(plan.plan, plan.graph, plan.simulated.program, mesh)
    planned_gradients = {one.path: one.trainable for one in part.program.parameters} if part.program.training else {}
    for path, parameter in module.named_parameters():
        if parameter.requires_grad != planned_gradients.get(path, parameter.requires_grad):
            was, now = ("frozen", "trained") if parameter.requires_grad else ("trained", "frozen")
            raise UsageError(f"{path} was planned as {was}, and the model has it as {now}", "plan this model")
    fill(part, dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]))
    return ParallelModule(model, part, call, planned, plan.plan.step.micro_batches)


def _call_of(plan: PlannedModel) -> ModelCall:
    """Call of a plan that was read back."""
    return read(plan.graph.call, plan.graph.inputs, str(plan.folder or "this plan"))


class ParallelModule(HeldModule):
    """This rank's part of a model, called as the original is."""

    def __init__(
        self, original: nn.Module, part: RankModel, call: ModelCall, planned: nn.Module, micro_batches: int = 1
    ) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        self._wrapped: list[Any] = [part, call, planned]  # in a list: nn.Module would list the rank's module as a child
        self._complex = complex_buffers(original)
        self._step = GradientStep(part)
        self._sizes: Mapping[str, int] = {}  # dynamic ones, of the last call
        register(self, part)
        super().train(part.program.training)
        forward = user_forward(original)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        run.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        self.forward = run

    def __reduce_ex__(self, protocol: Any) -> Any:
        """UsageError: a copy, or a file, would need the process groups of this one."""
        hint = "full_state_dict() for a file; for a second model, parallelize a copy of the original with the same plan"
        raise UsageError("a parallelised model can't be copied or pickled", hint)

    def train(self, mode: bool = True) -> Self:
        """The mode is the plan's: UsageError for the other one."""
        if mode != self._wrapped[0].program.training:
            planned, other = ("training", "training=False") if not mode else ("inference", "training=True")
            raise UsageError(f"this model was planned for {planned}", f"parallelize with a plan made with {other}")
        super().train(mode)
        return self

    def input_parts(self) -> dict[str, tuple[slice, ...]]:
        """Slices of each input that this rank needs: all that its loader has to read. A dim that is sharded in blocks
        is whole."""
        program, mesh = self._wrapped[0].program, self._wrapped[0].mesh
        values = {name: program.value(name) for name in program.inputs}
        return {name: held_slices(one.shape, str(one.layout), mesh) for name, one in values.items()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """The original's state dict, whole and on the CPU of rank 0, empty on the others; every rank must call it."""
        return of_pairs(full_state_dict(self._wrapped[0].module), self._complex)

    def grad_scaler(self, scale: float | None = None) -> LossScaler:
        """Loss scaler of a plan in fp16-mixed, used as torch.amp.GradScaler is: all ranks leave out the same steps.

        `scale`: the first; without it torch's.
        """
        return LossScaler(self._wrapped[0].mesh, scale)

    def backward(self, batches: Sequence[Any], scaler: LossScaler | None = None) -> Tensor:
        """The gradients of a step: forward and backward of each of its `micro_batches`; returns their mean loss.

        A batch is a tensor, a tuple of positional arguments, or a dict of keyword arguments, as a call takes them.
        Gradients are summed over devices once; a mean over labels is one over those of all micro-batches. `scaler`: of
        `grad_scaler`, by whose scale the gradients are then larger.
        """
        part, call, _ = self._wrapped
        if part.program.loss is None or call.summed:
            raise UsageError(
                "this plan has no loss to go backward from", "a loss in the model or loss=…; or loss.backward()"
            )
        if len(batches) != self.micro_batches:
            message = f"this plan's step has {self.micro_batches} micro-batches, got {len(batches)}"
            raise UsageError(message, "a list with a batch for each, or a plan with other micro_batches=…")
        return step_gradients(part, [self._locals(*_arguments(batch)) for batch in batches], scaler)

    def _locals(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """This rank's parts of the inputs of a call."""
        self.check_held()
        modes = [path for path, one in self.named_modules() if one.training != self.training]
        if modes:
            message = f"the mode of {modes[0]} was changed, and the plan has it as it was planned"
            raise UsageError(message, f"set {modes[0]}'s mode before planning")
        part, call, planned = self._wrapped
        actual, tensors = called_with(planned, call, args, kwargs, targets=_targets(call))
        if actual.form != call.form:
            raise UsageError(difference(call, actual), _AGAIN)
        values = [part.program.value(name) for name in part.program.inputs]
        ordered = [undistributed(x) for x in call.in_order(tensors)]
        self._sizes = call_sizes(part.graph, {v.tensor: x for v, x in zip(values, ordered, strict=True)}, part.mesh)
        return [self._local(value, x) for value, x in zip(values, ordered, strict=True)]

    def _shape(self, value: LocalValue) -> tuple[int, ...]:
        """Global shape of a value in this call."""
        return shape_at(self._wrapped[0].graph, value.tensor, self._sizes) if self._sizes else value.shape

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        part, call, _ = self._wrapped
        outputs = run_on_ranks(part, self._locals(args, kwargs), self._step)
        values = [part.program.value(name) for name in part.program.outputs]
        wholes = [
            full_value(x, self._shape(value), str(value.layout), part.mesh)
            for value, x in zip(values, outputs, strict=True)
        ]
        if not part.program.training:
            wholes = [x.detach() for x in wholes]
        elif part.program.loss is not None and not call.summed:  # only the loss was planned with gradients
            wholes = [
                x if value.name == part.program.loss else _without_gradient(x, value)
                for value, x in zip(values, wholes, strict=True)
            ]
        return rebuilt(call.returned, wholes[1:] if call.summed else wholes)

    def _local(self, value: LocalValue, x: Tensor) -> Tensor:
        mesh, name = self._wrapped[0].mesh, value.name
        layout, shape = str(value.layout), self._shape(value)
        dtype: torch.dtype = getattr(torch, value.dtype)
        if x.dtype != dtype and not (x.is_floating_point() and dtype.is_floating_point):
            raise UsageError(f"input {name}: expected {value.dtype}, got {str(x.dtype)[6:]}", _AGAIN)
        if x.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
            message = f"input {name} requires a gradient, and was planned without one: it would not be whole"
            raise UsageError(message, f"a plan made with {name}.requires_grad_(), or {name}.detach()")
        x = x.to(device=mesh.device, dtype=dtype)
        if tuple(x.shape) == shape:
            return part_of(x, layout, mesh)
        local, got = local_shape(shape, layout, mesh), tuple(x.shape)
        if got != local and (len(got) != len(local) or x.requires_grad or not fits(got, shape, local)):
            message = f"input {name}: expected the global shape {shape} or this rank's {local}, got {got}"
            raise UsageError(message, _AGAIN)
        return remaining_part(x, shape, layout, mesh)


class _NoGradient(torch.autograd.Function):
    """An output other than the loss: a backward from it is an error, as it would leave parameters without gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        message = "a backward from another output than the loss: this plan has gradients of the loss alone"
        raise UsageError(message, "the whole loss in the model, or loss=…; or this output after .detach()")


def _without_gradient(x: Tensor, value: LocalValue) -> Tensor:
    if not (value.requires_grad and torch.is_grad_enabled()):
        return x.detach()
    return cast(Tensor, _NoGradient.apply(x.detach(), torch.zeros((), requires_grad=True)))


def _arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def difference(planned: ModelCall, actual: ModelCall) -> str:
    """Sentence on the difference between the planned and the actual call."""
    constants = [dict(_constants(call.form)) for call in (planned, actual)]
    for name in sorted({*constants[0], *constants[1]}):
        expected, other = (values.get(name, "its default") for values in constants)
        if expected != other and planned.names == actual.names:
            return f"this model was planned with {name}={expected}, and is called with {name}={other}"
    names = f"{', '.join(planned.names)}, and is called with {', '.join(actual.names)}"
    return f"this model was planned for {names}{'' if planned.names != actual.names else ' in another form'}"


def _constants(form: Form) -> Iterator[tuple[str, Any]]:
    """Constants of a call that have a name, with their values."""
    if isinstance(form, Container):
        for key, item in zip(form.keys, form.items, strict=False):
            if isinstance(item, FixedValue):
                yield str(key), item.value
            yield from _constants(item)


def _targets(call: ModelCall) -> int:
    form: Any = call.form
    return len(form.items[form.keys.index("targets")].items)
