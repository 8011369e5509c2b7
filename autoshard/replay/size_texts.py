"""Numbers of a module's code that follow the batch or the sequence, written by what the module reads off its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from autoshard.code_text import fresh
from autoshard.ir.program import LocalValue, Program
from autoshard.replay.other_sizes import OtherSizes, SizeNumber, followed

BATCH, SEQUENCE, BOTH = "batch", "sequence", "both"


@dataclass(frozen=True)
class SizeInput:
    """A dim of an input that follows a size: `length` on each device, `whole` on all, as planned."""

    value: str
    dim: int
    length: int
    whole: int


@dataclass
class SizeTexts:
    """`found`: which size -> the input that tells it; `used`: those that were asked for."""

    found: dict[str, SizeInput]
    names: dict[str, str]
    used: set[str] = field(default_factory=set)

    def text(self, number: SizeNumber) -> str:
        """An expression that is exact at every size at which it is whole; the number itself where no input tells."""
        made = self._by_each(number) or self._by_both(number)
        return str(int(number)) if made is None else made

    def _by_each(self, number: SizeNumber) -> str | None:
        """By the batch and the length, each where it counts."""
        kinds = [kind for kind, wanted in ((BATCH, number.batch), (SEQUENCE, number.slope != 0)) if wanted]
        if any(kind not in self.found for kind in kinds):
            return None
        lengths = [self.found[kind].length for kind in kinds]
        if number.slope == 0 or number.rest == 0:
            self.used.update(kinds)
            ratio = Fraction(number)
            for length in lengths:
                ratio /= length
            return _product(ratio, [self.names[kind] for kind in kinds])
        samples = lengths[0] if number.batch else 1
        sequence = self.found[SEQUENCE]
        times, rest = number.slope / samples * sequence.whole / sequence.length, number.rest / samples
        if times.denominator != 1 or rest.denominator != 1:
            return None
        self.used.update(kinds)
        sign = "+" if rest > 0 else "-"
        text = f"{_product(times, [self.names[SEQUENCE]])} {sign} {abs(int(rest))}"
        return f"{self.names[BATCH]} * ({text})" if number.batch else text

    def _by_both(self, number: SizeNumber) -> str | None:
        """By a dim that holds the tokens of all samples."""
        if BOTH not in self.found or not number.batch or number.slope == 0 or number.rest != 0:
            return None
        self.used.add(BOTH)
        return _product(Fraction(number, self.found[BOTH].length), [self.names[BOTH]])


def size_texts(program: Program, others: OtherSizes, inputs: Iterable[str], samples: int) -> SizeTexts:
    """Of a module with these inputs: of each size the shortest dim that follows it. `samples`: the planned batch."""
    found: dict[str, SizeInput] = {}
    for name in inputs if others else ():
        value = program.value(name)
        sizes = followed_shape(value, program, others)
        for dim, size in enumerate(sizes if isinstance(sizes, tuple) else ()):
            kind = _kind(size) if isinstance(size, SizeNumber) else ""
            if kind and (kind not in found or int(size) < found[kind].length):
                found[kind] = SizeInput(name, dim, int(size), value.shape[dim])
    return SizeTexts(found, _names(found, program, others, samples))


def followed_shape(value: LocalValue, program: Program, others: OtherSizes) -> object:
    """The local shape, with what follows a size."""
    batch, sequence = others.batch, others.sequence
    at_batch = batch.value(value.name).local_shape if batch else value.local_shape
    at_length = sequence.value(value.name).local_shape if sequence else value.local_shape
    return followed(value.local_shape, at_batch, at_length, program.mesh, others)


def _kind(size: SizeNumber) -> str:
    if size.slope == 0:
        return BATCH
    return "" if size.rest else BOTH if size.batch else SEQUENCE


def _names(found: dict[str, SizeInput], program: Program, others: OtherSizes, samples: int) -> dict[str, str]:
    """An input of the model keeps its own name."""
    names: dict[str, str] = {}
    planned = {BATCH: samples, SEQUENCE: others.length}
    for kind, size in found.items():
        name = kind if size.whole == planned.get(kind) else {SEQUENCE: "length", BATCH: "rows", BOTH: "tokens"}[kind]
        names[kind] = fresh(f"{name}_size", program.inputs) if name in program.inputs else name
    return names


def _product(ratio: Fraction, names: list[str]) -> str:
    text = " * ".join(names)
    if ratio.numerator != 1:
        text = f"-{text}" if ratio.numerator == -1 else f"{ratio.numerator} * {text}"
    return text if ratio.denominator == 1 else f"{text} // {ratio.denominator}"
