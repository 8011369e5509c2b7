"""Proof cases: recurrent layers and cells."""

from __future__ import annotations

from autoshard.rules.proof.case_words import case, floats

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
