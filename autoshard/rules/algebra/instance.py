"""A rule bound to the real shapes of one operator: `...` and `d*` expanded, every factor with its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from autoshard.rules.algebra.notation import ELLIPSIS, Dim, Rule, RuleError, Term

_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TensorFacts:
    """Facts about one tensor that a rule needs."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def floating(self) -> bool:
        return self.dtype in _FLOATS


@dataclass(frozen=True)
class Instance:
    """`rule` has one plain name or product per dim; dims of size 1 carry no factor. `sizes` is (factor, size) pairs.

    `lengths` holds those of the dims of each resized factor, whose size is the shortest.
    `known` is False for an operator without a rule: all its dims are literal, so every axis repeats it.
    """

    rule: Rule
    operands: tuple[TensorFacts | None, ...]
    results: tuple[TensorFacts, ...]
    sizes: tuple[tuple[str, int], ...]
    known: bool = True
    lengths: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        return str(self.rule)

    @cached_property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    @cached_property
    def assignable(self) -> tuple[str, ...]:
        """Factors that an axis may be on, in order of appearance."""
        return tuple(factor for factor in self.rule.factors if factor not in self.rule.whole)

    @property
    def differentiable(self) -> bool:
        """True if a gradient flows: a result and an operand need one."""
        needed = any(facts is not None and facts.requires_grad for facts in self.operands)
        return needed and any(facts.requires_grad for facts in self.results)


def bind(
    rule: Rule, operands: Sequence[TensorFacts | None], results: Sequence[TensorFacts], star: int | None = None
) -> Instance:
    """Binds a rule to shapes. `star`: number of dims that `d*` stands for, if no operand tells.

    Raises RuleError where the rule does not fit the shapes.
    """
    missing = len(rule.operands) - len(operands)
    terms = [*rule.operands[: len(operands)]]
    if (
        len(results) != len(rule.results)
        or missing < 0
        or any(t and not t.optional for t in rule.operands[len(operands) :])
    ):
        raise RuleError(f"rule {rule}: it does not have {len(operands)} operands and {len(results)} results")
    for position, facts in enumerate(operands):
        term = terms[position]
        if facts is None and term is not None and not term.optional:
            raise RuleError(f"rule {rule}: operand {position} is absent but not optional")
        terms[position] = term if facts is not None else None
    pairs = [
        (t, f) for t, f in [*zip(terms, operands, strict=True), *zip(rule.results, results, strict=True)] if t and f
    ]
    shapes = [(term, facts.shape) for term, facts in pairs]
    ranks = _multiple_ranks(rule, shapes, star)
    expanded = [_expand(rule, term, shape, ranks) for term, shape in shapes]
    lengths = _lengths(rule, expanded, [shape for _, shape in shapes])
    sizes = _sizes(rule, expanded, [shape for _, shape in shapes], {f: min(values) for f, values in lengths.items()})
    bound = _finish(rule, terms, expanded, sizes, ranks, operands, results)
    for term in (*bound.rule.operands, *bound.rule.results):
        if term and any(len(dim.parts) > 1 and _size(dim, sizes) == 0 for dim in term.dims):
            raise RuleError(f"rule {rule}: a product of size 0 can't be cut in blocks")
    return replace(bound, lengths=tuple(sorted(lengths.items())))


def unbound(operands: Sequence[TensorFacts | None], results: Sequence[TensorFacts], known: bool) -> Instance:
    """Instance of an operator that can only be repeated: every dim is a literal size."""
    terms = tuple(None if facts is None else _literal(facts) for facts in operands)
    return Instance(Rule(terms, tuple(map(_literal, results))), tuple(operands), tuple(results), (), known)


def _literal(facts: TensorFacts) -> Term:
    return Term(tuple(Dim((size,)) for size in facts.shape))


def _multiple_ranks(rule: Rule, shapes: Sequence[tuple[Term, tuple[int, ...]]], star: int | None) -> dict[str, int]:
    """Number of dims that each `d*`, and at most `...`, stands for."""
    ranks: dict[str, int] = {}
    for term, shape in shapes:
        stars = [dim.factors[0] for dim in term.dims if dim.star]
        if len(stars) == 1 and ELLIPSIS not in term.factors:
            ranks.setdefault(stars[0], len(shape) - len(term.dims) + 1)
    for term, _ in shapes:
        for dim in term.dims:
            if dim.star and dim.factors[0] not in ranks:
                ranks[dim.factors[0]] = 1 if star is None else star
    for term, shape in shapes:
        if ELLIPSIS in term.factors:
            others = sum(ranks[dim.factors[0]] if dim.star else 1 for dim in term.dims) - 1
            if len(shape) < others:
                raise RuleError(f"rule {rule}: {term} does not fit the shape {shape}")
            ranks[ELLIPSIS] = max(ranks.get(ELLIPSIS, 0), len(shape) - others)
    return ranks


