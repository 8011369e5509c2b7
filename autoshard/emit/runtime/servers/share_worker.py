"""A worker: the model on one device without its own parameters; computes a share's gradients for the servers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd_leaves import grow_leaf, local
from ..mesh import ParallelMesh
from ..parameters import assign, sharding
from .dealing import Share
from .served import Served
from .served_table import Lookups, Way, served_table
from .server_client import ServerClient

Whole = tuple[list[int], dict[str, Tensor]]
Ahead = dict[tuple[str, Way], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ShareWork:
    """A share of a step: a micro-batch. `labels`: see `label_shares`; `count`: number of shares that its loss is a mean
    of; `max_norm`: of its gradient, if it is applied by itself, at `rates`. `trains`: False computes the loss alone, as
    in the model's evaluation mode."""

    share: Share
    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...] = ()
    count: int = 1
    max_norm: float = math.inf
    rates: tuple[float, float] | None = None
    trains: bool = True


@dataclass(frozen=True)
class ShareResult:
    """Result of a share. `norm`: of its gradient, if applied by itself. `pulled_ahead`: prefetched look-ups."""

    loss: float
    outputs: tuple[Tensor, ...] = ()
    norm: float = 0.0
    pulled_ahead: int = 0


class ShareWorker:
    """A worker whose threads overlap: one runs the model, while others pull for the next share and push the last.

    `fixed`: frozen parameters and buffers, whole. `synchronous`: all shares of a step use the same parameters, pulled
    once.
    """

    def __init__(
        self, build_model: Callable[[ParallelMesh], nn.Module], axes: Mapping[str, int], stored: Mapping[str, Tensor],
        served: Mapping[str, Served], fixed: Mapping[str, Tensor], client: ServerClient, device: torch.device,
        seed: int, synchronous: bool,
    ) -> None:  # fmt: skip
        self.client, self.served, self.synchronous = client, served, synchronous
        self.mesh = ParallelMesh(axes, 0, lambda *_: None, device)  # type: ignore[arg-type]
        self.mesh.random.seed = seed
        self.lookups = Lookups(self._rows, {})
        self.generation = 0
        self.mesh.reused = {name: self._held(name, tensor) for name, tensor in stored.items()}
        self.parameters = {
            name: tensor for name, tensor in self.mesh.reused.items() if name in served and not served[name].table
        }
        self.model = build_model(self.mesh)
        for name, value in fixed.items():
            assign(self.mesh.reused[name], value)
        self.computing, self.pulling = threading.Lock(), threading.Lock()
        self.last: tuple[tuple[int, int], Whole] | None = None

    def _held(self, name: str, stored: Tensor) -> Tensor:
        """A stored tensor in the form that the model has here."""
        spec = self.served.get(name)
        if spec is not None and spec.table:
            tensor: Any = served_table(spec.shape, name, spec.trained, lambda: self.lookups)
        else:
            empty = torch.empty(stored.shape, dtype=stored.dtype, device=self.mesh.device)
            is_parameter = isinstance(stored, nn.Parameter)
            tensor = nn.Parameter(empty, requires_grad=stored.requires_grad) if is_parameter else empty
        tensor.sharding = sharding(stored)
        if spec is None or not spec.table:
            grow_leaf(tensor)
        return tensor

    def _rows(self, table: str, ids: Tensor) -> Tensor:
        return self.client.rows(self.generation, [(table, ids)])[0]

    def pull(self, generation: int, work: ShareWork) -> tuple[Whole, Ahead]:
        """Inputs from the servers for a share: parameters, and rows whose ids are a part of its inputs."""
        ahead = Lookups(lambda table, ids: self.client.rows(generation, [(table, ids)])[0], self.lookups.ways)
        if not self.synchronous:
            return self.client.pull(generation), ahead.pull_ahead(work.inputs)
        with self.pulling:
            if self.last is None or self.last[0] != (generation, work.share[0]):
                self.last = (generation, work.share[0]), self.client.pull(generation)
            whole = self.last[1]
        return whole, ahead.pull_ahead(work.inputs)

    def compute(
        self, generation: int, work: ShareWork, pulled: tuple[Whole, Ahead] | None = None, keep_outputs: bool = False
    ) -> ShareResult:
        """Pulls, computes, and pushes; returns when all servers have the gradients. NaN and inf are not pushed."""
        (versions, whole), rows = pulled or self.pull(generation, work)
        with self.computing:
            self.generation = generation
            inputs = tuple(x.to(self.mesh.device) for x in work.inputs)
            self.lookups = Lookups(self._rows, self.lookups.ways, inputs, rows)
            self._fill(whole)
            if not work.trains:
                return ShareResult(float(self._evaluated(inputs)[0]))
            outputs = self._backward(work, inputs)
            dense = {name: param.grad.cpu() for name, param in self.parameters.items() if param.grad is not None}
            read = [(name, ids, rows.grad) for name, ids, rows in self.lookups.read if rows.grad is not None]
            used = sum(any(ids is fetched for fetched, _ in rows.values()) for _, ids, _ in self.lookups.read)
            for param in self.parameters.values():
                param.grad = None
        loss, norm = float(outputs[0]), 0.0
        if work.rates is not None:
            norm = self._clip(work, dense, read)
        if math.isfinite(loss) and math.isfinite(norm):
            self.client.push(generation, work.share, versions, dense, read, work.rates)
        return ShareResult(loss, outputs if keep_outputs else (), norm, used)

    def load(self, generation: int) -> None:
        """Loads the current parameters, for a forward of the model itself."""
        self.generation = generation
        self.lookups = Lookups(self._rows, self.lookups.ways)
        self._fill(self.client.pull(generation)[1])

    @torch.no_grad()
    def _fill(self, whole: Mapping[str, Tensor]) -> None:
        for name, param in self.parameters.items():
            local(param).copy_(whole[name])

    @torch.no_grad()
    def _evaluated(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.mesh.random.training = False
        try:
            result = self.model(*inputs)
        finally:
            self.mesh.random.training = True
        return result if isinstance(result, tuple) else (result,)

    def _backward(self, work: ShareWork, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        step, number = work.share
        self.mesh.random.step = step
        with self.mesh.micro_batch(number, [label.to(self.mesh.device) for label in work.labels]):
            result = self.model(*inputs)
            outputs = result if isinstance(result, tuple) else (result,)
            (outputs[0] / work.count).backward()
        return tuple(output.detach() for output in outputs)

    @torch.no_grad()
    def _clip(self, work: ShareWork, dense: dict[str, Tensor], read: list[tuple[str, Tensor, Tensor]]) -> float:
        """Clips a gradient that is applied by itself, after summing rows of look-ups of one table. Returns its norm."""
        merged: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, ids, rows in read:
            merged.setdefault(name, []).append((ids, rows))
        read.clear()
        for name, entry in merged.items():
            ids, places = torch.cat([ids for ids, _ in entry]).unique(return_inverse=True)
            values = torch.cat([rows for _, rows in entry])
            read.append((name, ids, values.new_zeros((len(ids), *values.shape[1:])).index_add_(0, places, values)))
        every = [*dense.values(), *(rows for *_, rows in read)]
        norm = math.sqrt(float(sum((gradient.square().sum() for gradient in every), torch.zeros(()))))
        scale = min(1.0, work.max_norm / (norm + 1e-6))
        if scale < 1.0:
            for entry in every:
                entry.mul_(scale)
        return norm
