"""A step on parameter servers: workers pull, compute and push shares; servers send, add up and update; events on links.

A worker has its device's link to the network; a server has those of a whole node, and its memory; where devices are
processors and the profile has no [host], those of one device. Transfers of one link
run one after another in each direction; a worker pulls for its next share while it computes. Updates run in a server's
memory: what they read and write, by the host's bandwidth.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

from autoshard.cluster.hardware import Hardware
from autoshard.costs.device_bytes import ON_SERVERS
from autoshard.costs.host_memory import near_host
from autoshard.ir.graph import DTYPE_BYTES, Graph
from autoshard.ir.plan import Plan, ServerPlan
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.rules.host_tables import TABLE, served_tables
from autoshard.simulation.step_account import OPTIMIZER, StepAccount, stage_account

WAITS = "pulls and pushes"
STATE_PASSES = {"adamw": 7.0, "sgd": 3.0}  # reads and writes of a parameter's size in an update: p, its gradient, state
ADDED_PASSES = 3.0  # adding a share's gradient to the others' sum
ROW_PASSES = 4.0  # row-wise Adagrad: rows and their gradients are read, rows written, sums of 1 / width beside them
STATE_COPIES = {"adamw": 3.0, "sgd": 1.0}  # of a parameter on a server: itself and its state
ID_BYTES = DTYPE_BYTES["int64"]
ROUNDS = 8  # steps of asynchronous training that are simulated; the first half is not counted


@dataclass(frozen=True)
class ServerCosts:
    """Seconds and bytes of one share, and of an update on one server. `dense_bytes`: all parameters that are no tables;
    `rows_bytes`: rows that a share reads; `ids_bytes`: their ids."""

    share_seconds: float
    dense_bytes: float
    rows_bytes: float
    ids_bytes: float
    add_seconds: float
    update_seconds: float
    worker_rate: float  # bytes/s of a worker's link, one way
    server_rate: float
    latency: float
    server_bytes: float


def server_costs(plan: Plan, graph: Graph, hardware: Hardware) -> ServerCosts:
    servers, small = plan.servers, worker_graph(graph)
    tables = served_tables(graph)
    parameters = [p for p in graph.parameters if p.trainable and p.tensor not in tables]
    dense = float(sum(graph.tensor(p.tensor).bytes for p in parameters))
    ids = sum(_ids(graph, table) for table in tables)
    rows = float(sum(small.tensor(table).bytes for table in tables))
    held = float(sum(graph.tensor(table).bytes for table in tables))
    trained = {p.tensor for p in graph.parameters if p.trainable}
    row_bytes = float(sum(small.tensor(table).bytes for table in tables if table in trained))
    shares = plan.step.micro_batches if servers.staleness is None else 1
    host, passes = near_host(hardware), STATE_PASSES[graph.optimizer]
    devices = hardware.devices_per_node if hardware.host else 1
    rate = host.memory_bandwidth * host.memory_efficiency * devices / hardware.devices_per_node * servers.count
    whole = held if not servers.rowwise else 0.0
    touched = min(row_bytes * shares, held) if servers.rowwise else 0.0
    link = hardware.links[-1]
    state = STATE_COPIES[graph.optimizer]
    return ServerCosts(
        share_seconds=servers.share_seconds,
        dense_bytes=dense,
        rows_bytes=rows,
        ids_bytes=float(ID_BYTES * ids),
        add_seconds=ADDED_PASSES * (dense + row_bytes) / rate,
        update_seconds=(passes * (dense + whole) + ROW_PASSES * touched) / rate,
        worker_rate=link.bandwidth * link.efficiency,
        server_rate=link.bandwidth * link.efficiency * min(devices, hardware.links[-1].devices),
        latency=link.latency_seconds,
        server_bytes=(dense * state + held * (state if whole else 1.0)) / servers.count,
    )


def _ids(graph: Graph, table: str) -> int:
    operands = [op.operands[1] for op, position in graph.consumers[table] if position == TABLE]
    return sum(graph.tensor(name).numel for name in operands if name is not None)


def worker_graph(graph: Graph) -> Graph:
    """The graph as a worker runs it: a table has as many rows as a share may read, and servers run the optimizer."""
    sizes = {table: _ids(graph, table) for table in served_tables(graph)}
    tensors = tuple(
        replace(tensor, shape=(min(tensor.shape[0], max(1, sizes[tensor.name])), *tensor.shape[1:]))
        if tensor.name in sizes
        else tensor
        for tensor in graph.tensors
    )
    return replace(graph, tensors=tensors, optimizer=ON_SERVERS)


def with_server_step(plan: Plan, graph: Graph, hardware: Hardware) -> Plan:
    """The plan of a worker's share with what is predicted of its servers, which is what it predicts of a step."""
    costs = server_costs(plan, graph, hardware)
    seconds, worker, server = server_step(costs, plan.servers, plan.step.micro_batches)
    pulled = costs.dense_bytes + costs.rows_bytes
    servers = replace(
        plan.servers, step_seconds=seconds, update_seconds=costs.update_seconds,
        worker_busy_seconds=worker, server_busy_seconds=server, pulled_bytes=pulled,
        pushed_bytes=pulled + costs.ids_bytes, server_bytes=costs.server_bytes,
    )  # fmt: skip
    step = replace(plan.step, predicted_seconds=seconds)
    return replace(plan, servers=servers, step=step)


