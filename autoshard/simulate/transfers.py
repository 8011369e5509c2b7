"""What one step of a redistribution leaves in memory."""

from __future__ import annotations

from autoshard.program.model import Collective
from autoshard.redistribute import kind


def shares_storage(step: Collective) -> bool:
    """True where the step leaves the value as it is."""
    return step.forward == ""


def is_weight_gather(step: Collective) -> bool:
    """A gather whose gradient is summed: of a parameter, the shard is kept, and gathered again in backward."""
    if step.forward == "exchange":
        pairs = zip(step.before, step.after, strict=True)
        return any((kind(before), kind(after)) == ("S", "R+") for before, after in pairs)
    return (step.forward, step.backward) == ("all_gather", "reduce_scatter")
