"""Results of collectives, kept for the second forward of a block that backward recomputes.

A list of operators to keep, as in torch's selective checkpointing, can't hold them: they write into existing tensors,
and the second forward would find these empty. Here each result is kept itself.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import cast

import torch
from torch import Tensor

from .axis import Map
from .weights import unchanged

_HERE = threading.local()  # backward may run in a thread of its own


class KeptResults:
    """Results of one call of a block: entered for its forward, and again for each later one. They are kept in the order
    in which they are made, each until its first reuse; a further forward recomputes it, as on all devices."""

    def __init__(self) -> None:
        self.saved: list[tuple[Tensor, int] | None] = []
        self.forwards = self.next = 0

    def __enter__(self) -> None:
        self.forwards, self.next = self.forwards + 1, 0
        self.outer: KeptResults | None = getattr(_HERE, "results", None)
        _HERE.results = self if torch.is_grad_enabled() else None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _HERE.results = self.outer

    def of(self, make: Map, x: Tensor) -> Tensor:
        if self.forwards == 1:
            out = make(x)
            self.saved.append((out.detach(), out._version))  # of the result itself, autograd's graph would hang on it
            return out
        place, self.next = self.next, self.next + 1
        saved, self.saved[place] = self.saved[place], None
        if saved is None:
            return make(x)
        return unchanged(*saved)


def reused_result(make: Map, x: Tensor) -> Tensor:
    """`make(x)`; in the second forward of a block, its result in the first."""
    results = None if torch.compiler.is_compiling() else cast("KeptResults | None", getattr(_HERE, "results", None))
    return make(x) if results is None else results.of(make, x)
