"""The bytes of all tensors that are alive, by distinct storage, after every operator that torch dispatches."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SETTLE_SECONDS = 0.005


@dataclass
class _Waiting:
    """A collective on its way. It holds what it was given until it is waited for, as NCCL's do; gloo's hold it as long
    as their threads like."""

    waits: Callable[[], Any]
    given: tuple[Any, ...]

    def wait(self) -> Any:
        self.given = ()
        return self.waits()


class Meter(TorchDispatchMode):
    """Counts `known` tensors from the start, and every result of an operator from then on.

    `curve` has (phase, operator, changes so far) of each operator, `changes` (serial number of a storage, bytes).
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, int]] = {}  # address of a storage -> serial number, bytes
        self.changes: list[tuple[int, int]] = []
        self.curve: list[tuple[str, str, int]] = []
        self.phase = ""
        self.made = 0
        self.inside = False
        self.collectives = self.settled = 0
        for tensor in known:
            self.hold(tensor)
        self.start = len(self.changes)

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = self.made, storage.nbytes()
            self.changes.append((self.made, storage.nbytes()))
            self.made += 1
            weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, address: int) -> None:
        serial, size = self.alive.pop(address)
        self.changes.append((serial, -size))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again, with the local tensors
        if self.collectives != self.settled:
            time.sleep(SETTLE_SECONDS)  # gloo's threads let go of its tensors a little later
            self.settled = self.collectives
        out = func(*args, **(kwargs or {}))
        if self.inside:
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        self.curve.append((self.phase, str(func), len(self.changes)))
        return out

    def beside(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """The collective, with what it makes inside left out, until it was waited for, too: gloo reduces and scatters
        in copies, NCCL does not."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.inside = True
            try:
                result = collective(*args, **kwargs)
            finally:
                self.inside = False
                self.collectives += 1
            return _Waiting(self.beside(result.wait), args) if hasattr(result, "wait") else result

        return call

    def peak(self, phase: str) -> tuple[int, str]:
        """Bytes above the start, and the operator after which they are most."""
        totals = [0]
        for _, size in self.changes[self.start :]:
            totals.append(totals[-1] + size)
        return max((totals[seen - self.start], name) for in_phase, name, seen in self.curve if in_phase == phase)
