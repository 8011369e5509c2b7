"""Which stage of a pipeline this device is on, and what its stages have in common: weights, and the gradients' norm.

Every stage has the same mesh of devices; rank = stage * devices of a mesh + rank on it. With several virtual stages a
stage holds the parts stage, stage + stages, … of the model; a place of a placed model holds those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .axis import GroupTransport, Transport
from .leaves import as_gradient, local

Shared = Mapping[str, Sequence[int]]  # parameter -> the stages that hold it


class Stages:
    """Stage `index`; `part_stages` says the stage of each part. `connect`, which all ranks call together, gives the
    transport between devices of equal rank on some of the stages; `group` is of those on all."""

    def __init__(
        self, index: int, part_stages: Sequence[int], connect: Callable[[tuple[int, ...]], Transport],
        group: dist.ProcessGroup | None = None, transport: Transport | None = None,
    ) -> None:  # fmt: skip
        self.index, self.count, self.group, self._connect = index, max(part_stages) + 1, group, connect
        self.parts = tuple(number for number, stage in enumerate(part_stages) if stage == index)
        self.transport = transport or GroupTransport(group)
        self._transports: dict[tuple[int, ...], Transport] = {}

    @property
    def is_last(self) -> bool:
        """It makes the loss."""
        return self.index == self.count - 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """In place, over all stages."""
        self.transport.all_reduce(x)()
        return x

    @torch.no_grad()
    def sum_shared(self, parameters: Mapping[str, nn.Parameter], shared: Shared) -> None:
        """Adds up the gradients of weights that several stages hold, in one order on all: so they stay equal."""
        for own in dict.fromkeys(map(tuple, shared.values())):
            if own not in self._transports:  # on all ranks, whether they are on these stages or not
                self._transports[own] = self.transport if len(own) == self.count else self._connect(own)
        for name, stages in shared.items():
            if self.index not in stages:
                continue
            parameter = parameters[name]
            held = local(parameter)
            gradient = torch.zeros_like(held) if parameter.grad is None else local(parameter.grad).contiguous()
            self._transports[tuple(stages)].all_reduce(gradient)()
            parameter.grad = as_gradient(parameter, gradient)

    def counts(self, name: str, shared: Shared) -> bool:
        """True where a parameter counts in the norm of all gradients: on the first stage that holds it."""
        return name not in shared or shared[name][0] == self.index
