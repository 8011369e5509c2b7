"""Proof cases: linear algebra, attention, normalisation, convolution, recurrence."""

from __future__ import annotations

from autoshard.rules.cases.describe import booleans, case, constants, floats

LINEAR_ALGEBRA = [
    case("aten.linear", floats((4, 5, 6), (7, 6), (7,))),
    case("aten.linear", floats((4, 6), (8, 6), None)),
    case("aten.linear", floats((6,), (4, 6), (4,))),
    case("autoshard.linear_in_out", floats((4, 5, 6), (6, 12), (12,))),
    case("aten.matmul", floats((4, 3, 5, 6), (4, 3, 6, 4))),
    case("aten.matmul", floats((4, 1, 5, 6), (3, 6, 4))),
    case("aten.matmul", floats((5, 6), (6,))),
    case("aten.matmul", floats((6,), (4, 6, 5))),
    case("aten.matmul", floats((6,), (6,))),
    case("aten.mm", floats((5, 6), (6, 4))),
    case("aten.mv", floats((5, 6), (6,))),
    case("aten.dot", floats((6,), (6,))),
    case("aten.bmm", floats((4, 5, 6), (4, 6, 3))),
    case("aten.addmm", floats((4,), (5, 6), (6, 4)), beta=1, alpha=1),
    case("aten.addmm", floats((5, 1), (5, 6), (6, 4)), beta=2, alpha=3),
    case("aten.baddbmm", floats((4, 1, 3), (4, 5, 6), (4, 6, 3)), beta=1, alpha=1),
    case("aten.linear", floats((4, 4, 4), (4, 4), (4,))),
    case("autoshard.linear_in_out", floats((6, 6), (6, 6), (6,))),
    case("aten.mm", floats((4, 4), (4, 4))),
    case("aten.bmm", floats((4, 4, 4), (4, 4, 4))),
    case("aten.matmul", floats((4, 4, 4), (4, 4))),
    case("aten.einsum", floats((4, 5, 6), (6, 7)), equation="bsm,mn->bsn"),
]
ATTENTION = [
    case("aten.scaled_dot_product_attention", floats(*[(4, 4, 4, 4)] * 3, (4, 4)), is_causal=False),
    case("aten.scaled_dot_product_attention", floats(*[(4, 6, 5, 3)] * 3, None), dropout_p=0.0, is_causal=True),
    case("aten.scaled_dot_product_attention", floats((4, 5, 6, 3), (4, 5, 7, 3), (4, 5, 7, 4), None), is_causal=False),
    case("aten.scaled_dot_product_attention", (*floats(*[(4, 5, 6, 3)] * 3), booleans((4, 1, 6, 6)))),
    case("aten.scaled_dot_product_attention", floats(*[(4, 5, 6, 3)] * 3, (6, 6)), scale=0.3),
    case("aten.scaled_dot_product_attention", floats((4, 6, 5, 3), (4, 2, 5, 3), (4, 2, 5, 3), None), enable_gqa=True),
    case("aten.scaled_dot_product_attention", floats(*[(5, 6, 3)] * 3)),
    case("aten.scaled_dot_product_attention", floats((4, 6, 5, 3), (4, 1, 5, 3), (4, 1, 5, 3), None), is_causal=True),
]
NORMALISATION = [
    case("aten._weight_norm", floats((5, 6, 3), (5, 1, 1)), dim=0),
    case("aten._weight_norm", floats((4, 6, 7), (1, 1, 7)), dim=2),
    case("aten._weight_norm", floats((6, 4), (6, 1)), dim=0),
    case("aten.group_norm", floats((4, 12, 5, 3), (12,), (12,)), num_groups=6, eps=1e-5, cudnn_enabled=False),
    case("aten.group_norm", floats((5, 6), None, None), num_groups=3, eps=1e-5, cudnn_enabled=False),
    case("aten.softmax", floats((4, 5, 6)), dim=-1, dtype=None),
    case("aten.log_softmax", floats((4, 5, 6)), dim=1, dtype=None),
    case("aten._log_softmax", floats((4, 5)), dim=1, half_to_float=False),
    case("aten._softmax", floats((4, 5)), dim=0, half_to_float=False),
    case("aten.layer_norm", floats((4, 5, 6), (6,), (6,)), normalized_shape=(6,), eps=1e-5, cudnn_enable=False),
    case("aten.layer_norm", floats((4, 5, 6), None, None), normalized_shape=(5, 6), eps=1e-5),
    case("aten.rms_norm", floats((4, 5, 6), (6,)), normalized_shape=(6,), eps=1e-5),
    case(
        "aten.batch_norm",
        (*floats((4, 6, 5, 3), (6,), (6,)), *constants((6,), (6,))),
        training=False, momentum=0.1, eps=1e-5, cudnn_enabled=False,
    ),
    case(
        "aten.batch_norm", floats((4, 6, 5), (6,), None, None, None),
        training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False,
    ),
    case(
        "aten.batch_norm", (*floats((4, 6, 5), (6,), (6,)), *constants((6,), (6,))),
        training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False,
    ),
]  # fmt: skip
CONVOLUTION = [
    case("aten.conv2d", floats((4, 6, 5, 5), (8, 6, 3, 3), (8,)), stride=(1, 1), padding=(1, 1), groups=1),
    case("aten.conv2d", floats((4, 6, 5, 5), (9, 2, 3, 3), (9,)), stride=(2, 2), padding=(0, 0), groups=3),
    case("aten.conv2d", floats((4, 6, 5, 5), (6, 1, 3, 3), None), stride=(1, 1), padding=(1, 1), groups=6),
    case(
        "aten.conv_transpose2d",
        floats((4, 6, 5, 5), (6, 8, 3, 3), (8,)),
        stride=(2, 2),
        padding=(1, 1),
        output_padding=(1, 1),
        groups=1,
    ),
    case("aten.conv_transpose2d", floats((4, 6, 5, 5), (6, 4, 2, 2), None), stride=(2, 2), groups=3),
    case("aten.conv_transpose1d", floats((4, 6, 5), (6, 4, 2), None), stride=(2,)),
    case("aten.conv_transpose3d", floats((4, 6, 3, 3, 3), (6, 4, 2, 2, 2), (4,)), stride=(2, 2, 2)),
    case("aten.conv1d", floats((4, 6, 5), (4, 6, 2), None), stride=(1,), padding=(0,), groups=1),
    case("aten.conv3d", floats((4, 6, 3, 3, 3), (4, 6, 2, 2, 2), (4,)), stride=(1, 1, 1), padding=(0, 0, 0), groups=1),
    *(case(f"aten.{name}1d", floats((4, 5, 6)), kernel_size=(2,), stride=(2,)) for name in ["avg_pool", "max_pool"]),
    case("aten.avg_pool3d", floats((4, 5, 4, 4, 4)), kernel_size=(2, 2, 2), stride=(2, 2, 2)),
    case("aten.max_pool3d", floats((4, 5, 4, 4, 4)), kernel_size=(2, 2, 2), stride=(2, 2, 2)),
    case("aten.max_pool2d_with_indices", floats((4, 5, 6, 6)), kernel_size=(2, 2), stride=(2, 2)),
    case("aten.max_pool3d_with_indices", floats((4, 5, 4, 4, 4)), kernel_size=(2, 2, 2), stride=(2, 2, 2)),
    *(case(f"aten.adaptive_{k}_pool1d", floats((4, 5, 6)), output_size=(2,)) for k in ["avg", "max"]),
    *(case(f"aten.adaptive_{k}_pool3d", floats((4, 5, 4, 4, 4)), output_size=(2, 2, 2)) for k in ["avg", "max"]),
    case("aten.adaptive_max_pool2d", floats((4, 5, 6, 6)), output_size=(2, 2)),
    case("aten.max_pool2d", floats((4, 5, 6, 6)), kernel_size=(2, 2), stride=(2, 2)),
    case("aten.max_pool2d", floats((2, 3, 7, 8)), kernel_size=(3, 3), stride=(2, 2), padding=(1, 1)),
    case(
        "aten.max_pool1d", floats((3, 11)), kernel_size=(3,), stride=(2,), padding=(1,), dilation=(2,), ceil_mode=True
    ),
    case("aten.avg_pool2d", floats((2, 3, 9, 8)), kernel_size=(3, 3), stride=(1, 2), padding=(1, 1), ceil_mode=True),
    case(
        "aten.avg_pool2d", floats((3, 9, 8)), kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), count_include_pad=False
    ),
    case("aten.avg_pool2d", floats((2, 7, 6)), kernel_size=(2, 3), stride=(1, 1), divisor_override=5),
    case("aten.adaptive_avg_pool2d", floats((2, 3, 12, 6)), output_size=(6, 1)),
    case("aten.conv2d", floats((2, 3, 12, 8), (4, 3, 4, 2), (4,)), stride=(4, 2), padding=(0, 0)),
    case("aten.conv2d", floats((2, 3, 7, 9), (4, 3, 3, 3), (4,)), stride=(2, 2), padding=(1, 1)),
    case("aten.conv2d", floats((2, 3, 8, 13), (4, 3, 3, 5), None), stride=(1, 2), padding=(2, 2), dilation=(2, 1)),
    case("aten.conv2d", floats((2, 4, 9, 9), (6, 2, 5, 1), (6,)), stride=(1, 1), padding="same", groups=2),
    case("aten.conv1d", floats((2, 3, 8), (4, 3, 8), (4,)), stride=(1,), padding=(7,)),
    case("aten.conv1d", floats((2, 3, 14), (4, 3, 9), (4,)), stride=(1,), padding=(0,)),
    case(
        "aten.conv_transpose2d",
        floats((2, 3, 5, 6), (3, 4, 3, 2), (4,)),
        stride=(2, 3),
        padding=(1, 0),
        output_padding=(1, 0),
        dilation=(1, 1),
    ),
    case("aten.conv_transpose1d", floats((2, 3, 7), (3, 4, 4), None), stride=(2,), padding=(1,)),
    case("aten.conv_transpose1d", floats((2, 3, 5), (3, 4, 3), (4,)), stride=(1,), padding=(2,), dilation=(2,)),
    case("aten.avg_pool2d", floats((4, 5, 6, 6)), kernel_size=(2, 2), stride=(2, 2)),
    case("aten.adaptive_avg_pool2d", floats((4, 5, 6, 6)), output_size=(1, 1)),
]
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
