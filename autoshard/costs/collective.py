"""Seconds of one collective over one mesh axis: launch + steps * latency + traffic / bandwidth (a ring).

On the A100 the mean error against held-out rows of a published NCCL table (512 B to 512 MiB, 2 and 8 devices) is
15 to 17 % (all-to-all 23 %); 21 % on all-reduces of another server, 2 to 8 devices, that nothing was fitted to.
Not modelled yet: several protocols, NVLS, hierarchical schedules, two axes that use one link at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from autoshard.costs.links import AxisLink, joint_link
from autoshard.hardware import Hardware
from autoshard.mesh import Mesh


def _ring(passes: int) -> Callable[[int, AxisLink], tuple[float, float]]:
    """(steps, seconds per byte) of `passes` trips around the ring, each moving (n-1)/n of the whole message."""
    return lambda n, link: (passes * (n - 1), passes * (n - 1) / n / link.ring_bandwidth)


def _exchange(n: int, link: AxisLink) -> tuple[float, float]:
    """All pairs at once: one step, limited by what a device sends over the slowest level it crosses."""
    return 1, link.exchange_seconds_per_byte


KINDS: dict[str, Callable[[int, AxisLink], tuple[float, float]]] = {
    "all_gather": _ring(1),
    "reduce_scatter": _ring(1),
    "all_reduce": _ring(2),
    "all_to_all": _exchange,
}


def collective_seconds(hardware: Hardware, mesh: Mesh, axis: int, kind: str, full_bytes: float) -> float:
    """`full_bytes` is the whole message of a group: the output of an all_gather, the input of a reduce_scatter, the
    tensor of an all_reduce, the local input of an all_to_all. 0 for an axis of size 1 or an empty message.
    """
    return joint_seconds(hardware, mesh, (axis,), kind, full_bytes)


def joint_seconds(hardware: Hardware, mesh: Mesh, axes: tuple[int, ...], kind: str, full_bytes: float) -> float:
    """The same over one group of several axes joined."""
    if full_bytes == 0 or all(mesh.sizes[axis] == 1 for axis in axes):
        return 0.0
    fixed_seconds, seconds_per_byte = _coefficients(hardware, mesh, axes, kind)
    return fixed_seconds + full_bytes * seconds_per_byte


@lru_cache(maxsize=4096)
def _coefficients(hardware: Hardware, mesh: Mesh, axes: tuple[int, ...], kind: str) -> tuple[float, float]:
    """(seconds of an empty message, seconds per byte)."""
    size = math.prod(mesh.sizes[axis] for axis in axes)
    link = joint_link(hardware, mesh, axes)
    steps, seconds_per_byte = KINDS[kind](size, link)
    ramp = (1 - 1 / size) ** hardware.constant("collective.group_exponent")
    return hardware.constant("collective.launch") + steps * link.latency_seconds, seconds_per_byte / ramp
