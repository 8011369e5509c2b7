"""Access of workers and the driver to the servers: whole parameters and tables here, parts and ids of parts there.

`send` starts a call of one server's method and returns a handle that `wait` turns into results; both are functions of
the transport: Ray's, or plain calls in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dealing import Share
from .served import Served

Read = tuple[str, Tensor, Tensor]  # a table, ids, and the gradient of the row of each


@dataclass(frozen=True)
class ServerClient:
    served: Mapping[str, Served]
    servers: int
    send: Callable[..., Any]  # (server, method, *arguments)
    wait: Callable[[list[Any]], list[Any]]

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Results of every server, in their order."""
        return self.wait([self.send(number, method, *arguments) for number in range(self.servers)])

    def pull(self, generation: int) -> tuple[list[int], dict[str, Tensor]]:
        """The version of each server, and each parameter that is no table, whole."""
        replies = self.all("pull", generation)
        whole = {}
        for name, spec in self.served.items():
            if not spec.table:
                parts = [replies[server][1][name] for server, *_ in spec.parts]
                whole[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(spec.split_shape)
        return [version for version, _ in replies], whole

    def rows(self, generation: int, wanted: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Table rows by ascending ids; one call gets all that a server has."""
        requests: dict[int, list[tuple[str, Tensor]]] = {}
        for name, ids in wanted:
            for server, start, span in self._split(name, ids):
                requests.setdefault(server, []).append((name, ids[span] - start))
        replies = self.wait([self.send(server, "rows", generation, request) for server, request in requests.items()])
        by_server = {server: iter(reply) for server, reply in zip(requests, replies, strict=True)}
        return [torch.cat([next(by_server[server]) for server, *_ in self._split(name, ids)]) for name, ids in wanted]

    def _split(self, name: str, ids: Tensor) -> list[tuple[int, int, slice]]:
        """Servers that have rows of ascending ids: the server, its first row, and the slice of the ids. At least one,
        even without ids."""
        parts = self.served[name].parts
        ends = torch.searchsorted(ids, torch.tensor([stop for *_, stop in parts], dtype=ids.dtype)).tolist()
        if len(ids) and (int(ids[0]) < 0 or ends[-1] < len(ids)):
            raise IndexError(f"{name} has {parts[-1][2]} rows, and ids from {int(ids[0])} to {int(ids[-1])} are read")
        spans = zip(parts, [0, *ends[:-1]], ends, strict=True)
        slices = [(server, start, slice(low, high)) for (server, start, _), low, high in spans if high > low]
        return slices or [(parts[0][0], parts[0][1], slice(0, 0))]

    def push(
        self, generation: int, share: Share, versions: Sequence[int], dense: Mapping[str, Tensor],
        read: Sequence[Read], rates: tuple[float, float] | None,
    ) -> None:  # fmt: skip
        """Sends every server its part of a share's gradients, which may be empty."""
        parts: list[dict[str, Tensor]] = [{} for _ in range(self.servers)]
        rows: list[dict[str, list[tuple[Tensor, Tensor]]]] = [{} for _ in range(self.servers)]
        for name, gradient in dense.items():
            spec = self.served[name]
            whole = gradient.reshape(spec.shape)
            for server, start, stop in spec.parts:
                parts[server][name] = whole if len(spec.parts) == 1 else whole[start:stop]
        for name, ids, gradient in read:
            for server, start, there in self._split(name, ids):
                rows[server].setdefault(name, []).append((ids[there] - start, gradient[there]))
        versioned = zip(versions, parts, rows, strict=True)
        self.wait([self.send(n, "push", generation, share, *part, rates) for n, part in enumerate(versioned)])
