"""What one step of a redistribution does, forward and backward: a collective, or a local pass over memory."""

from __future__ import annotations

from autoshard.layout import Placement
from autoshard.redistribute import BACKWARD, FORWARD, kind

LOCAL = frozenset({"slice", "zero_pad", "mask"})


def actions(before: Placement, after: Placement) -> tuple[str, str]:
    """(forward, backward) of one step over one axis; "" is nothing."""
    pair = kind(before), kind(after)
    return FORWARD[pair], BACKWARD[pair]


def shares_storage(before: Placement, after: Placement) -> bool:
    """True where the step leaves the value as it is."""
    return actions(before, after)[0] == ""


def is_weight_gather(before: Placement, after: Placement) -> bool:
    """A gather whose gradient is scattered: of a parameter, the shard is kept, and gathered again in backward."""
    return actions(before, after) == ("all_gather", "reduce_scatter")
