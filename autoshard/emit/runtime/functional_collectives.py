"""Collectives as `torch.compile` traces them: operators without side effects, waited for where their result is used.

These are torch's own functional operators, by the names that they have had since torch 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class FunctionalCollectives:
    """Collectives of one process group, along dim 0 of contiguous tensors; `GroupTransport` uses them in a graph."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        pg = dist.group.WORLD if group is None else group
        self.name: str = getattr(pg, "group_name", "")
        self.index: int = 0 if pg is None else dist.get_rank(pg)
        self.size: int = 1 if pg is None else dist.get_world_size(pg)

    def all_reduce(self, x: Tensor, op: str) -> Callable[[], object]:
        started = torch.ops._c10d_functional.all_reduce(x, op, self.name)
        return lambda: x.copy_(torch.ops._c10d_functional.wait_tensor(started))

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        """All-gather of parts of these `lengths`; `x` is padded to the longest."""
        started = torch.ops._c10d_functional.all_gather_into_tensor(x, self.size, self.name)
        longest = max(lengths)

        def wait() -> Tensor:
            whole: Tensor = torch.ops._c10d_functional.wait_tensor(started)
            if min(lengths) == longest:
                return whole
            return torch.cat([whole[i * longest : i * longest + n] for i, n in enumerate(lengths)])

        return wait

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        """Reduce-scatter into parts of these `lengths`; each device's part in `x` is padded to the longest."""
        started = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", self.size, self.name)

        def wait() -> Tensor:
            padded: Tensor = torch.ops._c10d_functional.wait_tensor(started)
            return padded[: lengths[self.index]]

        return wait

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        started = torch.ops._c10d_functional.all_to_all_single(x, list(receive), list(send), self.name)
        received: Tensor = torch.ops._c10d_functional.wait_tensor(started)
        return received
