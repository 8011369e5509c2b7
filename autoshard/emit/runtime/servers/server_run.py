"""Steps of a run on parameter servers, and a whole run in one process: for checks, without Ray."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..mesh import ParallelMesh
from ..micro_batches import Counts, label_shares
from ..parameters import sharding
from .dealing import Dealer, Share
from .parameter_server import ParameterServer
from .served import served_parameters, stored_tensors
from .server_client import ServerClient
from .share_worker import ShareResult, ShareWork, ShareWorker


def update_norm(client: ServerClient, generation: int, step: int) -> float:
    """Norm of the gradient of a step, once all its shares are there."""
    return math.sqrt(sum(client.all("squares", generation, step)))


def apply_update(
    client: ServerClient, generation: int, step: int, norm: float, max_norm: float, rates: tuple[float, float]
) -> None:
    """Updates with the gradient clipped to the norm."""
    client.all("update", generation, step, min(1.0, max_norm / (norm + 1e-6)), rates)


def labels_of_step(
    build_labels: Callable[[ParallelMesh], Any], counts: Counts, mesh: ParallelMesh,
    batches: Sequence[Sequence[Tensor]], fixed: Mapping[str, Tensor], client: ServerClient, generation: int,
) -> list[list[Tensor]]:  # fmt: skip
    """Label shares of each share: for each loss that is a mean over labels, its part of the step's labels."""
    find = build_labels(mesh)
    labels = [() if find is None else find(*inputs) for inputs in batches]
    every = [(one,) if isinstance(one, Tensor) else one for one in labels]
    names = {name for *_, name in counts if name}
    weights = dict(fixed) | (client.pull(generation)[1] if names - fixed.keys() else {})
    shares: list[list[Tensor]] = label_shares(mesh, every, counts, {name: weights[name] for name in names})
    return shares


def share_works(
    step: int, batches: Sequence[Sequence[Tensor]], labels: Sequence[Sequence[Tensor]],
    applied: tuple[float, tuple[float, float]] | None,
) -> list[ShareWork]:  # fmt: skip
    """The shares of a step. `applied`: the greatest norm and the rates, if each share is applied by itself: its loss is
    then a mean over its own labels."""
    if applied is not None:
        return [ShareWork((step, n), tuple(batch), (), 1, *applied) for n, batch in enumerate(batches)]
    pairs = enumerate(zip(batches, labels, strict=True))
    return [ShareWork((step, n), tuple(batch), tuple(shares), len(batches)) for n, (batch, shares) in pairs]


class InProcess:
    """Servers and workers that call each other. `plan`: constants of a package's server_plan.py; `shares`: per step, 0
    if each is applied when it arrives; `weights`: all that the model stores, whole."""

    def __init__(
        self, build_model: Callable[[ParallelMesh], nn.Module], axes: Mapping[str, int], plan: Any, optimizer: str,
        shares: int, weights: Mapping[str, Tensor], seed: int = 0,
    ) -> None:  # fmt: skip
        stored = stored_tensors(build_model, axes)
        served = served_parameters(stored, plan.TABLES, plan.SERVERS)
        how: dict[str, Any] = {"optimizer": optimizer, "rowwise": plan.TABLE_OPTIMIZER == "rowwise-adagrad"}
        how |= {"shares": shares, "staleness": plan.STALENESS or 0}
        self.servers = [ParameterServer(served, plan.SERVERS, number, **how) for number in range(plan.SERVERS)]
        for server in self.servers:
            server.start(0, weights, {}, seed)
        self.client = ServerClient(served, plan.SERVERS, self._send, lambda results: results)
        names = {name: (name, *sharding(tensor).ties) for name, tensor in stored.items() if name not in served}
        self.fixed = {name: next(weights[key] for key in keys if key in weights) for name, keys in names.items()}
        args = (build_model, axes, stored, served, self.fixed, self.client, torch.device("cpu"), seed, shares > 0)
        self.workers = [ShareWorker(*args) for _ in range(plan.MOST_WORKERS)]

    def _send(self, number: int, method: str, *arguments: Any) -> Any:
        return getattr(self.servers[number], method)(*arguments)

    def compute(
        self, dealer: Dealer, works: Sequence[ShareWork], order: Callable[[int], int] = lambda count: 0
    ) -> list[ShareResult]:
        """Computes all shares; `order` selects which of those that have pulled is computed and pushed next."""
        by_share = {work.share: work for work in works}
        dealer.add(by_share)
        results: dict[Share, ShareResult] = {}
        in_work: list[tuple[int, Share, Any]] = []
        while dealer.waiting or dealer.outstanding:
            for number, worker in enumerate(self.workers):
                while (share := dealer.deal(number)) is not None:
                    in_work.append((number, share, worker.pull(0, by_share[share])))
            number, share, pulled = in_work.pop(order(len(in_work)))
            results[share] = self.workers[number].compute(0, by_share[share], pulled, keep_outputs=True)
            dealer.done(share)
        return [results[work.share] for work in works]

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the step whose shares are all there; zero where none has come."""
        grads = {}
        for name, spec in self.client.served.items():
            if spec.trained:
                parts = [self._gradient(self.servers[server], name) for server, *_ in spec.parts]
                grads[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(spec.shape)
        return grads

    @staticmethod
    def _gradient(server: ParameterServer, name: str) -> Tensor:
        gradient = torch.zeros_like(server.values[name].detach())
        if name in (server.ready or {}):
            return gradient.index_copy_(0, *(server.ready or {})[name])
        return gradient.copy_(server.sum[name].reshape(gradient.shape)) if name in server.sum else gradient

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """Every served parameter, whole."""
        whole = {}
        for name, spec in self.client.served.items():
            parts = [self.servers[server].values[name].detach() for server, *_ in spec.parts]
            whole[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(spec.shape).clone()
        return whole
