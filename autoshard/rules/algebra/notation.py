"""The notation of rules, written like einsum: `... m, n m, +n? -> ... n | sum: m`.

    rule     operands -> results | option | option
    operand  `... m`, dims separated by spaces; `()` a scalar; `-` an absent operand (in bound rules);
             `+n` added, not multiplied (a bias); `n?` optional
    dim      `n` a factor (a loop); `3` a literal size, never cut; `(n d)` or `(3 h)` a product, outermost first;
             `...` any number of broadcasting dims; `d*` several dims
    option   `sum: m`       factors that the result lacks because they are summed: the result is `Partial`
             `whole: d`     factors that can't be cut
             `joined: v`    factors that the variant's own collectives join: the result is whole on each device
             `linear: 0+1`  a `Partial` passes in operands 0 and 1 together; `linear: 0, 1` in either alone
             `variant: f v` the runtime's `f` replaces the operator where an axis is on v (always, if none is named)
             `empty: v`     factors of which a device may hold nothing
             `plain: v`     factors cut without blocks or units: the variant knows its range from the axes alone
             `resized: v`   factors whose dims differ in length (an image and its convolution): each is cut by its own
             `together: t+e f` one axis may cut the factors t and e at once; the runtime's `f` then is what runs.
                            Several, by commas, with names: `ring s+t f, heads g*r h` (g*r: the dims that are `(g r)`)

A factor that some result lacks must be listed as sum, whole or joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

ELLIPSIS = "..."
_TOKEN = re.compile(r"\.\.\.|[A-Za-z_][A-Za-z0-9_]*\*?|\d+|\(|\)|\s+")
_FACTOR_OPTIONS = ("sum", "whole", "joined", "empty", "plain", "resized")


class RuleError(ValueError):
    """A rule that can't be read, or that does not fit the operator it is written for."""


