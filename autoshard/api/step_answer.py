"""The best whole step of a captured model: stages, micro-batches, recomputation, ZeRO and the mesh, together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.api.planned import CapturedModel, PlannedModel
from autoshard.cluster.hardware import Hardware
from autoshard.constraints.fusion_request import read_fusion
from autoshard.joint.found_steps import JointResult
from autoshard.joint.joint_plan import confirmed, joint_plan, step_seconds
from autoshard.joint.step_request_space import searched_step
from autoshard.rules.captured_batch import captured_with
from autoshard.rules.rebatch import batch_size
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
    found = searched_step(model.graph, hardware, wanted)
    origin = replace(model.origin, fusion=read_fusion(wanted.fuse))
    found, graph, plan = confirmed(found, hardware, origin)
    known = captured_with(graph, origin.model, dict(origin.arguments), batch_size(model.graph))
    if known is not graph:
        graph, plan = joint_plan(found, hardware, origin, known)
    return StepAnswer(found, PlannedModel(with_unused_fusion(plan, graph), graph, hardware), step_seconds(plan))
