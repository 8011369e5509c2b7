"""Checks that a forward computes in its second call what it did in its first: both run on tensors without values.

A graph keeps what one call read of a global, a closure, an object's fields or a clock. `steady` sees the attributes of
modules alone, but knows what a much later call would compute. The calls run in copies of this process, with which all
that they leave behind is gone: a cache of tensors without values, say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.call_caches import attributes_put_back, cached_alike, leaves
from autoshard.graph_capture.tracing.exporting import fake_stand_ins, quiet
from autoshard.graph_capture.tracing.python_state import hooks_put_back
from autoshard.graph_capture.tracing.source_lines import here
from autoshard.graph_capture.tracing.unchanged_model import guarded
from autoshard.graph_capture.two_runs.call_numbers import CallNumbers
from autoshard.system.isolated_process import apart

MOST_SECONDS = 60.0  # two calls of 80 layers take 4; a copy lacks the threads that code may wait for, for ever
_STATE = "a buffer for what changes from call to call: self.register_buffer(...), updated in place; no clock"


def changing_line(model: torch.nn.Module, inputs: tuple[Any, ...], export: Callable[..., Any]) -> str:
    """The line where the second call begins to compute something else; "" where both compute the same, where the second
    only finds what the first kept, or where it can't be seen. `export` gives the program of a module and inputs."""
    with quiet():
        line = apart(lambda: _parted(model, inputs), MOST_SECONDS).text
        if line and apart(lambda: str(cached_alike(model, inputs, export, tuple)), MOST_SECONDS).text == str(True):
            return ""
    return line or ""


def refuse_change(line: str) -> None:
    """CaptureError where there is one."""
    if line:
        raise CaptureError(f"the forward computes something else when it is called again, at {line}", _STATE)


def _parted(model: torch.nn.Module, inputs: tuple[Any, ...]) -> str:
    """The line where the second call begins to differ, "" where both compute the same, or it can't be seen."""
    numbers: dict[Any, int] = {}
    with fake_stand_ins(model, inputs, always=True) as arguments, guarded():
        named = {f"given {i}": x for i, x in enumerate(arguments)}
        named |= dict([*model.named_parameters(), *model.named_buffers()])
        first, second = _Calls(numbers, named), _Calls(numbers, named)
        try:
            for calls in (first, second):
                calls.before = first.order
                with attributes_put_back(model), hooks_put_back(model), calls:
                    left = [*leaves(model(*arguments)), *model.buffers()]
                calls.left = [calls.key(x) for x in left]
        except (Exception, SystemExit):  # of the model's own code, or a question for values
            return ""
    return "" if first.left == second.left else second.parted or f"what {type(model).__name__} returns"


class _Calls(CallNumbers):
    """Calls of one run in their order, and where they part from those of the run before."""

    def __init__(self, numbers: dict[Any, int], named: Mapping[str, Tensor]) -> None:
        super().__init__(numbers, named)
        self.order: list[int] = []
        self.before: Sequence[int] = self.order
        self.left: list[Any] = []
        self.parted = ""

    def called(self, number: int) -> None:
        place = len(self.order)
        self.order.append(number)
        if not self.parted and self.before[place : place + 1] != [number]:
            self.parted = here()
