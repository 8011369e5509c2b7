"""Tensors made from the shape of another. Those made from nothing (arange, zeros) are repeated on every device."""

from __future__ import annotations

from autoshard.rules.algebra.argument_rules import Localise, LocaliseVariant, RuleFor

NOTHING = ["arange", "empty", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros"]
NEW = ["new_empty", "new_full", "new_ones", "new_zeros"]
LIKE = ["empty_like", "full_like", "ones_like", "zeros_like"]

RULES: dict[str, str | RuleFor] = {f"aten.{name}": "... -> ..." for name in LIKE}
REPEATED = frozenset(f"aten.{name}" for name in NOTHING + NEW)
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {}
