"""Proof cases: operators on images, and writes at given places."""

from __future__ import annotations

from autoshard.rules.cases.describe import booleans, case, floats, integers
from autoshard.rules.cases.moving import ONE_A_ROW
from autoshard.rules.proof.rule_proof import Operand

SMOOTH = {
    "upsample_linear1d": (5,),
    "upsample_bilinear2d": (5, 4),
    "upsample_bicubic2d": (5, 4),
    "upsample_trilinear3d": (3, 2, 2),
}
IMAGES = [
    *(
        case(f"aten.{name}{n}d", floats((4, 5, *[6, 5, 2][:n])), output_size=None, scale_factors=(2.0, 2.0, 3.0)[:n])
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    ),
    case("aten.upsample_nearest2d", floats((2, 3, 6, 4)), output_size=(18, 7), scale_factors=None),
    *(
        case(
            f"aten.{name}", floats((4, 5, *size)),
            output_size=tuple(2 * n for n in size), align_corners=False, scale_factors=None,
        )
        for name, size in SMOOTH.items()
    ),
    case("aten.pixel_shuffle", floats((2, 24, 3, 4)), upscale_factor=2),
    case("aten.pixel_unshuffle", floats((2, 3, 6, 4)), downscale_factor=2),
    case("aten.im2col", floats((4, 5, 4, 4)), kernel_size=(2, 3), dilation=(1, 1), padding=(1, 0), stride=(1, 1)),
    case(
        "aten.grid_sampler", floats((4, 5, 6, 6), (4, 3, 5, 2)),
        interpolation_mode=0, padding_mode=0, align_corners=False,
    ),
    case(
        "aten.instance_norm", floats((4, 6, 5, 3), (6,), (6,), None, None),
        use_input_stats=True, momentum=0.1, eps=1e-5, cudnn_enabled=False,
    ),
    case("aten.prelu", floats((4, 6, 5), (6,))),
    case("aten.prelu", floats((4, 6), (1,))),
]  # fmt: skip
WRITES = [
    case("aten.index_put", (Operand((7, 6)), integers((2, 2), 7), Operand((2, 2, 6))), accumulate=True),
    case("aten.index_put", (Operand((7, 6)), integers((1,), 7), Operand((6,))), accumulate=False),
    case("aten.index_put", (Operand((5, 7, 6)), None, integers((4,), 7), Operand((5, 4, 6))), accumulate=True),
    case(
        "aten.index_put", (Operand((5, 7, 6)), integers((4,), 5), integers((4,), 7), Operand((4, 6))), accumulate=True
    ),
    case("aten.index_put", (Operand((5, 7)), integers((4,), 5), integers((4,), 7), Operand(())), accumulate=False),
    case("aten.index_put", (Operand((5, 6)), booleans((5, 6)), Operand((), gradient=False)), accumulate=False),
    case("aten.index_copy", (Operand((4, 7)), integers((1,), 7), Operand((4, 1))), dim=1),
    case("aten.index_fill", (Operand((4, 7)), integers((3,), 7)), dim=1, value=2.0),
    case("aten.scatter_reduce", (Operand((4, 7)), ONE_A_ROW, Operand((4, 1))), dim=1, reduce="sum", include_self=True),
    case("aten.scatter_reduce", (Operand((4, 7)), integers((4, 6), 7), Operand((4, 6))), dim=1, reduce="amax"),
    case("aten.one_hot", (integers((4, 5), 7),), num_classes=7),
    case("aten.bucketize", (Operand((4, 5)), Operand((6,), gradient=False)), right=True),
]
