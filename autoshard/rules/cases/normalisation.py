"""Proof cases: softmax and norms."""

from __future__ import annotations

from autoshard.rules.proof.case_text import case, constants, floats

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
