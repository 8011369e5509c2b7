"""What blocks surely work with beside all that their part keeps.

While a block runs, those after it keep nothing. So of a part's last block all that it works with is beside what the
part keeps; of one before it, what it works with less what those after it keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autoshard.ir.problem import Floats

_LOOKED_AT = 3  # blocks of a part, its last ones


def least_working(part: Sequence[int], works: Sequence[Floats], kept: Sequence[Floats]) -> float:
    """Of a part that ends in these kinds of blocks. `works` and `kept`: bytes of each point, by kind."""
    most = after = 0.0
    for kind in reversed(part):
        most = max(most, float(works[kind].min()) - after)
        after += float(kept[kind].max())
    return most


def of_every_part(line: tuple[int, ...], works: Sequence[Floats], kept: Sequence[Floats]) -> list[float]:
    """[kind]: of any part of the line that has a block of the kind."""
    every = _ends(line, len(works))
    return [min((least_working(part, works, kept) for part in own), default=0.0) for own in every]


@lru_cache(maxsize=64)
def _ends(line: tuple[int, ...], kinds: int) -> tuple[frozenset[tuple[int, ...]], ...]:
    """[kind]: how parts end that have a block of it; no more of a part than `_LOOKED_AT` blocks."""
    found: list[set[tuple[int, ...]]] = [set() for _ in range(kinds)]
    last: dict[int, int] = {}
    for end, own in enumerate(line):
        last[own] = end
        for kind, block in last.items():
            found[kind].add(line[max(block, end + 1 - _LOOKED_AT) : end + 1])
    return tuple(map(frozenset, found))


def of_dealt(
    line: tuple[int, ...], run: tuple[int, int], stages: int, works: Sequence[Floats], kept: Sequence[Floats]
) -> Floats:
    """[stage]: of the last of several chunks, which ends in a block of the run; of the last stage, in what is after."""
    start, stop = run
    found = np.full(stages, least_working(line[start : start + 1], works, kept))
    found[-1] = least_working(line[stop - 1 :], works, kept)
    return found
