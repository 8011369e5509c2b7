"""Proof cases: scaled dot-product attention, whole, with dropout, and where its variants take every branch."""

from __future__ import annotations

from autoshard.rules.proof.case_words import booleans, case, floats
from autoshard.rules.proof.rule_proof import Operand

_TARGET = "aten.scaled_dot_product_attention"
ATTENTION = [
    case("autoshard.rotate_half", floats((4, 5, 6))),
    case(_TARGET, floats(*[(4, 4, 4, 4)] * 3, (4, 4)), is_causal=False),
    case(_TARGET, floats(*[(4, 6, 5, 3)] * 3, None), dropout_p=0.0, is_causal=True),
    case(_TARGET, floats((4, 5, 6, 3), (4, 5, 7, 3), (4, 5, 7, 4), None), is_causal=False),
    case(_TARGET, (*floats(*[(4, 5, 6, 3)] * 3), booleans((4, 1, 6, 6)))),
    case(_TARGET, floats(*[(4, 5, 6, 3)] * 3, (6, 6)), scale=0.3),
    case(_TARGET, floats((4, 6, 5, 3), (4, 2, 5, 3), (4, 2, 5, 3), None), enable_gqa=True),
    case(_TARGET, floats(*[(5, 6, 3)] * 3)),
    case(_TARGET, floats((4, 6, 5, 3), (4, 1, 5, 3), (4, 1, 5, 3), None), is_causal=True),
]
DROPOUT = [
    case(_TARGET, floats(*[(4, 6, 5, 3)] * 3, None), dropout_p=0.2, is_causal=True),
]
ATTENTION_VARIANTS = [
    # 8 heads on 2: an axis of 4 gives two devices one key head, of 3 cuts within what shares one
    case(_TARGET, floats((2, 8, 5, 3), (2, 2, 5, 3), (2, 2, 5, 4), None), is_causal=True, enable_gqa=True),
    case(_TARGET, (*floats((2, 4, 6, 3), (2, 2, 7, 3), (2, 2, 7, 3)), booleans((2, 1, 1, 7))), enable_gqa=True),
    case(_TARGET, (*floats((2, 4, 6, 3), (2, 2, 7, 3), (2, 2, 7, 3)), Operand((4, 6, 7))), enable_gqa=True),
    # chunks of a sequence of several lengths, and shared key heads, where early and late chunks go together
    case(_TARGET, floats((2, 4, 11, 3), (2, 2, 11, 3), (2, 2, 11, 4), None), is_causal=True, enable_gqa=True),
    # more queries than keys, and fewer, under a causal mask that counts from the first
    case(_TARGET, floats((4, 7, 3), (4, 5, 3), (4, 5, 2), None), is_causal=True, scale=0.7),
    case(_TARGET, floats((5, 3), (8, 3), (8, 4), None), is_causal=True),
]
DROPOUT_VARIANTS = [
    case(_TARGET, (*floats(*[(2, 3, 5, 3)] * 3), booleans((2, 1, 1, 5))), dropout_p=0.2),
    case(
        _TARGET,
        floats((2, 8, 5, 3), (2, 2, 7, 3), (2, 2, 7, 4), None),
        dropout_p=0.3,
        is_causal=True,
        enable_gqa=True,
    ),
]