def worker_program(plan: Plan, graph: Graph) -> tuple[Plan, Program, Graph]:
    """Plan, program and graph of a worker alone, for a share: forward and backward; servers run the optimizer."""
    worker, small = replace(plan, servers=ServerPlan(), step=replace(plan.step, micro_batches=1)), worker_graph(graph)
    return worker, lower(worker, small), small


def served_hardware(hardware: Hardware) -> Hardware:
    """The profile with room for every table: where servers hold them."""
    return replace(hardware, host=replace(near_host(hardware), memory_bytes=math.inf))


def server_account(plan: Plan, share: StepAccount) -> StepAccount:
    """A worker's step: its shares, the servers' update, and the rest, in which it waits for them."""
    servers, (stage,) = plan.servers, share.stages
    shares = plan.step.micro_batches / servers.most_workers
    computed = {kind: seconds * shares for kind, seconds in stage.parts if kind != OPTIMIZER}
    computed |= {OPTIMIZER: servers.update_seconds} if servers.staleness is None else {}
    account = stage_account(servers.step_seconds, computed, stage.peak_bytes, WAITS)
    return StepAccount(servers.step_seconds, (account,))


def server_step(costs: ServerCosts, servers: ServerPlan, shares: int) -> tuple[float, float, float]:
    """Seconds of a step, and those that a worker computes and a server sends, receives or updates in it."""
    links = _Links(costs, servers)
    count = servers.most_workers
    if servers.staleness is None:
        end = links.run(shares, count, pull_dense_once=True)
        last = end + costs.update_seconds
        return last, costs.share_seconds * shares / count, links.server_busy / servers.count + costs.update_seconds
    most = min(2 * count, servers.staleness // 2 + 1)  # outstanding: each sees those before and after it
    every = links.run(shares * ROUNDS, count, pull_dense_once=False, most=most, applied=costs.update_seconds)
    ends = sorted(links.ends)
    half = len(ends) // 2
    seconds = (every - ends[half - 1]) / (len(ends) - half) * shares if half else every / ROUNDS
    busy = links.server_busy / servers.count / ROUNDS + costs.update_seconds * shares
    return seconds, costs.share_seconds * shares / count, busy


class _Links:
    """Time at which each link is free; a transfer to or from all servers is even over them."""

    def __init__(self, costs: ServerCosts, servers: ServerPlan) -> None:
        self.costs, self.count = costs, servers.count
        self.server = {"out": 0.0, "in": 0.0}  # all servers are alike
        self.worker: dict[tuple[int, str], float] = {}
        self.server_busy, self.ends = 0.0, list[float]()

    def transfer(self, worker: int, direction: str, size: float, ready: float) -> float:
        """The end; `direction`: of the worker's link."""
        link, other = (worker, direction), "out" if direction == "in" else "in"
        start = max(ready, self.worker.get(link, 0.0), self.server[other])
        at_server = size / self.count / self.costs.server_rate
        self.server[other] = start + at_server
        self.server_busy += at_server * self.count
        self.worker[link] = start + size / self.costs.worker_rate
        return max(self.worker[link], self.server[other]) + self.costs.latency

    def run(
        self, shares: int, workers: int, *, pull_dense_once: bool, most: int | None = None, applied: float = 0.0
    ) -> float:
        """The end of the last push. Each share goes to the worker that may pull first; `most` are outstanding."""
        costs = self.costs
        free = [(0.0, 0.0, number) for number in range(workers)]  # when it may pull, and when it may compute
        pulled: set[int] = set()
        updated = 0.0
        for share in range(shares):
            ready, computes, number = heapq.heappop(free)
            if most is not None and share >= most:
                ready = max(ready, sorted(self.ends)[share - most])
            dense = 0.0 if pull_dense_once and number in pulled else costs.dense_bytes
            pulled.add(number)
            there = self.transfer(number, "in", dense + costs.rows_bytes, ready)
            begin = max(there, computes)
            done = begin + costs.share_seconds
            sent = self.transfer(number, "out", costs.dense_bytes + costs.rows_bytes + costs.ids_bytes, done)
            updated = max(updated, sent) + costs.add_seconds + applied
            self.ends.append(updated)
            self.server_busy += costs.add_seconds * self.count
            heapq.heappush(free, (begin, done, number))
        return max(self.ends)
