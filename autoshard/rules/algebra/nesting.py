"""Several mesh axes on one factor, or on several factors of one dim: what devices hold, and what can't be.

A cut is (parts, blocks, unit): an axis of `parts` devices cuts, in each of `blocks` global blocks, in multiples of
`unit`. Cuts stand in mesh order. All is decided on what every device holds (`intervals.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from autoshard.ir.intervals import Cut, multiple, runs


@cache
def factor_problem(size: int, cuts: tuple[Cut, ...], may_be_empty: bool) -> str:
    """Reason why these cuts of a factor can't be ("" = they can)."""
    for parts, blocks, unit in cuts:
        if isinstance(unit, tuple):
            reason = parts_problem(size, parts, unit, len(cuts))
            if reason:
                return reason
            continue
        if size % blocks or (size // blocks) % unit:
            return f"{blocks} blocks in units of {unit} don't divide {size}"
    reason = nesting_problem(size, cuts)
    if reason:
        return reason
    if not may_be_empty and runs(size, cuts).some_empty:
        devices = " x ".join(str(parts) for parts, _, _ in cuts)
        _, blocks, unit = cuts[-1]
        return f"some device would hold nothing: {size // blocks // multiple(unit)} units over {devices} devices"
    return ""


def parts_problem(size: int, devices: int, lengths: tuple[int, ...], cuts: int = 1) -> str:
    """Reason why a dim can't be split in these lengths, one per device, with `cuts` - 1 other cuts ("" = it can)."""
    spelt = ", ".join(map(str, lengths))
    if sum(lengths) != size:
        return f"parts of {spelt} make {sum(lengths)}, and there are {size}"
    if len(lengths) != devices:
        return f"{len(lengths)} parts ({spelt}) need an axis of {len(lengths)} devices, this one has {devices}"
    return "" if cuts == 1 else f"parts of {spelt} are not cut again by another axis"


@cache
def nesting_problem(size: int, cuts: tuple[Cut, ...]) -> str:
    """Reason why cuts don't nest: blocks must not decrease, and a finer axis needs whole blocks left to it."""
    for index in range(1, len(cuts)):
        (_, outer, outer_unit), (_, inner, inner_unit) = cuts[index - 1], cuts[index]
        if (outer, outer_unit) == (inner, inner_unit):
            continue
        if inner <= outer:
            return f"{inner} blocks in units of {inner_unit} don't nest in {outer} blocks in units of {outer_unit}"
        block = size // inner
        before = runs(size, cuts[:index])
        if (before.start % block).any() or (before.stop % block).any():
            return f"the outer axes don't leave whole blocks of {block}"
    return ""


@cache
def product_problem(sizes: tuple[int, ...], cuts: tuple[tuple[int, Cut], ...]) -> str:
    """Reason why a dim (a product of parts of `sizes`) can't be cut by axes on several parts; `cuts` are (part, cut).

    If the dim's own cuts nest, they hold exactly the product of what the parts hold: an outer part is on an outer axis,
    and whole blocks are left to the parts inside it.
    """
    return nesting_problem(_product(sizes), tuple(dim_cut(sizes, part, cut) for part, cut in cuts))


def dim_cut(sizes: Sequence[int], part: int, cut: Cut) -> Cut:
    """Cut of a dim that a cut of its part `part` means: blocks = pre * blocks, unit = unit * post."""
    parts, blocks, unit = cut
    if isinstance(unit, tuple):
        assert len(sizes) == 1, "parts of given lengths are those of a dim that is one loop"
        return cut
    return parts, _product(sizes[:part]) * blocks, unit * _product(sizes[part + 1 :])


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
