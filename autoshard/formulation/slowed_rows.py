"""One more resource of a step for each link: the computations, slower beside what that link carries, and in between
what the program runs in a row.

While something is communicated, a computation makes 1 / (1 + s) of its way in a second, s the slowdown. So with C its
seconds alone, L those in which the link is busy and N those in which nothing is computed, of which L can hide no more
than these, and k = s / (1 + s):

    step >= C + N + k (L - N) = (1 - k) (C + N) + k (C + L)

C + N is what runs in a row, but that a collective beside which something is computed (one of a ring, the sum of an
input's gradient beside its weight product) leaves less idle as that is slower: HIDDEN takes this off. It holds of the
forward, of the backward, and of what comes after a moment of it, but for weights gathered again ahead of their use:
HIDDEN takes these off, too.
"""

from __future__ import annotations

import numpy as np

from autoshard.formulation.resource_tables import COMPUTE, HIDDEN, IN_ROW
from autoshard.ir.problem import Floats

SLOWED = "slowed by "  # and the name of a link or axis


class SlowedRows:
    """`before`: the names of the rows of a phase, as `ResourceTables` makes them. `names`: those of the resources."""

    def __init__(self, before: tuple[str, ...], slowdown: float) -> None:
        kept = [row for row, name in enumerate(before) if not name.startswith(HIDDEN)]
        links = [name.removeprefix(HIDDEN) for name in before if name.startswith(HIDDEN) and slowdown]
        self.names = (*(before[row] for row in kept), *(SLOWED + link for link in links))
        share = slowdown / (1 + slowdown)
        self.mix = np.zeros((len(self.names), len(before)))
        self.mix[np.arange(len(kept)), kept] = 1.0
        for row, link in enumerate(links, len(kept)):
            for name, part in ((IN_ROW, 1 - share), (HIDDEN + link, share - 1), (COMPUTE, share), (link, share)):
                self.mix[row, before.index(name)] = part
        self.known: dict[int, tuple[Floats, Floats]] = {}  # with what its key names

    def of(self, found: Floats) -> Floats:
        """Of rows as they are made, forward then backward, those of the resources. Equal arrays stay one object."""
        if id(found) not in self.known:
            count = len(found) // 2
            phases = [np.tensordot(self.mix, part, 1) for part in (found[:count], found[count:])]
            self.known[id(found)] = np.maximum(0.0, np.concatenate(phases)), found  # rounding may leave less
        return self.known[id(found)][0]
