"""A plan for one way in which a sharded function is called, and what runs it on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard import workflow
from autoshard.api import ranks
from autoshard.api.called_model import LiveModel
from autoshard.api.live_model import captured as graph_of
from autoshard.api.parallel.function_module import FunctionModule
from autoshard.api.parallel.gradient_step import GradientStep
from autoshard.api.parallel.rank_model import RankModel, rank_model
from autoshard.api.planned import CapturedModel, PlannedModel
from autoshard.api.settings import pin_texts, read_hardware, read_mesh
from autoshard.api.strategies import Strategies, outside, pins
from autoshard.api.verbs import planned
from autoshard.cluster.hardware import Hardware
from autoshard.constraints.count_layouts import meshes_with
from autoshard.constraints.held_pins import held_pins
from autoshard.graph_capture.call_form import Form, ModelCall
from autoshard.ir import graph_json, plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.search.mesh_search import FINALISTS, meshes
from autoshard.search.objectives import MEMORY, RATIO, parse_level
from autoshard.search.search_request import SearchRequest

PROFILES = {"cpu": "cpu-local", "npu": "ascend-910a"}
GPUS = {
    "H200": "h200-141g-sxm",
    "H100": "h100-80g-sxm",
    "A100-SXM4-40": "a100-40g-sxm",
    "B200": "b200-180g-sxm",
    "V100": "v100-32g-sxm2",
    "L40S": "l40s-48g",
    "4090": "rtx-4090-24g",
}  # part of what CUDA calls a device -> its profile


@dataclass(frozen=True)
class ShardRequest:
    """Arguments of `shard`, read. `device` is torch's type of device."""

    said: Strategies
    device: str
    level: int
    mesh: Mesh | None
    hardware: Hardware
    pins: tuple[str, ...]
    cache: str | None


def request_of(
    said: Strategies, device: Any, level: Any, mesh: Any, hardware: Any, more: Any, cache: Any
) -> ShardRequest:
    """Request for the arguments of `shard`; UsageError names one that is not valid."""
    kind = ranks.device_type(device)
    profile = read_hardware(hardware if hardware is not None else _profile(kind))
    return ShardRequest(said, kind, parse_level(str(level)), read_mesh(mesh), profile, pin_texts(more), cache)


def _profile(kind: str) -> str:
    if kind != "cuda":
        return PROFILES[kind]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((profile for part, profile in GPUS.items() if part in name), "a100-80g-sxm")


@dataclass(frozen=True)
class TensorSpec:
    """Properties of a caller's tensor that a plan depends on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_distributed: bool


@dataclass(frozen=True, eq=False)
class CallKind:
    """Kind of call. `modes`: of the modules; `lifted`: how many tensors a function refers to."""

    form: Form
    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    gradients: bool
    modes: tuple[bool, ...]
    lifted: int
    constants: tuple[tuple[str, Any], ...] = ()

    def same(self, other: CallKind) -> bool:
        mine, theirs = ((k.form, k.specs, k.gradients, k.modes, k.constants) for k in (self, other))
        return mine == theirs


@dataclass(frozen=True, eq=False)
class Border:
    """Layouts of a tensor outside and inside the sharded part; `shape` is global."""

    name: str
    shape: tuple[int, ...]
    outside: str
    inside: str


@dataclass(frozen=True, eq=False)
class Variant:
    """Plan, rank's model and gradient step that run one kind of call."""

    kind: CallKind
    plan: PlannedModel
    rank: RankModel
    step: GradientStep
    returned: Form
    inputs: tuple[Border, ...]
    outputs: tuple[Border, ...]  # of the function, without the sum that stands for a loss


def variant_of(kind: CallKind, module: nn.Module, request: ShardRequest, before: Variant | None) -> Variant:
    """Variant planned on rank 0; parameters stay as an earlier variant holds them."""
    message = ranks.from_rank_0(lambda: _planned_on_rank_0(kind, module, request, before), request.device)
    plan_text, graph_text, returned, summed = message
    plan, graph = plan_json.loads(plan_text), graph_json.loads(graph_text, "the graph of rank 0")
    model = PlannedModel(plan, graph, request.hardware)
    program = model.simulated.program
    rank = rank_model(plan, graph, program, ranks.parallel_mesh(plan.mesh, request.device, ranks.on_host(plan)))
    names = program.outputs[1:] if summed else program.outputs
    said = request.said
    ins = [
        Border(name, program.value(name).shape, str(outer), str(program.value(name).layout))
        for name, outer in zip(program.inputs, _outer(kind, said, graph, plan.mesh), strict=True)
    ]
    whole = replace(said, dataset="full_batch") if not isinstance(said.dataset, str) else said
    outs = [
        Border(name, shape, str(outside(whole, number, len(shape), plan.mesh, name)), str(program.value(name).layout))
        for number, name in enumerate(names)
        for shape in [program.value(name).shape]
    ]
    return Variant(kind, model, rank, GradientStep(rank), returned, tuple(ins), tuple(outs))


