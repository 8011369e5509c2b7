"""Where a second axis may pay for the devices that share a block beside tp: cp of long sequences, ep of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autoshard.step_corrections.shared_sequences import LEAST_TOKENS, shared_sequences
from autoshard.whole_step_search.blocks.context_expert_cuts import CONTEXT, EXPERT

Sizes = tuple[int, ...] | None  # None: as they are offered


def shared_experts(devices: int, experts: int) -> list[int]:
    """How many of the devices may share the experts: 1, and powers of two that divide both."""
    counts = (2**n for n in range(devices.bit_length()))
    return [n for n in counts if n == 1 or (experts and math.gcd(devices, experts) % n == 0)]


def unsearched(context: Sizes, expert: Sizes, offered: tuple[int, int]) -> Iterator[str]:
    """The second axes that may pay and were not asked for."""
    tokens, experts = offered
    if context == (1,) and tokens >= 2 * LEAST_TOKENS:
        yield "cp in addition to tp, for long sequences: --context-parallel auto searches it, too"
    if expert == (1,) and len(shared_experts(experts, experts)) > 1:
        yield "ep in addition to tp, for experts: --expert-parallel auto searches it, too"


def _named(cp: int, ep: int) -> str:
    return f"{CONTEXT}={cp}" if cp > 1 else f"{EXPERT}={ep}"


def second_axes(
    devices: int,
    apart: Callable[[int], bool],
    context: Sizes,
    expert: Sizes,
    offered: tuple[int, int],
    no: Callable[[str], None],
) -> Iterator[tuple[int, int]]:
    """(devices of cp, devices of ep) that divide `devices`, of which one is 1: of `offered` (tokens, experts) where
    sizes are None. Those alone are offered that tp is not as well, as `apart` says of a size."""
    tokens, experts = offered
    long = [n for n in shared_sequences(devices, tokens) if n == 1 or apart(n)]
    many = [n for n in shared_experts(devices, experts) if n == 1 or apart(n)]
    for cp in long if context is None else context:
        for ep in many if expert is None else expert:
            if cp > 1 and ep > 1:
                if context is not None and expert is not None:
                    no(f"cp={cp} and ep={ep}: only one axis in addition to tp shares a block")
                continue
            if devices % (cp * ep):
                no(f"what stages and tp leave of the devices, {devices}, is not divided by {_named(cp, ep)}")
                continue
            yield cp, ep