def expanded_names(name: str, ranks: dict[str, int]) -> tuple[str, ...]:
    """Names of the expanded factor: `...` -> i0 i1 i2, `d*` -> d (or d0 d1), a plain factor -> itself."""
    if name == ELLIPSIS:
        return tuple(f"i{index}" for index in range(ranks.get(ELLIPSIS, 0)))
    count = ranks.get(name, 1)
    return (name,) if count == 1 else tuple(f"{name}{index}" for index in range(count))


def _expand(rule: Rule, term: Term, shape: tuple[int, ...], ranks: dict[str, int]) -> list[Dim]:
    """Dims with `...` and `d*` expanded; a broadcasting dim of size 1 is the literal 1."""
    fixed = sum(ranks[dim.factors[0]] if dim.star else 1 for dim in term.dims if ELLIPSIS not in dim.parts)
    free_rank = len(shape) - fixed
    dims: list[Dim] = []
    for dim in term.dims:
        if dim.parts == (ELLIPSIS,):
            names = expanded_names(ELLIPSIS, ranks)[ranks[ELLIPSIS] - free_rank :]
            dims += [Dim((1 if shape[len(dims) + index] == 1 else name,)) for index, name in enumerate(names)]
        elif dim.star:
            dims += [Dim((name,)) for name in expanded_names(dim.factors[0], ranks)]
        else:
            dims.append(dim)
    if len(dims) != len(shape):
        raise RuleError(f"rule {rule}: {term} does not fit the shape {shape}")
    return dims


def _lengths(rule: Rule, terms: list[list[Dim]], shapes: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The different lengths of the dims of each resized factor, ascending."""
    lengths: dict[str, set[int]] = {}
    for dims, shape in zip(terms, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if dim.factors and dim.factors[0] in rule.resized:
                lengths.setdefault(dim.factors[0], set()).add(size)
    return {factor: tuple(sorted(values)) for factor, values in lengths.items()}


def _sizes(
    rule: Rule, terms: list[list[Dim]], shapes: list[tuple[int, ...]], resized: dict[str, int]
) -> dict[str, int]:
    """The size of every factor, from the dims in which all others are known, until nothing changes."""
    todo = [
        (dim, size)
        for dims, shape in zip(terms, shapes, strict=True)
        for dim, size in zip(dims, shape, strict=True)
        if not dim.factors or dim.factors[0] not in resized
    ]
    sizes = dict(resized)
    while todo:
        pending = []
        for dim, size in todo:
            unknown = [part for part in dim.parts if isinstance(part, str) and part not in sizes]
            known = prod(part if isinstance(part, int) else sizes.get(part, 1) for part in dim.parts)
            if len(unknown) > 1:
                pending.append((dim, size))
            elif len(unknown) == 1 and known and size % known == 0:
                sizes[unknown[0]] = size // known
            elif unknown or known != size:
                raise RuleError(f"rule {rule}: dim {dim} of size {size} disagrees with {sizes}")
        if len(pending) == len(todo):
            raise RuleError(f"rule {rule}: the sizes of {', '.join(str(dim) for dim, _ in pending)} are not determined")
        todo = pending
    return sizes


def _finish(
    rule: Rule,
    terms: list[Term | None],
    expanded: list[list[Dim]],
    sizes: dict[str, int],
    ranks: dict[str, int],
    operands: Sequence[TensorFacts | None],
    results: Sequence[TensorFacts],
) -> Instance:
    dims = iter(expanded)
    plain = [
        None if t is None else replace(t, dims=tuple(_without_ones(d, sizes) for d in next(dims)), optional=False)
        for t in terms
    ]
    out = tuple(replace(t, dims=tuple(_without_ones(d, sizes) for d in next(dims))) for t in rule.results)

    def names(listed: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n for name in listed for n in expanded_names(name, ranks) if sizes.get(n, 1) != 1)

    diagonal = _repeated_factors([term for term in (*plain, *out) if term])
    whole = tuple(dict.fromkeys(names(rule.whole) + diagonal))
    linear = tuple(
        group for group in rule.linear if all(position < len(plain) and plain[position] for position in group)
    )
    bound = replace(
        rule,
        operands=tuple(plain),
        results=out,
        sum=names(rule.sum),
        whole=whole,
        joined=names(rule.joined),
        empty=names(rule.empty),
        plain=names(rule.plain),
        resized=names(rule.resized),
        linear=linear,
        variant_factors=names(rule.variant_factors),
        variant="" if rule.variant_factors and not names(rule.variant_factors) else rule.variant,
    )
    return Instance(bound, tuple(operands), tuple(results), tuple((f, sizes[f]) for f in bound.factors))


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    return prod(part if isinstance(part, int) else sizes[part] for part in dim.parts)


def _without_ones(dim: Dim, sizes: dict[str, int]) -> Dim:
    parts = tuple(part for part in dim.parts if (part if isinstance(part, int) else sizes[part]) != 1)
    return Dim(parts or (1,))


def _repeated_factors(terms: list[Term]) -> tuple[str, ...]:
    """Factors that one term holds twice (a diagonal): a shard of them is no shard of the tensor."""
    return tuple(
        factor for term in terms for factor in term.factors if sum(dim.factors.count(factor) for dim in term.dims) > 1
    )
