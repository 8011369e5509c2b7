"""Proof cases: operators whose variants communicate, at sizes that need every branch of them."""

from __future__ import annotations

from autoshard.rules.cases.describe import booleans, case, constants, floats
from autoshard.rules.proof.rule_proof import Operand

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
REPEATS = [
    case("aten.repeat_interleave", floats((2, 3, 4)), repeats=4, dim=1, output_size=None),
    case("aten.repeat_interleave", floats((2, 4)), repeats=2, dim=-2, output_size=None),
]
DROPOUT_VARIANTS = [
    case(_ATTENTION, (*floats(*[(2, 3, 5, 3)] * 3), booleans((2, 1, 1, 5))), dropout_p=0.2),
    case(
        _ATTENTION,
        floats((2, 8, 5, 3), (2, 2, 7, 3), (2, 2, 7, 4), None),
        dropout_p=0.3,
        is_causal=True,
        enable_gqa=True,
    ),
]

NORMALISATION_VARIANTS = [
    case("aten.softmax", floats((5, 7)), dim=0, dtype="float64"),
    case("aten.layer_norm", floats((5, 7), (7,), None), normalized_shape=(7,), eps=1e-3),
    case("aten.layer_norm", floats((3, 4, 5), (4, 5), (4, 5)), normalized_shape=(4, 5), eps=1e-5),
    case("aten.rms_norm", floats((3, 4, 5), (4, 5)), normalized_shape=(4, 5), eps=None),
    case("aten.group_norm", floats((4, 6, 5), (6,), (6,)), num_groups=1, eps=1e-5, cudnn_enabled=False),
    case("aten.group_norm", floats((4, 7), (7,), None), num_groups=1, eps=1e-5, cudnn_enabled=False),
    # the batch itself, uneven; one channel of one position each; no weights
    case(
        "aten.batch_norm", (*floats((5, 6, 3, 4), (6,), (6,)), *constants((6,), (6,))),
        training=True, momentum=0.3, eps=1e-3, cudnn_enabled=False,
    ),
    case(
        "aten.batch_norm", (*floats((7, 3), None, None), *constants((3,), (3,))),
        training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False,
    ),
]  # fmt: skip
