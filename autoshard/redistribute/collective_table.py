"""The pair table: what a step from one placement to another does, to the value forward and to the gradient backward."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir.layout import Placement, Replicate, Shard

CollectiveSeconds = Callable[[tuple[int, ...], str, float], float]  # (axes joined, one of COLLECTIVES, full bytes)

FORWARD: dict[tuple[str, str], str] = {
    ("S", "S"): "all_to_all", ("S", "R"): "all_gather", ("S", "R+"): "all_gather", ("S", "P"): "zero_pad",
    ("R", "S"): "slice", ("R", "R+"): "", ("R", "P"): "mask",
    ("R+", "S"): "slice", ("R+", "R"): "", ("R+", "P"): "mask",
    ("P", "S"): "reduce_scatter", ("P", "R"): "all_reduce", ("P", "R+"): "all_reduce",
}  # fmt: skip
BACKWARD: dict[tuple[str, str], str] = {
    ("S", "S"): "all_to_all", ("S", "R"): "slice", ("S", "R+"): "reduce_scatter", ("S", "P"): "slice",
    ("R", "S"): "all_gather", ("R", "R+"): "all_reduce", ("R", "P"): "",
    ("R+", "S"): "zero_pad", ("R+", "R"): "mask", ("R+", "P"): "mask",
    ("P", "S"): "all_gather", ("P", "R"): "", ("P", "R+"): "all_reduce",
}  # fmt: skip
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# The steps of several axes at once that do not go by the table but by index sets: an exchange over the devices of all
# axes, the same by an all-gather (where all-to-all is forbidden), or what a device can do alone.
BY_INDEX = ("exchange", "gather", "pick", "pad")
LOCAL = frozenset({"slice", "zero_pad", "mask", "pick", "pad"})
CUTS = frozenset({"slice", "pick"})  # read and write only what stays; the others read and write everything


def kind(placement: Placement) -> str:
    """`S`, `R`, `R+` or `P`: the row or column of the tables."""
    if isinstance(placement, Shard):
        return "S"
    if isinstance(placement, Replicate):
        return "R+" if placement.partial_gradient else "R"
    return "P"


# what `grad` is where a call of the runtime leaves it out
GRAD_DEFAULTS = {
    "all_gather": "slice", "slice_shard": "all_gather", "reduce_scatter": "all_gather", "zero_pad": "slice",
    "all_reduce": "identity", "copy": "all_reduce", "mask": "identity", "regather": "reduce_scatter",
    "gather_once": "reduce_scatter",
}  # fmt: skip


def runtime_call(before: Placement, after: Placement) -> tuple[str, str | None]:
    """The runtime function of a step by the table and its `grad` argument (None for all_to_all, which has none)."""
    pair = kind(before), kind(after)
    name = {"": "copy", "slice": "slice_shard"}.get(FORWARD[pair], FORWARD[pair])
    return name, None if name == "all_to_all" else BACKWARD[pair] or "identity"