def _outer(kind: CallKind, said: Strategies, graph: Graph, mesh: Mesh) -> list[Any]:
    full = replace(said, dataset="full_batch")
    n_inputs = len(kind.specs) - kind.lifted
    return [
        outside(full if number >= n_inputs or spec.is_distributed else said, number, len(spec.shape), mesh, name)
        for number, (name, spec) in enumerate(zip(graph.inputs, kind.specs, strict=True))
    ]


def _planned_on_rank_0(
    kind: CallKind, module: nn.Module, request: ShardRequest, before: Variant | None
) -> tuple[str, str, Any, bool]:
    n_inputs = len(kind.specs) - kind.lifted
    shapes = [_global(kind, request.said, number, number >= n_inputs) for number in range(len(kind.specs))]
    examples = tuple(
        torch.empty(shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad and kind.gradients)
        for shape, spec in zip(shapes, kind.specs, strict=True)
    )
    call = ModelCall(kind.form, kind.names, None, "always" if kind.gradients else "never")
    live = LiveModel(module, call, examples)
    graph = workflow.checked(graph_of(live, "fp32", "adamw", kind.gradients, keep_modes=True))
    outputs = graph.outputs[1:] if call.summed else graph.outputs
    own_names = module.referred() if isinstance(module, FunctionModule) else ()
    lifted = dict(zip(own_names, graph.inputs[n_inputs:], strict=True))
    if before is None:
        own_pins = pins(request.said, graph, outputs, lifted)
    else:
        own_pins = (
            *pins(replace(request.said, parameters=()), graph, outputs, lifted),
            *held_pins(before.plan.plan, graph),
        )
    model = _best(graph, request, (*own_pins, *request.pins), before)
    return plan_json.dumps(model.plan), graph_json.dumps(model.graph), call.returned, call.summed


def _global(kind: CallKind, said: Strategies, number: int, is_lifted: bool) -> tuple[int, ...]:
    """The shape of the whole tensor, of which each rank may give a part."""
    spec = kind.specs[number]
    if is_lifted or spec.is_distributed or said.dataset == "full_batch" or not spec.shape:
        return spec.shape
    if said.dataset == "data_parallel":
        return (spec.shape[0] * ranks.started(), *spec.shape[1:])
    counts = said.dataset[number] if number < len(said.dataset) else ()
    if not isinstance(counts, tuple) or len(counts) != len(spec.shape):
        return spec.shape  # which `outside` reports
    return tuple(size * count for size, count in zip(spec.shape, counts, strict=True))


def _best(graph: Graph, request: ShardRequest, texts: Sequence[str], before: Variant | None) -> PlannedModel:
    """Plan on the mesh that was given or is in use already, else on the best mesh that has the counts."""
    wanted = SearchRequest(level=request.level, pins=tuple(texts))
    model = CapturedModel(graph)
    mesh = before.plan.plan.mesh if before is not None else request.mesh
    devices, counts = ranks.started(), request.said.counts()
    if mesh is not None:
        candidates: tuple[Mesh, ...] = (mesh,)
    elif counts:
        candidates = meshes_with(counts, meshes(request.hardware, devices), devices)[:FINALISTS]
    else:
        return planned(model, request.hardware, replace(wanted, devices=devices), request.cache)
    plans = [planned(model, request.hardware, replace(wanted, mesh=one), request.cache) for one in candidates]
    return min(plans, key=lambda candidate: _figure(candidate.plan, request.level))


def _figure(plan: Plan, level: int) -> float:
    figures: Mapping[int, float] = {RATIO: plan.certificate.level_objective, MEMORY: plan.predicted_peak_bytes}
    return figures.get(level, plan.predicted_seconds)
