"""The error of a graph that contradicts itself."""

from __future__ import annotations


class GraphFault(ValueError):
    """An invariant that a graph breaks. No assertion: a damaged file is found under `python -O` too."""


def require(holds: object, fault: str) -> None:
    if not holds:
        raise GraphFault(fault)
