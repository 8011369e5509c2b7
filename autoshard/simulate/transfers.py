"""What one step of a redistribution costs, forward and backward: collectives by the table of the design, local passes."""

from __future__ import annotations

from typing import Literal

from autoshard.layout import Partial, Placement, Replicate, Shard

Kind = Literal["shard", "whole", "partial_gradient", "partial"]

# (before, after) -> (forward, backward). Collectives are named as in autoshard.costs; "slice", "pad" and "mask" are
# local passes over memory, "" is nothing.
ACTIONS: dict[tuple[Kind, Kind], tuple[str, str]] = {
    ("shard", "shard"): ("all_to_all", "all_to_all"),
    ("shard", "whole"): ("all_gather", "slice"),
    ("shard", "partial_gradient"): ("all_gather", "reduce_scatter"),
    ("shard", "partial"): ("pad", "slice"),
    ("whole", "shard"): ("slice", "all_gather"),
    ("whole", "partial_gradient"): ("", "all_reduce"),
    ("whole", "partial"): ("mask", ""),
    ("partial_gradient", "shard"): ("slice", "pad"),
    ("partial_gradient", "whole"): ("", "mask"),
    ("partial_gradient", "partial"): ("mask", "mask"),
    ("partial", "shard"): ("reduce_scatter", "all_gather"),
    ("partial", "whole"): ("all_reduce", ""),
    ("partial", "partial_gradient"): ("all_reduce", "all_reduce"),
}
LOCAL = frozenset({"slice", "pad", "mask"})


def kind(placement: Placement) -> Kind:
    if isinstance(placement, Shard):
        return "shard"
    if isinstance(placement, Partial):
        return "partial"
    assert isinstance(placement, Replicate)
    return "partial_gradient" if placement.partial_gradient else "whole"


def actions(before: Placement, after: Placement) -> tuple[str, str]:
    """(forward, backward) of one step over one axis."""
    return ACTIONS[kind(before), kind(after)]


def shares_storage(before: Placement, after: Placement) -> bool:
    """True where the step leaves the value as it is."""
    return actions(before, after)[0] == ""
