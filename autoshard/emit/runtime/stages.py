"""The pipeline stage that this device is on, and what stages share: weights, and the gradients' norm.

Ranks are numbered through the stages, which communicate over one group of all devices. Every stage of a pipeline has
the same mesh; with several virtual stages it holds the parts stage, stage + stages, … of the model. A place of a placed
model holds the parts assigned to it, and may have its own mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .autograd_leaves import as_gradient, local
from .axis import Transport

Shared = Mapping[str, Sequence[int]]  # parameter -> the stages that hold it


def first_ranks(meshes: Sequence[Mapping[str, int]]) -> list[int]:
    """First rank of each stage or place, and the number of devices."""
    return [0, *itertools.accumulate(math.prod(axes.values()) for axes in meshes)]


class Stages:
    """Stage `index`; `part_stages` is the stage of each part. `connect`, which all ranks call together, returns the
    transport between devices of equal rank on some of the stages; `transport` covers all devices, and `meshes` are the
    axes of each stage. `leads`: this device counts in a sum over `transport`."""

    leads = True  # the first device of each stage

    def __init__(
        self, index: int, part_stages: Sequence[int], connect: Callable[[tuple[int, ...]], Transport],
        transport: Transport, meshes: Sequence[Mapping[str, int]],
    ) -> None:  # fmt: skip
        self.meshes = [tuple(axes.items()) for axes in meshes]
        self.firsts = first_ranks(meshes)  # of each place, and how many devices there are
        self.index, self.count, self._connect = index, max(part_stages) + 1, connect
        self.parts = tuple(number for number, stage in enumerate(part_stages) if stage == index)
        self.transport = transport
        self._transports: dict[tuple[int, ...], Transport] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        """All-reduce in place over all stages; on each stage all devices have the same value."""
        if not self.leads:
            x.zero_()
        self.transport.all_reduce(x)()
        return x

    @torch.no_grad()
    def sum_shared(self, parameters: Mapping[str, nn.Parameter], shared: Shared) -> None:
        """Adds up the gradients of weights that several stages hold, in one order on all, so that they stay equal."""
        for holders in dict.fromkeys(map(tuple, shared.values())):
            if holders not in self._transports:  # on all ranks, whether they are on these stages or not
                self._transports[holders] = self._connect(holders)
        for name, stages in shared.items():
            if self.index not in stages:
                continue
            parameter = parameters[name]
            held = local(parameter)
            gradient = torch.zeros_like(held) if parameter.grad is None else local(parameter.grad).contiguous()
            self._transports[tuple(stages)].all_reduce(gradient)()
            parameter.grad = as_gradient(parameter, gradient)

    def counts(self, name: str, shared: Shared) -> bool:
        """Does a parameter count in the norm of all gradients here? It counts on the first stage that holds it."""
        return name not in shared or shared[name][0] == self.index
