"""The step that sequential tree-reweighted message passing is made of (Kolmogorov, TPAMI 2006).

A node tells its neighbours what each of their choices costs at least on its side:

    belief_n(x) = a_n(x) + sum over neighbours m of M_{m -> n}(x)
    M_{n -> m}(y) = min_x [ b_nm(x, y) + g_n belief_n(x) - M_{m -> n}(x) ]
    g_n = 1 / max(edges forwards, edges backwards)
    bound = sum of the minima of beliefs and messages, each taken out where it is met

Implemented in `trws.send_messages`; over pairs of choices in `trws_pairs`, over layouts in `trws_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from autoshard.ir.problem import Floats

Edge = TypeVar("Edge")


def send_messages(
    belief: Floats,
    share: float,
    edges: Iterable[Edge],
    message: Callable[[Edge, Floats], Floats],
    keep: Callable[[Edge, Floats], None],
) -> float:
    """Messages over these edges of one node, from its belief (changed in place); what they raise the bound by.

    `message`: of an edge, from g_n (belief - its least); `keep` stores it with its least taken out.
    """
    least = belief.min()
    total = float(least)
    belief -= least
    belief *= share
    for edge in edges:
        sent = message(edge, belief)
        least = sent.min()
        total += float(least)
        sent -= least
        keep(edge, sent)
    return total
