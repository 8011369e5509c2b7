"""A step's memory in the form of `torch.cuda.memory._snapshot()`, pickled, for pytorch.org/memory_viz.

Each tensor is one block, rounded up to the allocator's 512 bytes. A freed block is reused for the next tensor of its
size.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from autoshard.simulation.memory_curve import MemoryPlan, Span
from autoshard.units import MICROSECONDS

ROUND_BYTES = 512  # to whose multiples the caching allocator rounds up
BASE = ROUND_BYTES  # no block is at address 0


def memory_snapshot(memory: MemoryPlan, starts: tuple[float, ...]) -> bytes:
    """Pickled snapshot. `starts[step]`: seconds at which a step of `memory` begins."""
    blocks = _MemoryBlocks()
    for step, start in enumerate(starts):
        for span in memory.spans:
            if span.last == step - 1:
                blocks.free(span, start)
        for span in memory.spans:
            if span.start == step:
                blocks.allocate(span, start)
    return pickle.dumps(blocks.snapshot())


@dataclass
class _MemoryBlocks:
    top: int = BASE
    unused: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # size -> addresses
    alive: dict[int, tuple[int, int, Span]] = field(default_factory=dict)  # id of a span -> address, size, span
    trace: list[dict[str, Any]] = field(default_factory=list)

    def allocate(self, span: Span, seconds: float) -> None:
        size = -(-int(span.held.bytes) // ROUND_BYTES) * ROUND_BYTES
        address = self.unused[size].pop() if self.unused[size] else self.top
        self.top = max(self.top, address + size)
        self.alive[id(span)] = (address, size, span)
        self._record("alloc", address, size, span, seconds)

    def free(self, span: Span, seconds: float) -> None:
        address, size, _ = self.alive.pop(id(span))
        self.unused[size].append(address)
        for action in ("free_requested", "free_completed"):
            self._record(action, address, size, span, seconds)

    def _record(self, action: str, address: int, size: int, span: Span, seconds: float) -> None:
        self.trace.append(
            {
                "action": action, "addr": address, "size": size, "stream": 0,
                "time_us": round(seconds * MICROSECONDS), "frames": _frames(span), "category": span.held.kind,
            }
        )  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        """Snapshot: tensors alive at the end as blocks of one segment, and all events."""
        blocks, address = [], BASE
        for start, size, span in sorted(self.alive.values(), key=lambda block: block[0]):
            if start > address:
                blocks.append(_block(address, start - address, 0, "inactive", []))
            blocks.append(_block(start, size, int(span.held.bytes), "active_allocated", _frames(span)))
            address = start + size
        if self.top > address:
            blocks.append(_block(address, self.top - address, 0, "inactive", []))
        used = sum(size for _, size, _ in self.alive.values())
        segment = {
            "device": 0, "address": BASE, "total_size": self.top - BASE, "allocated_size": used, "active_size": used,
            "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "blocks": blocks,
        }  # fmt: skip
        return {"segments": [segment], "device_traces": [self.trace], "allocator_settings": {}}


def _block(address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def _frames(span: Span) -> list[dict[str, Any]]:
    return [{"name": span.held.name, "filename": span.held.kind, "line": 0}]
