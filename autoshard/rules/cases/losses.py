"""Proof cases: losses with every reduction, weights, smoothing and ignored labels."""

from __future__ import annotations

from autoshard.rules.proof.case_text import case, constants, floats, integers, positive
from autoshard.rules.proof.rule_proof import Operand

LABELS = integers((6,), 7)
SIGNS = Operand((4, 5), gradient=False)
WEIGHTS = constants((7,))
PROBABILITY = (Operand((4, 5), unit=True), Operand((4, 5), gradient=False, unit=True))
LOGITS = (Operand((4, 5)), PROBABILITY[1])
LOSSES = [
    case("aten.cross_entropy_loss", (Operand((6, 7)), LABELS, None), reduction=1, ignore_index=2, label_smoothing=0.1),
    case("aten.cross_entropy_loss", (Operand((4, 7, 5)), integers((4, 5), 7), None), reduction=1, ignore_index=2),
    case("aten.cross_entropy_loss", (Operand((7,)), integers((), 7), None), reduction=1, ignore_index=-100),
    case("aten.cross_entropy_loss", (Operand((6, 7)), LABELS, None), reduction=2, ignore_index=2),
    case("aten.cross_entropy_loss", (Operand((6, 7)), LABELS, *WEIGHTS), reduction=0, ignore_index=3),
    *(
        case(
            "aten.cross_entropy_loss", (Operand((6, 7)), LABELS, *WEIGHTS),
            reduction=reduction, ignore_index=2, label_smoothing=smoothing,
        )
        for reduction in (0, 1, 2)
        for smoothing in (0.0, 0.2)
    ),
    case("aten.cross_entropy_loss", (Operand((2, 7, 3)), integers((2, 3), 7), *WEIGHTS), reduction=1, ignore_index=2),
    case("aten.cross_entropy_loss", (Operand((6, 7)), Operand((6, 7), gradient=False), None), reduction=1),
    case("aten.cross_entropy_loss", (Operand((4, 5, 3)), Operand((4, 5, 3), gradient=False), None), reduction=1),
    case(
        "aten.cross_entropy_loss", (Operand((6, 7)), Operand((6, 7), gradient=False), *WEIGHTS),
        reduction=1, label_smoothing=0.1,
    ),
    case("aten.cross_entropy_loss", (Operand((6, 7)), Operand((6, 7), gradient=False), None), reduction=0),
    case("aten.nll_loss", (Operand((6, 7)), LABELS, None), reduction=2, ignore_index=2),
    *(
        case(f"aten.{name}", (Operand((6, 7)), LABELS, *WEIGHTS), reduction=reduction, ignore_index=2)
        for name in ("nll_loss", "nll_loss_nd")
        for reduction in (0, 1)
    ),
    case("aten.nll_loss_nd", (Operand((6, 7)), LABELS, None), reduction=1, ignore_index=-100),
    case("aten.nll_loss_nd", (Operand((4, 7, 5)), integers((4, 5), 7), None), reduction=2, ignore_index=-100),
    *(case("aten.mse_loss", floats((4, 5), (4, 5)), reduction=reduction) for reduction in (0, 1, 2)),
    *(case("aten.l1_loss", floats((4, 5), (4, 5)), reduction=reduction) for reduction in (0, 1, 2)),
    *(case("aten.smooth_l1_loss", floats((4, 5), (4, 5)), reduction=reduction, beta=0.5) for reduction in (0, 1, 2)),
    *(case("aten.huber_loss", floats((4, 5), (4, 5)), reduction=reduction, delta=0.7) for reduction in (0, 1, 2)),
    *(case("aten.soft_margin_loss", (Operand((4, 5)), SIGNS), reduction=reduction) for reduction in (0, 1, 2)),
    *(
        case("aten.kl_div", (*floats((4, 5)), *positive((4, 5))), reduction=reduction, log_target=log)
        for reduction in (0, 1, 2)
        for log in (False, True)
    ),
    *(case("aten.binary_cross_entropy", (*PROBABILITY, None), reduction=reduction) for reduction in (0, 1, 2)),
    case("aten.binary_cross_entropy", (*PROBABILITY, *constants((5,))), reduction=1),
    *(
        case("aten.binary_cross_entropy_with_logits", (*LOGITS, None, None), reduction=reduction)
        for reduction in (0, 1, 2)
    ),
    case("aten.binary_cross_entropy_with_logits", (*LOGITS, None, *constants((5,))), reduction=1),
    case("aten.binary_cross_entropy_with_logits", (*LOGITS, *constants((4, 1)), None), reduction=1),
    case(
        "aten.poisson_nll_loss", (*floats((4, 5)), *constants((4, 5))),
        log_input=True, full=False, eps=1e-8, reduction=1,
    ),
    case("aten.margin_ranking_loss", (*floats((4, 5), (4, 5)), SIGNS), margin=0.1, reduction=1),
    case("aten.hinge_embedding_loss", (Operand((4, 5)), SIGNS), margin=1.0, reduction=1),
    *(
        case(
            "aten.cosine_embedding_loss", (*floats((6, 5), (6, 5)), integers((6,), 2, 1)),
            margin=0.1, reduction=reduction,
        )
        for reduction in (0, 1, 2)
    ),
]  # fmt: skip
