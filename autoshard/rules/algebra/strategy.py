"""A strategy: one choice per mesh axis, and the layouts that follow from it mechanically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoshard.ir.intervals import Unit, unit_text
from autoshard.ir.layout import HOST, Layout

ChoiceKind = Literal["factor", "repeat", "repeat_partial", "linear"]


@dataclass(frozen=True)
class Choice:
    """Action of one mesh axis on an op. Prints as `n` or `n/3*64` (the factor n, in 3 blocks, in units of 64),
    `n[10+20]` (in parts of these lengths), `=` (all replicated, whole gradients), `+` (all replicated, partial
    gradients), `~0` or `~0.1` (a partial value passes in operands 0 (and 1))."""

    kind: ChoiceKind
    factor: str = ""
    blocks: int = 1
    unit: Unit = 1
    operands: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind == "factor":
            return f"{self.factor}{unit_text(self.blocks, self.unit)}"
        if self.kind == "linear":
            return "~" + ".".join(map(str, self.operands))
        return "=" if self.kind == "repeat" else "+"

    @staticmethod
    def parse(text: str) -> Choice:
        if text == "=":
            return Choice("repeat")
        if text == "+":
            return Choice("repeat_partial")
        if text.startswith("~"):
            return Choice("linear", operands=tuple(int(part) for part in text[1:].split(".")))
        factor, _, parts = text.partition("[")
        if parts:
            return Choice("factor", factor, 1, tuple(map(int, parts.removesuffix("]").split("+"))))
        factor, _, unit = text.partition("*")
        factor, _, blocks = factor.partition("/")
        return Choice("factor", factor, int(blocks or 1), int(unit or 1))


@dataclass(frozen=True)
class Strategy:
    """Choices in mesh order, with the layout of every operand (None where the operand is absent) and result.

    Layouts are normalised (`layout.normalise`). `variant` names the runtime implementation that replaces the plain
    operator ("" = the operator itself on local tensors), e.g. `vocabulary_parallel_embedding`. `host`: it runs on the
    hosts, where its table (operand 0) lies; it prints with `host` behind its choices.
    """

    choices: tuple[Choice, ...]
    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    variant: str = ""
    host: bool = False

    def __str__(self) -> str:
        return " ".join([*map(str, self.choices), *([HOST] if self.host else [])])
