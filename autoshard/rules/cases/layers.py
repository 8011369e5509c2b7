"""Proof cases: attention, recurrent layers and cells, mixtures of experts."""

from __future__ import annotations

from autoshard.rules.proof.case_text import booleans, case, floats, integers
from autoshard.rules.proof.rule_proof import Operand

LAYER_OF_LSTM = [(24, 3), (24, 6), (24,), (24,)]
CELL = [(5, 3), (5, 6)]  # input and state of 5 samples
RECURRENT = [
    case("aten.lstm_cell", floats(*CELL, (5, 6), (24, 3), (24, 6), (24,), (24,))),
    case("aten.lstm_cell", floats((4, 3), (4, 7), (4, 7), (28, 3), (28, 7), None, None)),
    case("aten.gru_cell", floats(*CELL, (18, 3), (18, 6), (18,), (18,))),
    case("aten.gru_cell", floats((4, 3), (4, 7), (21, 3), (21, 7), None, None)),
    case("aten.rnn_tanh_cell", floats(*CELL, (6, 3), (6, 6), (6,), (6,))),
    case("aten.rnn_relu_cell", floats((4, 3), (4, 7), (7, 3), (7, 7), None, None)),
    case(
        "aten.lstm", floats((5, 4, 3), *[(2, 5, 6)] * 2, *LAYER_OF_LSTM, (24, 6), (24, 6), (24,), (24,)),
        hx=2, has_biases=True, num_layers=2, dropout=0.0, train=True, bidirectional=False, batch_first=True,
    ),
    case(
        "aten.lstm", floats((5, 4, 3), *[(2, 4, 6)] * 2, *LAYER_OF_LSTM, *LAYER_OF_LSTM),
        hx=2, has_biases=True, num_layers=1, dropout=0.0, train=True, bidirectional=True, batch_first=False,
    ),
    case(
        "aten.gru", floats((4, 5, 3), (1, 4, 6), (18, 3), (18, 6)),
        has_biases=False, num_layers=1, dropout=0.0, train=True, bidirectional=False, batch_first=True,
    ),
    *(
        case(
            f"aten.rnn_{name}", floats((4, 5, 3), (1, 4, 6), (6, 3), (6, 6), (6,), (6,)),
            has_biases=True, num_layers=1, dropout=0.0, train=True, bidirectional=False, batch_first=True,
        )
        for name in ("relu", "tanh")
    ),
]  # fmt: skip


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


EXPERTS = [
    case(
        "autoshard.experts", (*floats((10, 3), (5, 8, 3), (5, 6, 4)), integers((10, 2), 5), Operand((10, 2))),
        experts=5, activation="silu", gated=True,
    ),
    case(
        "autoshard.experts", (*floats((6, 4), (4, 5, 4), (4, 4, 5)), integers((6, 3), 2), Operand((6, 3))),
        experts=4, activation="gelu_tanh", gated=False,
    ),
    case(
        "autoshard.experts", (*floats((4, 4), (4, 6, 4), (4, 4, 6)), integers((4, 2), 4), Operand((4, 2))),
        experts=4, activation="relu2", gated=False,
    ),
    case(
        "autoshard.experts",
        (*floats((6, 3), (5, 3, 8), (5, 4, 2)), integers((6, 2), 5), *floats((6, 2), (5, 8), (5, 2))),
        experts=5, activation="clipped", gated=True, limit=1.0, alpha=1.7,
    ),
]  # fmt: skip
