"""A model that exists as an object: copied without its memory, called with flat tensors, captured."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.api.called_model import LiveModel
from autoshard.errors import UsageError
from autoshard.graph_capture.call_form import (
    Arguments,
    LossFunction,
    ModelCall,
    arguments_of,
    by_name,
    call_by,
    model_call,
    positions_of,
    user_forward,
)
from autoshard.graph_capture.capture import capture_model
from autoshard.graph_capture.dynamic_export.concrete import with_sizes
from autoshard.graph_capture.load_model import find_callable
from autoshard.graph_capture.plain_attributes import keep_tensors
from autoshard.graph_capture.tracing import LARGEST_ELEMENTS
from autoshard.graph_capture.tracing.own_gradients import cached_answers
from autoshard.ir.graph import Graph
from autoshard.rules.resize.asked_sizes import LESS, LONGER, MORE, with_free_sizes
from autoshard.rules.resize.captured_length import sequence_length


def live_model(
    model: nn.Module, inputs: Any, targets: Any, loss: LossFunction | str | None, sums: str = "missing"
) -> LiveModel:
    """`model` ready to be captured, itself unchanged. `inputs` and `targets`: see `autoshard.plan`."""
    if not isinstance(model, nn.Module):
        message = f"expected a model, got {model if isinstance(model, type) else type(model).__name__}"
        raise UsageError(message, "an nn.Module, built: Net(), not Net; or 'file.py:callable'")
    module = same_tensors(model)
    keep_tensors(module)
    function = find_callable(loss) if isinstance(loss, str) else loss
    call, tensors = model_call(by_name(module, arguments_of(module, inputs, targets, function)), (), function, sums)
    return LiveModel(module, call, tensors)


def captured(
    live: LiveModel,
    precision: str,
    optimizer: str,
    training: bool,
    keep_modes: bool = False,
    dynamic: tuple[str, ...] = (),
) -> Graph:
    """The graph of a call. The call then knows what it returns."""
    module = call_by(same_tensors(live.module), live.call)
    name = type(live.module).__name__
    graph = capture_model(module, live.tensors, precision, optimizer, training, name, keep_modes, dynamic)
    trains = training and any(graph.tensor(name).requires_grad for name in graph.outputs)
    if trains and live.call.sums == "missing" and graph.loss is None and not live.call.summed:
        live.call.sums = "always"  # its numbers are of parameters alone: no loss
        return captured(live, precision, optimizer, training, keep_modes, dynamic)
    return graph


def recaptured(live: LiveModel, graph: Graph) -> Graph:
    """`graph`, the capture of `live`, with what another capture shows of its sizes."""

    def recapture(samples: int, length: int) -> Graph:
        other = LiveModel(live.module, copy.copy(live.call), with_sizes(live.tensors, samples, length))
        return captured(other, graph.precision, graph.optimizer, graph.training)

    held = sum(x.numel() for x in live.tensors if not x.is_meta)  # of these elements another batch is made, too
    held *= LONGER if sequence_length(graph) else 1
    with cached_answers():
        return with_free_sizes(graph, recapture, max(LESS, min(MORE, LARGEST_ELEMENTS // max(1, held))))


def same_tensors(model: nn.Module) -> nn.Module:
    """A copy of the modules on the very same parameters and buffers."""
    try:
        return copy.deepcopy(model, {id(x): x for x in _held(model)})
    except Exception as error:
        what = f"{type(model).__name__} can't be copied: {type(error).__name__}: {error}"
        raise UsageError(
            what, "a model that copy.deepcopy takes: no locks, streams or files among its attributes"
        ) from error


def _held(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers of the model, and tensors computed from them before a forward, which `copy.deepcopy`
    refuses: the weights of `torch.nn.utils.weight_norm` and `prune`."""
    attributes = (x for module in model.modules() for x in vars(module).values())
    computed = [x for x in attributes if isinstance(x, Tensor) and not x.is_leaf]
    return [*model.parameters(), *model.buffers(), *computed]


def on_cpu(live: LiveModel) -> LiveModel:
    """Copy of the model and inputs with tensors of its own, on the CPU; tensors on meta become zeros."""
    with torch.no_grad():
        memo = {id(x): _real(x) for x in _held(live.module)}
    module = copy.deepcopy(live.module, memo)
    return LiveModel(call_by(module, live.call), live.call, tuple(_real(x) for x in live.tensors))


def _real(x: Tensor) -> Tensor:
    real = torch.zeros_like(x, device="cpu") if x.is_meta else x.detach().to("cpu", copy=True)
    return nn.Parameter(real, x.requires_grad) if isinstance(x, nn.Parameter) else real


def called_with(
    module: nn.Module, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: int
) -> tuple[ModelCall, tuple[Tensor, ...]]:
    """A later call in the form of the first: the last `targets` positional arguments are the loss function's."""
    count = len(args) - targets
    inputs, loss_args = args[:count], args[count:]
    split = arguments_of(module, dict(kwargs), loss_args or None, call.loss)
    arguments = Arguments(inputs, split.kwargs, split.targets, split.labels)
    return model_call(by_name(module, arguments), positions_of(user_forward(module)), call.loss, call.sums)
