# mypy: ignore-errors
# ruff: noqa: I001
"""Ray's actors: a server and a worker, each a process; what they do is in runtime/servers."""

from __future__ import annotations

import os

import ray
import torch
from ray.exceptions import RayActorError

from initial import INITIAL
from model_parallel import MESH, MICRO_BATCHES, OPTIMIZER, build_model
from runtime.servers.parameter_server import Outdated, ParameterServer
from runtime.servers.served import served_parameters, stored_tensors
from runtime.servers.server_client import ServerClient
from runtime.servers.share_worker import ShareResult, ShareWork, ShareWorker
from server_plan import SERVERS, STALENESS, TABLE_OPTIMIZER, TABLES

LOST = (RayActorError, Outdated)  # a server has ended, or gone back
GONE, NEW = "servers gone", "worker new"


def make_server(number: int, weight_decay: float | None = None) -> ParameterServer:
    shares = MICRO_BATCHES if STALENESS is None else 0
    return ParameterServer(
        served_parameters(stored_tensors(build_model, MESH), TABLES, SERVERS), SERVERS, number, optimizer=OPTIMIZER,
        rowwise=TABLE_OPTIMIZER == "rowwise-adagrad", shares=shares, staleness=STALENESS or 0,
        weight_decay=weight_decay,
    )  # fmt: skip


class ServerActor(ParameterServer):
    """A server in a process of its own. One that Ray has started again knows nothing, and refuses every call."""

    def __init__(self, number: int, weight_decay: float | None) -> None:
        self.__dict__.update(make_server(number, weight_decay).__dict__)

    def begin(self, generation: int, weights: str | None, seed: int) -> list[str]:
        """Begins from a file of weights, or from the seed."""
        from start_state import read_weights

        return self.start(generation, read_weights(weights) if weights else {}, INITIAL, seed)

    def process(self) -> int:
        return os.getpid()


class WorkerActor:
    """Worker whose threads compute, see `ShareWorker`. One that Ray has started again has to be prepared again."""

    def __init__(self) -> None:
        self.worker: ShareWorker | None = None

    def prepare(self, servers: list, fixed: dict[str, torch.Tensor], device: str, seed: int) -> int:
        """Builds the model; returns its process. `servers`: handles; `fixed`: frozen parameters and buffers."""
        if device == "npu":
            import torch_npu  # noqa: F401  # registers the device type

        def send(number: int, method: str, *arguments: object) -> object:
            return getattr(servers[number], method).remote(*arguments)

        stored = stored_tensors(build_model, MESH)
        served = served_parameters(stored, TABLES, SERVERS)
        client = ServerClient(served, SERVERS, send, ray.get)
        how = (client, torch.device(device), seed, STALENESS is None)
        self.worker = ShareWorker(build_model, MESH, stored, served, fixed, *how)
        return os.getpid()

    def compute(self, generation: int, work: ShareWork) -> ShareResult | str:
        """Result, or why there is none: the servers are not those that the call was for, or this worker is new."""
        if self.worker is None:
            return NEW
        try:
            return self.worker.compute(generation, work)
        except LOST:
            return GONE