@dataclass(frozen=True)
class Dim:
    """A product of parts, outermost first: factor names, literal sizes, or alone `...` or `d*`."""

    parts: tuple[str | int, ...]

    def __str__(self) -> str:
        text = " ".join(map(str, self.parts))
        return text if len(self.parts) == 1 else f"({text})"

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of the factors; `d*` as `d`."""
        return tuple(part.rstrip("*") for part in self.parts if isinstance(part, str))

    @property
    def star(self) -> bool:
        return any(isinstance(part, str) and part.endswith("*") for part in self.parts)


@dataclass(frozen=True)
class Term:
    """The dims of one operand or result."""

    dims: tuple[Dim, ...]
    added: bool = False
    optional: bool = False

    def __str__(self) -> str:
        text = " ".join(map(str, self.dims)) or "()"
        return f"{'+' if self.added else ''}{text}{'?' if self.optional else ''}"

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(factor for dim in self.dims for factor in dim.factors))


@dataclass(frozen=True)
class Together:
    """A choice that cuts several factors at once, and its variant: each factor (`s+t`), or their product (`g*r`).

    It may cut factors that are whole otherwise: the variant joins them.
    """

    name: str
    factors: tuple[str, ...]
    product: bool
    variant: str

    def __str__(self) -> str:
        text = ("*" if self.product else "+").join(self.factors)
        return " ".join((text, self.variant) if text == self.name else (self.name, text, self.variant))

    def part(self, dim: Dim) -> int | None:
        """The first part of the dim that the choice cuts; of a product it cuts the whole dim."""
        if self.product:
            return 0 if dim.parts == self.factors else None
        return next((index for index, part in enumerate(dim.parts) if part in self.factors), None)


@dataclass(frozen=True)
class Rule:
    """Factors of an operator. An operand is None if it is absent (`-`), which only bound rules have."""

    operands: tuple[Term | None, ...]
    results: tuple[Term, ...]
    sum: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    variant: str = ""
    variant_factors: tuple[str, ...] = ()
    together: tuple[Together, ...] = ()

    def __str__(self) -> str:
        operands = ", ".join("-" if term is None else str(term) for term in self.operands)
        text = f"{operands} -> {', '.join(map(str, self.results))}".strip()
        return " | ".join([text, *self._options()])

    def _options(self) -> Iterator[str]:
        for name in _FACTOR_OPTIONS:
            if getattr(self, name):
                yield f"{name}: {' '.join(getattr(self, name))}"
        if self.linear:
            yield "linear: " + ", ".join("+".join(map(str, group)) for group in self.linear)
        if self.variant:
            yield "variant: " + " ".join((self.variant, *self.variant_factors))
        if self.together:
            yield "together: " + ", ".join(map(str, self.together))

    @property
    def terms(self) -> tuple[Term, ...]:
        """The operands that are there, then the results."""
        return tuple(term for term in self.operands if term is not None) + self.results

    @property
    def factors(self) -> tuple[str, ...]:
        """Factors, each once, in order of appearance."""
        return tuple(dict.fromkeys(factor for term in self.terms for factor in term.factors))

    @staticmethod
    def parse(text: str) -> Rule:
        """Raises RuleError that quotes the rule and names what is wrong with it."""
        try:
            rule = _parse(text)
            _check(rule)
        except RuleError as error:
            raise RuleError(f"rule {text!r}: {error}") from None
        return rule


def _parse(text: str) -> Rule:
    head, *options = text.split("|")
    left, arrow, right = head.partition("->")
    if not arrow:
        raise RuleError("no `->`")
    operands = tuple(_parse_operand(part) for part in left.split(",")) if left.strip() else ()
    results = tuple(_parse_term(part) for part in right.split(","))
    values: dict[str, str] = {}
    for option in options:
        name, _, value = (part.strip() for part in option.partition(":"))
        if name not in (*_FACTOR_OPTIONS, "linear", "variant", "together") or name in values or not value:
            raise RuleError(f"bad option {option.strip()!r}")
        values[name] = value
    variant, *variant_factors = values.get("variant", "").split() or [""]
    listed = {name: tuple(values.get(name, "").split()) for name in _FACTOR_OPTIONS}
    linear = _parse_linear(values.get("linear", ""))
    factors = tuple(variant_factors)
    together = tuple(_parse_together(text) for text in values.get("together", "").split(",") if text.strip())
    return Rule(operands, results, **listed, linear=linear, variant=variant, variant_factors=factors, together=together)


def _parse_linear(text: str) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(int(part) for part in group.split("+")) for group in text.split(",") if text)
    except ValueError:
        raise RuleError(f"linear: expected operand numbers, got {text!r}") from None


def _parse_together(text: str) -> Together:
    words = text.split()
    if not 2 <= len(words) <= 3:
        raise RuleError("together: expected factors joined by + and the name of a variant")
    product = "*" in words[-2]
    return Together(words[0], tuple(words[-2].split("*" if product else "+")), product, words[-1])


def _parse_operand(text: str) -> Term | None:
    return None if text.strip() == "-" else _parse_term(text)


def _parse_term(text: str) -> Term:
    body = text.strip()
    added, optional = body.startswith("+"), body.endswith("?")
    body = body.removeprefix("+").removesuffix("?").strip()
    if not body:
        raise RuleError("an empty operand or result; write `()` for a scalar")
    dims = [] if body == "()" else list(_parse_dims(body))
    return Term(tuple(dims), added, optional)


def _parse_dims(body: str) -> Iterator[Dim]:
    product: list[str | int] | None = None
    for token in _tokens(body):
        if token == "(" and product is None:
            product = []
        elif token == ")" and product:
            yield Dim(tuple(product))
            product = None
        elif token in "()":
            raise RuleError(f"unbalanced or empty parentheses in {body!r}")
        elif product is None:
            yield Dim((_part(token),))
        elif token == ELLIPSIS or token.endswith("*"):
            raise RuleError(f"{token} inside a product in {body!r}")
        else:
            product.append(_part(token))
    if product is not None:
        raise RuleError(f"unbalanced parentheses in {body!r}")


def _tokens(body: str) -> Iterator[str]:
    position = 0
    while position < len(body):
        match = _TOKEN.match(body, position)
        if match is None:
            raise RuleError(f"unexpected {body[position:]!r}")
        if not match[0].isspace():
            yield match[0]
        position = match.end()


def _part(token: str) -> str | int:
    return int(token) if token.isdigit() else token


def _check(rule: Rule) -> None:
    known = rule.factors
    for name in (*_FACTOR_OPTIONS, "variant_factors"):
        for factor in getattr(rule, name):
            if factor not in known:
                raise RuleError(f"{name}: {factor} is no factor of any operand or result")
    for factor in known:
        lacking = any(factor not in term.factors for term in rule.results)
        if lacking and factor not in rule.sum + rule.whole + rule.joined:
            raise RuleError(f"factor {factor} is missing from a result: list it as sum:, whole: or joined:")
    for together in rule.together:
        if len(together.factors) < 2 or not set(together.factors) <= set(known):
            raise RuleError("together: expected factors joined by + and the name of a variant")
        if together.name in known:
            raise RuleError(f"together: {together.name} is a factor already")
    for group in rule.linear:
        for operand in group:
            if operand >= len(rule.operands):
                raise RuleError(f"linear: there is no operand {operand}")
