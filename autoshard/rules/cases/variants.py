"""Proof cases: operators whose variants communicate, at sizes that need every branch of them."""

from __future__ import annotations

from autoshard.rules.cases.describe import booleans, case, floats
from autoshard.rules.prove import Operand

_ATTENTION = "aten.scaled_dot_product_attention"
ATTENTION_VARIANTS = [
    # 8 heads on 2: an axis of 4 gives two devices one key head, of 3 cuts within what shares one
    case(_ATTENTION, floats((2, 8, 5, 3), (2, 2, 5, 3), (2, 2, 5, 4), None), is_causal=True, enable_gqa=True),
    case(_ATTENTION, (*floats((2, 4, 6, 3), (2, 2, 7, 3), (2, 2, 7, 3)), booleans((2, 1, 1, 7))), enable_gqa=True),
    case(_ATTENTION, (*floats((2, 4, 6, 3), (2, 2, 7, 3), (2, 2, 7, 3)), Operand((4, 6, 7))), enable_gqa=True),
    # more queries than keys, and fewer, under a causal mask that counts from the first
    case(_ATTENTION, floats((4, 7, 3), (4, 5, 3), (4, 5, 2), None), is_causal=True, scale=0.7),
    case(_ATTENTION, floats((5, 3), (8, 3), (8, 4), None), is_causal=True),
]
