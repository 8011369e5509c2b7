"""The best whole step of a captured model: stages, micro-batches, recomputation, ZeRO and the mesh, together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.api.planned import CapturedModel, PlannedModel
from autoshard.cluster.hardware import Hardware
from autoshard.constraints.fusion_request import read_fusion
from autoshard.constraints.step_request import AUTO
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.joint.found_steps import JointResult
from autoshard.joint.joint_plan import confirmed, joint_plan, step_seconds
from autoshard.joint.outer_space import OuterChoice
from autoshard.joint.step_request_space import searched_step
from autoshard.rules.captured_batch import captured_with
from autoshard.rules.rebatch import batch_size
from autoshard.search.build_plan import Origin
from autoshard.search.search_request import SearchRequest
from autoshard.simulation.fusion_sizes import with_unused_fusion


@dataclass(frozen=True, eq=False)
class StepAnswer:
    """What was found, and its plan, of the graph at the batch of its micro-batch."""

    found: JointResult
    plan: PlannedModel
    program_seconds: float


def planned_step(model: CapturedModel, hardware: Hardware, wanted: SearchRequest) -> StepAnswer:
    """UsageError for settings that such a search does not have, InfeasibleError where nothing divides or fits."""
    origin = replace(model.origin, fusion=read_fusion(wanted.fuse))
    found, graph, plan = _made(model.graph, hardware, wanted, origin)
    known = captured_with(graph, origin.model, dict(origin.arguments), batch_size(model.graph))
    if known is not graph:
        graph, plan = joint_plan(found, hardware, origin, known)
    return StepAnswer(found, PlannedModel(with_unused_fusion(plan, graph), graph, hardware), step_seconds(plan))


def _made(graph: Graph, hardware: Hardware, wanted: SearchRequest, origin: Origin) -> tuple[JointResult, Graph, Plan]:
    """The best step that can be made a plan. What parts of a model may not share, a weight or a buffer, is known of the
    parts alone: where the best can't be made, a search of fewer parts follows, as far as the request leaves that."""
    found = searched_step(graph, hardware, wanted)
    try:
        return confirmed(found, hardware, origin)
    except UsageError as error:
        fewer = _fewer_parts(wanted, found.best.problem.choice)
        if fewer is None:
            raise
        found, graph, plan = _made(graph, hardware, fewer, origin)
        return replace(found, undivided=((error.message, 1), *found.undivided)), graph, plan


def _fewer_parts(wanted: SearchRequest, choice: OuterChoice) -> SearchRequest | None:
    """With one part a stage, else with one stage; None where that was not left open."""
    step = wanted.step
    if choice.virtual_stages > 1 and step.virtual_stages in (None, AUTO) and step.schedule in (None, AUTO):
        return replace(wanted, step=replace(step, virtual_stages=1))
    if choice.stages > 1 and step.stages in (None, AUTO) and not step.pins and step.schedule in (None, AUTO):
        return replace(wanted, step=replace(step, stages=1, virtual_stages=None))
    return None
