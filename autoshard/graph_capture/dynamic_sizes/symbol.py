"""`Symbol`: a size of an input that may differ from step to step, as a user declares it.

It is MindSpore's `mindspore.Symbol`: a size is `divisor * n + remainder` with n of 1 or more, from `min` to `max`.
"""

from __future__ import annotations

from autoshard.errors import UsageError


class SymbolTypeError(UsageError, TypeError):
    """An argument of a Symbol that is of another type."""


class SymbolValueError(UsageError, ValueError):
    """An argument of a Symbol that is out of its range."""


class Symbol:
    """A dynamic size. The same object on several dims is one size; with `max=0` it has no upper limit.

    `unique` is accepted for MindSpore's sake: dims with one Symbol always have one length in a step.
    `name`: what messages and code call it; else "batch" on dim 0, "sequence" on dim 1, `size_1` and so on.
    Raises SymbolTypeError (a TypeError) and SymbolValueError (a ValueError).
    """

    def __init__(
        self,
        max: int = 0,
        min: int = 1,
        divisor: int = 1,
        remainder: int = 0,
        unique: bool = False,
        name: str = "",
    ) -> None:
        for word, number in (("max", max), ("min", min), ("divisor", divisor), ("remainder", remainder)):
            if type(number) is not int:
                raise SymbolTypeError(f"Symbol({word}={number!r}): expected an int", f"{word}=8")
        if type(unique) is not bool:
            raise SymbolTypeError(f"Symbol(unique={unique!r}): expected True or False", "unique=True")
        if type(name) is not str or (name and not name.isidentifier()):
            raise SymbolTypeError(f"Symbol(name={name!r}): expected a name of letters, digits and _", 'name="height"')
        if min < 1:
            raise SymbolValueError(f"Symbol(min={min}): expected 1 or more", "min=1")
        if divisor < 1:
            raise SymbolValueError(f"Symbol(divisor={divisor}): expected 1 or more", "divisor=8")
        if not 0 <= remainder < divisor:
            message = f"Symbol(remainder={remainder}, divisor={divisor}): expected 0 to {divisor - 1}"
            raise SymbolValueError(message, "a remainder below the divisor")
        if max < 0 or (max and max <= min):
            raise SymbolValueError(f"Symbol(max={max}, min={min}): expected max above min", "max=0 for no upper limit")
        self.divisor, self.remainder, self.unique, self.name = divisor, remainder, unique, name
        self.least = _up(min, divisor, remainder)
        self.most = _down(max, divisor, remainder) if max else 0
        if max and self.most <= self.least:
            kind = f"{divisor} * n + {remainder}" if remainder else f"a multiple of {divisor}"
            subject = f"only {self.least}" if self.most == self.least else "no number"
            message = f"Symbol: {subject} from {min} to {max} is {kind}"
            raise SymbolValueError(message, "a wider range, or a fixed size")

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        return f"Symbol({self.least}..{self.most or ''}, divisor={self.divisor}, remainder={self.remainder}{name})"


def _up(least: int, divisor: int, remainder: int) -> int:
    """The first size of the form, n of 1 or more, that is not below `least`."""
    return max(1, -(-(least - remainder) // divisor)) * divisor + remainder


def _down(most: int, divisor: int, remainder: int) -> int:
    return (most - remainder) // divisor * divisor + remainder
