"""Proof cases: convolutions and pools."""

from __future__ import annotations

from autoshard.rules.proof.case_text import case, floats

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
