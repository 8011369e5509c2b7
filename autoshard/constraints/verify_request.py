"""Request to run a package against the model: checks that need no capture and no search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from autoshard.errors import UsageError

Backend = Literal["gloo", "lockstep"]
MOST_RANKS = 64  # that run here: beyond, the same plan runs on a mesh with shorter axes, and the proof says so
MOST_BYTES = 4 * 2**30  # that they hold together
MOST_PROCESSES = 16  # beyond, all ranks run in lock-step in one process, and the proof says so


@dataclass(frozen=True)
class VerifyRequest:
    """`arguments` reduce the model (`{"n_layer": 2}`); `full` runs the files at full size whatever it takes."""

    backend: Backend = "gloo"
    full: bool = False
    arguments: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def check(self) -> None:
        """UsageError where two of these contradict each other, or a backend is unknown."""
        if self.backend not in get_args(Backend):
            raise UsageError(f"unknown backend {self.backend!r}", " or ".join(get_args(Backend)))
        if self.full and self.arguments:
            names = ", ".join(self.arguments)
            raise UsageError(f"full size and {names} at once", "leave one of --full and --verify-with out")
