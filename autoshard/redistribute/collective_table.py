"""Collectives as records, and the pair table: what a step from one placement to another does, and why.

A new collective is a record of `COLLECTIVES` and a function of that name in the runtime (`emit/runtime/`); where a step
of a redistribution takes it, also a row of `CHANGES`. Prices, buffers, emitted code and its check, the simulated step,
reports, exports and traces read the record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.ir.layout import Placement, Replicate, Shard

CollectiveSeconds = Callable[[tuple[int, ...], str, float], float]  # (axes joined, one of CARRIED, full bytes)
COPY = "copy"  # a pass over memory, without communication


@dataclass(frozen=True)
class CollectiveKind:
    """A communication or local action of a redistribution step, an operator's variant or a stage.

    Over links (see costs/collective.py): `constants` names whose constants price it, "" if no link carries it itself;
    `passes` are its trips around a ring; `route` is the pattern of the links: ring, chain, exchange (all pairs) or send
    (to the next member). `relative`: the constant of its rate compared with that of `constants`.

    As a step: `sent_as` is the collective that moves it, COPY or "" for nothing (None: itself). It moves `factor` times
    the bytes of the local tensor that is `given` or `made`, the `larger` or the `smaller` of both, or of `both`; times
    the `members` of the group, or the `partial` sums of each element. `by_index`: by index sets, over any axes at once.
    `gathers`: a device holds more after it. `working`: how its buffers are counted, see costs/buffers.py.

    In emitted code: `call` is the runtime's function, `grad` what its gradient does where the call leaves that out. Of
    a weight, `regather` is the one that gathers it again for backward, `once` that for all micro-batches of a step.

    Outside: `lane` of a page's timeline; `kernel` and `recorded`, its kernel and operator in a profiler's trace;
    `traced`, a pattern of either in a real one; `chakra`, its CollectiveCommType (None: a message to one device).
    """

    name: str
    constants: str = ""
    passes: int = 1
    route: str = ""
    relative: str = ""
    sent_as: str | None = None
    factor: int = 1
    bytes_of: str = "larger"
    times: str = ""
    by_index: bool = False
    gathers: bool = False
    working: str = ""
    call: str = ""
    grad: str | None = None
    regather: str = ""
    once: str = ""
    lane: str = ""
    kernel: str = "ncclDevKernel_SendRecv"
    recorded: str = ""
    traced: str = ""
    chakra: int | None = None

    @property
    def words(self) -> str:
        return self.name.replace("_", "-")

    @property
    def primitive(self) -> str:
        return self.name if self.sent_as is None else self.sent_as


def _local(name: str, call: str, grad: str | None, cuts: bool = False, by_index: bool = False) -> CollectiveKind:
    """Local action. `cuts`: it reads and writes only what stays; others read and write everything."""
    factor, of = (2, "smaller") if cuts else (1, "both")
    return CollectiveKind(name, sent_as=COPY, factor=factor, bytes_of=of, by_index=by_index, call=call, grad=grad)


_ALL = (
    CollectiveKind(
        "all_reduce", "all_reduce", 2, "ring", call="all_reduce", grad="identity", lane="reductions",
        kernel="ncclDevKernel_AllReduce_Sum_RING_LL", recorded="allreduce", traced="all_?reduce", chakra=0,
    ),
    CollectiveKind(
        "all_gather", "ring", 1, "ring", gathers=True, working="gather", call="all_gather", grad="slice",
        regather="regather", once="gather_once", lane="gathers",
        kernel="ncclDevKernel_AllGather_RING_LL", recorded="_allgather_base", traced="all_?gather", chakra=2,
    ),
    CollectiveKind(
        "reduce_scatter", "ring", 1, "ring", "scatter", working="scatter", call="reduce_scatter", grad="all_gather",
        lane="reductions", kernel="ncclDevKernel_ReduceScatter_Sum_RING_LL", recorded="_reduce_scatter_base",
        traced="reduce_?scatter", chakra=7,
    ),
    CollectiveKind(
        "all_to_all", "exchange", 1, "exchange", bytes_of="given", working="swap", call="all_to_all", lane="exchanges",
        recorded="all_to_allv", traced="all_?to_?all", chakra=6,
    ),
    CollectiveKind("send_receive", "exchange", 1, "send", lane="sends", recorded="send", traced="send|recv"),
    CollectiveKind(
        "broadcast", "ring", 1, "chain", kernel="ncclDevKernel_Broadcast_RING_LL", recorded="broadcast",
        traced="broadcast", lane="broadcast", chakra=5,
    ),
    # By the pair table alone
    CollectiveKind("", sent_as="", factor=0, call="copy", grad="all_reduce"),
    _local("slice", "slice_shard", "all_gather", cuts=True),
    _local("zero_pad", "zero_pad", "slice"),
    _local("mask", "mask", "identity"),
    # Not by the pair table but by index sets, over several axes at once: an exchange over the devices of all axes, the
    # same by an all-gather (where all-to-all is forbidden), or what a device can do alone
    CollectiveKind(
        "exchange", sent_as="all_to_all", bytes_of="made", times="partial", by_index=True, gathers=True, call="exchange"
    ),
    CollectiveKind("gather", sent_as="all_gather", bytes_of="given", times="members", by_index=True, gathers=True),
    _local("pick", "", None, cuts=True, by_index=True),
    _local("pad", "", None, by_index=True),
)  # fmt: skip
COLLECTIVES = {row.name: row for row in _ALL}
CARRIED = {row.name: row for row in _ALL if row.constants}  # by links, as they are
BY_INDEX = tuple(row.name for row in _ALL if row.by_index)
LOCAL = frozenset(row.name for row in _ALL if row.sent_as == COPY)
# Functions of the runtime -> what `grad` is where a call leaves it out
CALLS = {row.call: row.grad for row in _ALL if row.call}
CALLS |= {call: "reduce_scatter" for row in _ALL for call in (row.regather, row.once) if call}


class Change(NamedTuple):
    """Action of a step on the value and on its gradient, one of COLLECTIVES each, and the reason for it in words."""

    forward: str
    backward: str
    why: str


CHANGES = {pair: Change(*columns) for pair, columns in {
    ("S", "S"): ("all_to_all", "all_to_all", "{consumer} is cut along dim {to}, not {dim}"),
    ("S", "R"): ("all_gather", "slice", "{consumer} needs all of dim {dim}"),
    ("S", "R+"): ("all_gather", "reduce_scatter",
                  "{consumer} needs all of dim {dim}; its gradient is summed over {axis}"),
    ("S", "P"): ("zero_pad", "slice", "{consumer} sums over {axis}: each device brings its own shard"),
    ("R", "S"): ("slice", "all_gather", "{consumer} is cut along dim {to} over {axis}"),
    ("R", "R+"): ("", "all_reduce", "{consumer} is cut over {axis}: the gradient of {tensor} is summed in backward"),
    ("R", "P"): ("mask", "", "{consumer} is partial over {axis}: {tensor} is counted once"),
    ("R+", "S"): ("slice", "zero_pad", "{consumer} is cut along dim {to} over {axis}"),
    ("R+", "R"): ("", "mask", "{consumer} gives every device the whole gradient: it is counted once"),
    ("R+", "P"): ("mask", "mask", "{consumer} is partial over {axis}: {tensor} is counted once"),
    ("P", "S"): ("reduce_scatter", "all_gather", "sum the partial {tensor} over {axis}, keep one shard of dim {to}"),
    ("P", "R"): ("all_reduce", "", "sum the partial {tensor} over {axis}"),
    ("P", "R+"): ("all_reduce", "all_reduce", "sum the partial {tensor} over {axis}, and its gradient"),
}.items()}  # fmt: skip
FORWARD = {pair: change.forward for pair, change in CHANGES.items()}
BACKWARD = {pair: change.backward for pair, change in CHANGES.items()}


def kind(placement: Placement) -> str:
    """Row or column of the pair table: `S`, `R`, `R+` or `P`."""
    if isinstance(placement, Shard):
        return "S"
    if isinstance(placement, Replicate):
        return "R+" if placement.partial_gradient else "R"
    return "P"


def runtime_call(
    before: Placement, after: Placement, regather: bool = False, once: bool = False
) -> tuple[str, str | None]:
    """Runtime function of a step by the table, with its `grad` (None if it has none)."""
    change = CHANGES[kind(before), kind(after)]
    row = COLLECTIVES[change.forward]
    name = (regather and row.regather) or (once and row.once) or row.call
    return name, None if row.grad is None else change.backward or "identity"


def reason(
    axes: Sequence[str],
    before: Sequence[Placement],
    after: Sequence[Placement],
    by_index: bool,
    tensor: str,
    consumer: str,
) -> str:
    """Sentence on why the step `before` -> `after` of `tensor` over `axes` is done for `consumer`."""
    over = " and ".join(axes)
    if by_index:
        there, here = (" ".join(map(str, placements)) for placements in (after, before))
        return f"{consumer} needs {there} over {over}, not {here}"
    first, second = before[0], after[0]
    dim, to = (placement.dim if isinstance(placement, Shard) else "" for placement in (first, second))
    return CHANGES[kind(first), kind(second)].why.format(axis=over, tensor=tensor, consumer=consumer, dim=dim, to=to)
