"""Mixture of experts: t tokens, e experts, f their inner size, k experts a token (capture folds a block into one).

Experts cut alone: every device has all tokens and adds its experts' part. Tokens and experts cut by one axis (`t+e`):
tokens travel to their experts and back, all-to-all."""

from __future__ import annotations

from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    Localise,
    LocaliseVariant,
    OperatorCall,
    RuleFor,
)


def experts(call: OperatorCall) -> str:
    if call.present == 7:
        options = "sum: e f | whole: m k | plain: e | variant: parallel_experts | together: t+e dispatched_experts"
        return f"t m, e m (f 2), e f n, t k, t k, e (f 2), +e n -> t n | {options}"
    up = "e (2 f) m" if call.get("gated") else "e f m"
    options = "sum: e f | whole: m k | plain: e | variant: parallel_experts | together: t+e dispatched_experts"
    return f"t m, {up}, e n f, t k, t k -> t n | {options}"


def localise_experts(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    dispatch = local.axes("t+e")
    cut = local.axes("e", "t+e")
    roles = (("cut", cut), ("dispatch", dispatch))
    return dict(local.op.attributes), tuple((role, axes) for role, axes in roles if axes)


RULES: dict[str, str | RuleFor] = {"autoshard.experts": experts}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {"parallel_experts": localise_experts, "dispatched_experts": localise_experts}
