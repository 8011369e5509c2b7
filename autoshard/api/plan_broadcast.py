"""Broadcast of a plan from rank 0 to the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autoshard.api import ranks
from autoshard.api.called_model import LiveModel
from autoshard.api.live_model import live_model
from autoshard.api.planned import CapturedModel, PlannedModel
from autoshard.cluster.hardware import parse_hardware
from autoshard.ir import graph_json, plan_json

PlanMessage = tuple[str, str, str, tuple[str, ...], Any, bool]


def from_rank_0(make: Callable[[], PlannedModel], model: Any = None, args: tuple[Any, ...] = ()) -> PlannedModel:
    """Plan that `make` returns on rank 0, on every rank, with that rank's own `model`. `args`: its inputs, targets,
    loss, and whether it is trained."""
    message = ranks.from_rank_0(lambda: _encoded(make()), ranks.device_type(None))
    return _decoded(message, model, args)


def _encoded(planned: PlannedModel) -> PlanMessage:
    call = planned.live.call if planned.live else None
    texts = plan_json.dumps(planned.plan), graph_json.dumps(planned.graph), planned.plan.hardware_text
    return *texts, planned.ignored, call.returned if call else None, bool(call and call.summed)


def _decoded(message: PlanMessage, model: Any, args: tuple[Any, ...]) -> PlannedModel:
    plan_text, graph_text, hardware_text, ignored, returned, summed = message
    live: LiveModel | None = None
    if isinstance(model, nn.Module):
        inputs, targets, loss, training = args
        live = live_model(model, inputs, targets, loss, "missing" if training else "never")
        live.call.returned, live.call.summed = returned, summed
    elif isinstance(model, CapturedModel):
        live = model.live
    plan, graph = plan_json.loads(plan_text), graph_json.loads(graph_text, "the graph of rank 0")
    return PlannedModel(plan, graph, parse_hardware(hardware_text), live, None, ignored)
