"""Numbers of a module's code that follow sizes of the inputs, written by what the module reads off its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations_with_replacement

from autoshard.code_text import fresh
from autoshard.graph_capture.dynamic_sizes.polynomials import MOST_DEGREE
from autoshard.ir.dynamic import Polynomial, Powers
from autoshard.ir.program import LocalValue, Program
from autoshard.replay.other_sizes import BATCH, OtherSizes, SizeNumber, followed
from autoshard.rules.resize.captured_length import SEQUENCE

Key = tuple[tuple[Powers, Fraction], ...]  # a polynomial, but for a factor
_PARTS = {SEQUENCE: "length", BATCH: "rows"}  # of a size that the module has in parts or in multiples


@dataclass(frozen=True)
class SizeInput:
    """A dim of an input that follows sizes as `polynomial` says: `length` on each device as planned."""

    value: str
    dim: int
    length: int
    polynomial: Polynomial
    whole: Polynomial  # of all devices


@dataclass
class SizeTexts:
    """Texts of sizes. `inputs`: key of what follows the sizes alike -> input that tells it; `used`: those requested."""

    inputs: dict[Key, SizeInput]
    names: dict[Key, str]
    used: set[Key] = field(default_factory=set)

    def text(self, number: SizeNumber) -> str:
        """Expression that is exact at every size at which it is whole; the number itself if no input tells."""
        text = self._by_each(number.polynomial) or self._by_product(number.polynomial)
        return str(int(number)) if text is None else text

    def _by_each(self, wanted: Polynomial) -> str | None:
        """Expression in one dim for each size that counts."""
        count = len(next(iter(wanted)))
        needed = [n for n in range(count) if any(powers[n] for powers in wanted)]
        keys = {n: _key({_unit(n, count): Fraction(1)}) for n in needed}
        if not needed or any(key not in self.inputs for key in keys.values()):
            return None
        shares = {n: self.inputs[key].polynomial[_unit(n, count)] for n, key in keys.items()}
        local = {
            powers: coeff / math.prod((shares[n] ** powers[n] for n in needed), start=Fraction(1))
            for powers, coeff in wanted.items()
        }
        text = sum_text(local, {n: self.names[key] for n, key in keys.items()})
        self.used.update(keys.values() if text is not None else ())
        return text

    def _by_product(self, wanted: Polynomial) -> str | None:
        """Expression in dims of several sizes: the tokens of all samples, the patches of an image; plus a number."""
        count = len(next(iter(wanted)))
        constant = wanted.get((0,) * count, Fraction(0))
        for offset in dict.fromkeys((Fraction(0), constant)):
            left = {powers: coeff for powers, coeff in wanted.items() if not offset or any(powers)}
            for keys in _groups(list(self.inputs)):
                product = _product([self.inputs[key].polynomial for key in keys])
                ratio = _ratio(left, product)
                if ratio is not None and offset.denominator == 1:
                    self.used.update(keys)
                    text = _product_text(ratio, [self.names[key] for key in keys])
                    return f"{text} {'+' if offset > 0 else '-'} {abs(int(offset))}" if offset else text
        return None


def size_texts(program: Program, others: OtherSizes, inputs: Iterable[str]) -> SizeTexts:
    """Texts for a module with these inputs: of dims that follow the sizes alike, the shortest stands for all."""
    size_inputs: dict[Key, SizeInput] = {}
    for name in inputs if others else ():
        value = program.value(name)
        local, whole = followed_shape(value, program, others), _followed_whole(value, program, others)
        for dim, size in enumerate(local):
            every = whole[dim]
            if not isinstance(size, SizeNumber) or not isinstance(every, SizeNumber):
                continue
            key = _key(size.polynomial)
            if key not in size_inputs or int(size) < size_inputs[key].length:
                size_inputs[key] = SizeInput(name, dim, int(size), size.polynomial, every.polynomial)
    return SizeTexts(size_inputs, _names(size_inputs, program, others))


def followed_shape(value: LocalValue, program: Program, others: OtherSizes) -> tuple[object, ...]:
    """Local shape, with a `SizeNumber` for each dim that follows sizes."""
    values = [value.local_shape, *(variant.value(value.name).local_shape for variant in others.programs)]
    shape = followed(values, program.mesh, others)
    return shape if isinstance(shape, tuple) else ()


def _followed_whole(value: LocalValue, program: Program, others: OtherSizes) -> tuple[object, ...]:
    values = [value.shape, *(variant.value(value.name).shape for variant in others.programs)]
    shape = followed(values, program.mesh, others)
    return shape if isinstance(shape, tuple) else ()


def _key(polynomial: Polynomial) -> Key:
    """Key that is equal for multiples of each other."""
    lead = max(polynomial)
    return tuple(sorted((powers, coeff / polynomial[lead]) for powers, coeff in polynomial.items()))


def _unit(n: int, count: int) -> Powers:
    return tuple(int(i == n) for i in range(count))


def _groups(keys: Sequence[Key]) -> Iterator[tuple[Key, ...]]:
    """Groups of keys: one dim, then products of a few."""
    for count in range(1, MOST_DEGREE + 1):
        yield from combinations_with_replacement(keys, count)


def _product(factors: Sequence[Polynomial]) -> dict[Powers, Fraction]:
    product = dict(factors[0])
    for factor in factors[1:]:
        terms = [(a, x, b, y) for a, x in product.items() for b, y in factor.items()]
        product = {}
        for a, x, b, y in terms:
            powers = tuple(p + q for p, q in zip(a, b, strict=True))
            product[powers] = product.get(powers, Fraction(0)) + x * y
    return product


def _ratio(wanted: Polynomial, product: Polynomial) -> Fraction | None:
    """Factor by which `product` is `wanted`."""
    if wanted.keys() != product.keys():
        return None
    ratios = {wanted[powers] / product[powers] for powers in product}
    return ratios.pop() if len(ratios) == 1 else None


def _names(size_inputs: Mapping[Key, SizeInput], program: Program, others: OtherSizes) -> dict[Key, str]:
    """Names of the size inputs: an input of the model keeps its own, and no two are alike."""
    names: dict[Key, str] = {}
    for key, size in size_inputs.items():
        name = _name(size, others.names)
        taken = {*program.inputs, *names.values()}
        names[key] = fresh(f"{name}_size" if name in program.inputs else name, taken)
    return names


def _name(size: SizeInput, names: Sequence[str]) -> str:
    sizes = [name for n, name in enumerate(names) if any(powers[n] for powers in size.polynomial)]
    if len(sizes) > 1:
        return "tokens" if BATCH in sizes and len(size.polynomial) == 1 else "length"
    exact = len(size.whole) == 1 and {*size.whole.values()} == {1} and sum(next(iter(size.whole))) == 1
    return sizes[0] if exact else _PARTS.get(sizes[0], f"{sizes[0]}_part")


# --- text -----------------------------------------------------------------------------------------------------------


def sum_text(local: Polynomial, names: Mapping[int, str]) -> str | None:
    """Sum of terms in these names, common factors before a bracket; None if a term is no whole number."""
    if len(local) == 1:
        ((powers, coeff),) = local.items()
        return _product_text(coeff, _factors(powers, names))
    common = tuple(map(min, zip(*local, strict=True)))
    inner = {tuple(p - c for p, c in zip(powers, common, strict=True)): coeff for powers, coeff in local.items()}
    varying = [coeff for powers, coeff in inner.items() if any(powers)]
    if any(coeff.denominator != 1 for coeff in inner.values()) and (len(varying) > 1 or any(common)):
        return None
    if any(coeff.denominator != 1 for powers, coeff in inner.items() if not any(powers)):
        return None
    ordered = sorted(inner.items(), key=lambda item: (-sum(item[0]), item[0][::-1]))
    text = ""
    for powers, coeff in ordered:
        factors = _factors(powers, names)
        term = (
            _product_text(abs(coeff) if text else coeff, factors)
            if factors
            else str(abs(int(coeff)) if text else int(coeff))
        )
        text += f" {'+' if coeff > 0 else '-'} {term}" if text else term
    return " * ".join([*_factors(common, names), f"({text})"]) if any(common) else text


def _factors(powers: Powers, names: Mapping[int, str]) -> list[str]:
    return [names[n] for n, power in enumerate(powers) for _ in range(power)]


def _product_text(ratio: Fraction, names: Sequence[str]) -> str:
    text = " * ".join(names)
    if ratio.numerator != 1:
        text = f"-{text}" if ratio.numerator == -1 else f"{ratio.numerator} * {text}"
    return text if ratio.denominator == 1 else f"{text} // {ratio.denominator}"
