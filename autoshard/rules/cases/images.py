"""Proof cases: operators on images."""

from __future__ import annotations

from autoshard.rules.proof.case_text import case, floats

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
        "aten.col2im", floats((4, 30, 10)),
        output_size=(4, 4), kernel_size=(2, 3), dilation=(1, 1), padding=(1, 0), stride=(1, 1),
    ),
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
