"""Batches read ahead of their use by a thread, and copied to the device from pinned memory."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Read = tuple[list[Tensor], Any]  # a batch, and the state of what it was read from just after it


class Prefetched(Iterator[list[Tensor]]):
    """What `reading` yields, on `device`, up to `ahead` of them early. `state`: after the batch that was taken last.

    An error of the reading is raised where its batch would have been taken.
    """

    def __init__(self, reading: Iterator[Read], device: torch.device, ahead: int) -> None:
        self.reading, self.device, self.state = reading, device, None
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
        batch, self.state = read
        return [x.to(self.device, non_blocking=True) for x in batch]

    def close(self) -> None:
        """Ends the thread, which else would hold what it reads from: at the latest after the batch that it reads."""
        self.closed.set()
        while self.thread is not None and self.queue is not None and self.thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self.queue.get(timeout=0.05)
        self.thread = None

    def _read_ahead(self, read: queue.Queue[Read | BaseException]) -> None:
        try:
            if self.pins:  # which device is the current one is a thread's own matter, and a loader may use it
                torch.get_device_module(self.device).set_device(self.device)
            for batch, state in self.reading:
                read.put(([x.pin_memory() if self.pins and x.device.type == "cpu" else x for x in batch], state))
                if self.closed.is_set():
                    return
            read.put(StopIteration())
        except BaseException as error:  # noqa: BLE001 (it is the reader's to raise)
            read.put(error)
