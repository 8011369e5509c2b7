"""Batches that a thread reads ahead for a device that is not here."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autoshard.emit.runtime import Prefetched, Read
from tests.hangs import HANGS


def test_the_reading_thread_has_the_device_and_pins_what_lies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's current device is one of each thread: a loader that makes tensors on it would take the first device."""
    device, current, pinned = torch.device("cuda", 3), threading.local(), list[torch.device]()
    module = types.SimpleNamespace(set_device=lambda which: setattr(current, "device", which))
    monkeypatch.setattr(torch, "get_device_module", lambda which: module)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: pinned.append(x.device) or x)

    def reading() -> Iterator[Read]:
        assert current.device == device
        yield [torch.zeros(2), torch.zeros(2, device="meta")], None, 0

    batches = Prefetched(reading(), device, 1)
    assert batches.queue is not None
    read = batches.queue.get(timeout=HANGS)
    batches.close()
    assert isinstance(read, tuple), read
    assert len(read[0]) == 2 and pinned == [torch.device("cpu")]
