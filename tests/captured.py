"""Graphs that several tests plan: a process captures each of them once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph


def captured(
    spec: str, arguments: Mapping[str, Any], precision: str = "fp32", *, dynamic: tuple[str, ...] = ()
) -> Graph:
    """As `capture` has it."""
    return _captured(spec, tuple(arguments.items()), precision, dynamic)


@cache
def _captured(spec: str, arguments: tuple[tuple[str, Any], ...], precision: str, dynamic: tuple[str, ...]) -> Graph:
    return capture(spec, dict(arguments), precision, dynamic=dynamic)
