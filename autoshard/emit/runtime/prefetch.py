"""Batches read ahead by a thread, and copied to the device from pinned memory."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

# A batch, the state of what it was read from just after it, and how often that has ended.
Read = tuple[list[Tensor], Any, int]


class Prefetched(Iterator[list[Tensor]]):
    """Batches of `reading`, on `device`, up to `ahead` of them early. `state`: the state after the batch that was taken
    last; `ends`: how often the data had ended before it.

    An error of the reading is raised when its batch is taken.
    """

    def __init__(self, reading: Iterator[Read], device: torch.device, ahead: int) -> None:
        self.reading, self.device, self.state, self.ends = reading, device, cast(Any, None), 0
        self.ends_of_step = 0
        self.pins = device.type != "cpu"
        self.queue: queue.Queue[Read | BaseException] | None = queue.Queue(ahead) if ahead > 0 else None
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None
        if self.queue is not None:
            self.thread = threading.Thread(target=self._read_ahead, args=(self.queue,), daemon=True)
            self.thread.start()

    def __next__(self) -> list[Tensor]:
        read = next(self.reading) if self.queue is None else self.queue.get()
        if isinstance(read, BaseException):
            raise read
        batch, self.state, self.ends = read
        return [x.to(self.device, non_blocking=True) for x in batch]

    def of_step(self, count: int) -> list[list[Tensor]]:
        """The next `count` batches. `ends_of_step`: a number that tells where the data ended before them."""
        ends, batches = 0, []
        for _ in range(count):
            batches.append(next(self))
            ends += self.ends
        self.ends_of_step = ends
        return batches

    def close(self) -> None:
        """Ends the thread, at the latest after the batch that it reads: else it would keep what it reads from open."""
        self.closed.set()
        while self.thread is not None and self.queue is not None and self.thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self.queue.get(timeout=0.05)
        self.thread = None

    def _read_ahead(self, read: queue.Queue[Read | BaseException]) -> None:
        try:
            if self.pins:  # which device is the current one is a thread's own matter, and a loader may use it
                torch.get_device_module(self.device).set_device(self.device)
            for batch, state, ends in self.reading:
                pinned = [x.pin_memory() if self.pins and x.device.type == "cpu" else x for x in batch]
                read.put((pinned, state, ends))
                if self.closed.is_set():
                    return
            read.put(StopIteration())
        except BaseException as error:  # noqa: BLE001 (it is the reader's to raise)
            read.put(error)
