"""The formulas of the cost models, on numbers or numpy arrays alike, so that what is fitted is what is predicted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from numpy import ndarray

    N = TypeVar("N", float, ndarray)
else:
    N = TypeVar("N")


def soft_maximum(a: N, b: N, exponent: float) -> N:
    """(a^q + b^q)^(1/q): near max(a, b) where one dominates, at most a + b."""
    result: N = (a**exponent + b**exponent) ** (1 / exponent)
    return result


def saturating(x: N) -> N:
    """1 - exp(-x): x for small x, 1 for large."""
    result: N = 1 - math.e ** (-x)
    return result


def roofline(flops: N, traffic_bytes: N, flop_rate: float, bandwidth: float, exponent: float) -> N:
    """Seconds of a kernel that computes and moves data at the same time."""
    return soft_maximum(flops / flop_rate, traffic_bytes / bandwidth, exponent)


def pass_seconds(traffic_bytes: N, bandwidth: float | N, gain: float, cache_bytes: float) -> N:
    """Seconds of a pass over memory. What fits a cache of `cache_bytes` moves `gain` times as fast, softly: more bytes
    never take less time."""
    faster = 1 + (gain - 1) * math.e ** (-traffic_bytes / cache_bytes)
    result: N = traffic_bytes / (bandwidth * faster)
    return result


def product_overhead(inner: N, depth_seconds: float, split: float) -> N:
    """Seconds that the loop over the summed dim adds where nothing else hides it: it grows with its length `inner`,
    until libraries split it over the device, at about `split` elements."""
    result: N = depth_seconds * saturating(inner / split)
    return result


def transfer(
    full_bytes: N,
    members: float | N,
    fixed_seconds: float | N,
    setup_seconds: float | N,
    switch_bytes: float,
    seconds_per_byte: float | N,
) -> N:
    """Seconds of a collective of `members`: a latency-bound protocol for small messages (`fixed_seconds`), which gives
    way, softly around `switch_bytes` a member, to one with more setup that reaches the bandwidth."""
    share = saturating(full_bytes / (members * switch_bytes))
    result: N = fixed_seconds + setup_seconds * share + full_bytes * seconds_per_byte
    return result


def ramp(members: float, exponent: float) -> float:
    """The share of the bandwidth that a group of `members` reaches: small groups have fewer channels."""
    return float((1 - 1 / members) ** exponent) if members > 1 else 1.0
