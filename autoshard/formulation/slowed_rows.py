"""One more resource of a step for each link: computations, slowed while that link is busy, and in between the serial
tasks of the program.

During communication, a computation progresses by 1 / (1 + s) per second, s the slowdown. So with C its seconds alone, L
those in which the link is busy and N those in which nothing is computed, of which L can hide no more than these, and k
= s / (1 + s):

    step >= C + N + k (L - N) = (1 - k) (C + N) + k (C + L)

C + N is what runs serially, except that a collective overlapped by computation (one of a ring, the sum of an input's
gradient during its weight product) leaves less idle as that is slower: HIDDEN deducts this. It holds for the forward,
for the backward, and for what comes after a moment of it, except for weights gathered again ahead of their use: HIDDEN
deducts these, too.
"""

from __future__ import annotations

import numpy as np

from autoshard.formulation.resource_tables import COMPUTE, HIDDEN, IN_ROW
from autoshard.ir.problem import SLAB, Floats

SLOWED = "slowed by "  # and the name of a link or axis


class SlowedRows:
    """`before`: the names of the rows of a phase, as `ResourceTables` makes them. `names`: those of the resources, each
    in the position of its row; that of a link that slows computations is in the position of HIDDEN."""

    def __init__(self, before: tuple[str, ...], slowdown: float) -> None:
        links = {row: name.removeprefix(HIDDEN) for row, name in enumerate(before) if name.startswith(HIDDEN)}
        names = [SLOWED + links[row] if row in links else name for row, name in enumerate(before)]
        self.rows = [row for row in range(len(before)) if slowdown or row not in links]
        self.names = tuple(names[row] for row in self.rows)
        share = slowdown / (1 + slowdown)
        in_row, compute = before.index(IN_ROW), before.index(COMPUTE)
        self.parts = {
            row: ((in_row, 1 - share), (compute, share), (before.index(link), share), (row, share - 1))
            for row, link in links.items()
        }
        self.converted: dict[int, tuple[Floats, Floats]] = {}  # with what its key names

    def of(self, table: Floats, *, slowed: bool = True) -> Floats:
        """Rows of the resources from those in the table, forward then backward: in the same memory, as tables of three
        axes are gigabytes. Without `slowed`, links' rows are unchanged. Equal arrays stay one object."""
        if id(table) not in self.converted:
            for phase in np.split(table, 2):
                entries = phase.reshape(len(phase), -1)
                for low in range(0, entries.shape[1], SLAB):
                    self._settle(entries[:, low : low + SLAB], slowed)
            self.converted[id(table)] = self._left(table), table
        return self.converted[id(table)][0]

    def _settle(self, rows: Floats, slowed: bool) -> None:
        """Converts rows in place, in pieces that stay in the cache."""
        for row, parts in self.parts.items() if slowed else ():
            rows[row] = sum(part * rows[other] for other, part in parts)
        some = rows if slowed else rows[: min(self.parts, default=len(rows))]  # those of links are the last
        np.maximum(0.0, some, out=some)  # rounding may leave less

    def _left(self, table: Floats) -> Floats:
        count = len(table) // 2
        if len(self.rows) == count:
            return table
        return table[[*self.rows, *(row + count for row in self.rows)]]
