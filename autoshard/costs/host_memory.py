"""Look-ups on the host of a device: what passes the link between the two, and what the host's own memory takes.

    t = latency + bytes / (bandwidth * efficiency)     a transfer over the link: ids down, rows up; backward, rows down
    t = bytes / (bandwidth * efficiency / devices)     work in host memory, which all devices of a node share

The host looks up itself, so it issues nothing else meanwhile, and a transfer to the host waits for the device: in a
step, all of it runs in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cluster.hardware import Hardware, NodeHost, backend_of
from autoshard.costs.compute import traffic
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op
from autoshard.ir.local_op import LocalOp, LocalTensor, local_op
from autoshard.rules.algebra.variant_record import LocalTensors
from autoshard.rules.host_tables import TABLE
from autoshard.rules.operators import record

TO_HOST, LOOK_UP, TO_DEVICE = "to host", "look up", "to device"


@dataclass(frozen=True)
class HostTask:
    """TO_HOST, LOOK_UP or TO_DEVICE, its seconds, and the bytes that pass the link or are read and written."""

    what: str
    seconds: float
    bytes: float


Tasks = tuple[HostTask, ...]


def host_of(hardware: Hardware) -> NodeHost:
    """Host of a node; UsageError where the profile has none."""
    if hardware.host is None:
        hint = "a profile with a [host] table: autoshard profiles NAME > mine.toml"
        raise UsageError(f"the profile {hardware.name} has no [host]: nothing can be placed on the host", hint)
    return hardware.host


def near_host(hardware: Hardware) -> NodeHost:
    """Host of a node; for a processor in a profile without [host], the device itself, which copies at its own rate."""
    if hardware.host is not None or backend_of(hardware) != "gloo":
        return host_of(hardware)
    rate, devices = hardware.memory_bandwidth, hardware.devices_per_node
    return NodeHost(hardware.memory_bytes * devices, hardware.usable_memory, rate * devices, 1.0, rate, 0.0, 1.0)


def link_seconds(hardware: Hardware, size: float) -> float:
    """Seconds of one transfer between a device and its host; 0 for no bytes."""
    host = near_host(hardware)
    return host.link_latency_seconds + size / (host.link_bandwidth * host.link_efficiency) if size else 0.0


def memory_seconds(hardware: Hardware, size: float) -> float:
    """Reading and writing `size` bytes of host memory for one device, while the others of the node do the same."""
    host = near_host(hardware)
    return size * hardware.devices_per_node / (host.memory_bandwidth * host.memory_efficiency)


def host_tasks(
    hardware: Hardware, graph: Graph, op: Op, operands: LocalTensors, results: tuple[LocalTensor, ...], variant: str
) -> tuple[Tasks, Tasks]:
    """Forward and backward of a look-up of local tensors, each in order; no backward in a graph without a loss."""
    local = local_op(op, operands, results, 0.0, variant)
    there, back = traffic(local) if record(op.target).traffic else _rows(local)
    inputs = [x for position, x in enumerate(operands) if position != TABLE and x is not None]
    rows = float(sum(result.bytes for result in results))
    learnt = float(sum(x.bytes for x in inputs if x.requires_grad))  # weights of ids
    forward = _tasks(hardware, float(sum(x.bytes for x in inputs)), there, rows)
    trained = graph.loss is not None and any(x is not None and x.requires_grad for x in operands)
    return forward, _tasks(hardware, rows, back, learnt) if trained else ()


def _rows(op: LocalOp) -> tuple[float, float]:
    """Bytes of an index operator: the rows and the indices; backward zeroes a whole gradient and adds rows to it."""
    rows, indices = op.results[0].bytes, sum(x.bytes for x in op.operands[TABLE + 1 :] if x is not None)
    return 2.0 * rows + indices, op.operand(TABLE).bytes + 3.0 * rows


def _tasks(hardware: Hardware, down: float, work: float, up: float) -> Tasks:
    """Tasks for bytes to the host, bytes of its memory, bytes to the device."""
    steps = (
        HostTask(TO_HOST, link_seconds(hardware, down), down),
        HostTask(LOOK_UP, memory_seconds(hardware, work), work),
        HostTask(TO_DEVICE, link_seconds(hardware, up), up),
    )
    return tuple(step for step in steps if step.bytes)


def seconds_of(tasks: Tasks, *, link: bool) -> float:
    """Seconds of the tasks that pass the link, or of the rest."""
    return sum(task.seconds for task in tasks if (task.what != LOOK_UP) == link)
