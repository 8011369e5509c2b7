"""A plan for parameter servers: a worker's program on one device, its tables elsewhere, and the servers' step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import graph_hash
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, ServerPlan
from autoshard.rules.host_tables import served_tables
from autoshard.servers.server_request import ROWWISE, SAME, ServerRequest
from autoshard.simulation.steps.server_step import served_hardware, with_server_step, worker_graph

WORKER = Mesh.parse("dp=1")


@dataclass(frozen=True)
class WorkerSearch:
    """`pins`: further ones. `step`: of one share."""

    graph: Graph
    hardware: Hardware
    pins: tuple[str, ...]
    step: StepRequest


def check_model(graph: Graph) -> None:
    """UsageError where servers can't train the model."""
    reasons = {
        "it has no trainable parameter": not any(p.trainable for p in graph.parameters),
        "it has no loss, so there is nothing to train": graph.loss is None,
        "it writes buffers in training, as batch norm does, and each worker would have others": bool(
            graph.buffer_updates
        ),
        "the scale of a loss in float16 is one of all shares": graph.precision == "fp16-mixed",
        "its sizes change from step to step": bool(graph.dynamic),
    }
    for reason, holds in reasons.items():
        if holds:
            hint = "--precision bf16-mixed" if "float16" in reason else "a package without --parameter-servers"
            raise UsageError(f"{graph.name} can't be trained on parameter servers: {reason}", hint)


def worker_search(graph: Graph, hardware: Hardware, request: ServerRequest, step: StepRequest) -> WorkerSearch:
    """Search of a worker: one device whose look-ups read rows from a host of unlimited memory, a share a worker."""
    check_model(graph)
    tables = sorted(p.path for p in graph.parameters if p.tensor in served_tables(graph))
    pins = tuple(f"{path}=host" for path in tables)
    return WorkerSearch(worker_graph(graph), served_hardware(hardware), pins, replace(step, micro_batches=None))


def server_plan(
    graph: Graph, hardware: Hardware, request: ServerRequest, step: StepRequest, pins: tuple[str, ...], share: Plan
) -> Plan:
    """The plan of a worker with its servers. `share`: what the search gave for a share."""
    least, most = request.worker_range
    assert request.servers is not None
    tables = tuple(p.path for p in graph.parameters if p.tensor in served_tables(graph))
    rowwise = (request.table_optimizer or ROWWISE) != SAME
    servers = ServerPlan(request.servers, least, most, request.bound, tables, rowwise, share_seconds=share.step_seconds)
    shares = step.micro_batches or most
    search = replace(share.search, pins=pins, step_options=replace(step, micro_batches=shares).text)
    plan = replace(share, graph_hash=graph_hash(graph), optimizer=graph.optimizer, servers=servers, search=search)
    whole = replace(share.step, micro_batches=shares)
    return with_server_step(replace(plan, step=whole), graph, hardware)
