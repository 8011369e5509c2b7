"""The notation: rules print as themselves and parse back, and what is wrong with one is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.rules import OPERATORS, Choice, Dim, Rule, RuleError, TensorFacts, Term, bind

NAMES = st.sampled_from(["m", "n", "h", "d", "vocabulary", "i0", "x_1"])
DIMS = st.one_of(
    st.builds(lambda name: Dim((name,)), NAMES),
    st.builds(lambda size: Dim((size,)), st.integers(1, 99)),
    st.builds(lambda name: Dim((f"{name}*",)), st.sampled_from(["k", "l"])),
    st.just(Dim(("...",))),
    st.builds(lambda parts: Dim(tuple(parts)), st.lists(st.one_of(NAMES, st.integers(2, 9)), min_size=2, max_size=3)),
)
TERMS = st.builds(
    lambda dims, added, optional: Term(tuple(dims), added, optional),
    st.lists(DIMS, max_size=4),
    st.booleans(),
    st.booleans(),
)
PLAIN = st.builds(lambda dims: Term(tuple(dims)), st.lists(DIMS, max_size=4))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Rules that are right: what some result lacks is listed."""
    operands = tuple(draw(st.lists(st.one_of(TERMS, st.none()), max_size=3)))
    results = tuple(draw(st.lists(PLAIN, min_size=1, max_size=2)))
    bare = Rule(operands, results)
    lists: dict[str, list[str]] = {"sum": [], "whole": [], "joined": [], "empty": [], "plain": []}
    for factor in bare.factors:
        if any(factor not in term.factors for term in results):
            lists[draw(st.sampled_from(["sum", "whole", "joined"]))].append(factor)
        if draw(st.booleans()):
            lists[draw(st.sampled_from(["empty", "plain"]))].append(factor)
    groups = st.lists(st.integers(0, max(len(operands) - 1, 0)), min_size=1, max_size=2, unique=True)
    linear = tuple(tuple(group) for group in draw(st.lists(groups, max_size=2))) if operands else ()
    variant = draw(st.sampled_from(["", "parallel_thing"]))
    listed = {name: tuple(factors) for name, factors in lists.items()}
    return Rule(
        operands, results, **listed, linear=linear, variant=variant, variant_factors=bare.factors[:1] if variant else ()
    )


@given(rules())
def test_a_rule_prints_as_itself_and_parses_back(rule: Rule) -> None:
    assert Rule.parse(str(rule)) == rule


@pytest.mark.parametrize("option", ["s+t ring", "ring s+t f, gather s+t g", "ring s+t f, heads g*r h"])
def test_choices_of_several_factors_print_as_themselves(option: str) -> None:
    text = f"(g r) s, g t -> (g r) s | whole: t | together: {option}"
    assert str(Rule.parse(text)) == text


@pytest.mark.parametrize("option", ["s+t", "s ring", "s+x f", "s s+t f", "a s+t f g"])
def test_a_wrong_choice_of_several_factors_is_named(option: str) -> None:
    with pytest.raises(RuleError, match="together: "):
        Rule.parse(f"s, t -> s | whole: t | together: {option}")


@pytest.mark.parametrize("target", sorted(target for target, known in OPERATORS.items() if isinstance(known.rule, str)))
def test_the_table_is_written_as_it_prints(target: str) -> None:
    text = OPERATORS[target].rule
    assert isinstance(text, str)
    assert str(Rule.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m, n m", "no `->`"),
        ("m, n m -> n", "factor m is missing from a result: list it as sum:, whole: or joined:"),
        ("m -> m | sum: k", "sum: k is no factor"),
        ("m -> m | linear: 1", "there is no operand 1"),
        ("m -> m | linear: x", "expected operand numbers"),
        ("m -> m | sums: m", "bad option 'sums: m'"),
        ("m, -> m", "write `()` for a scalar"),
        ("(m n -> m n", "unbalanced"),
        ("(...) -> ...", "inside a product"),
        ("m! -> m", "unexpected '!'"),
    ],
)
def test_a_bad_rule_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        Rule.parse(text)
    assert message in str(error.value)
    assert text in str(error.value)


def facts(*shape: int) -> TensorFacts:
    return TensorFacts(shape, "float32", True)


@pytest.mark.parametrize(
    ("text", "operands", "results", "bound"),
    [
        ("... m, n m, +n? -> ... n | sum: m", [facts(2, 3, 4), facts(5, 4), facts(5)], [facts(2, 3, 5)],
         "i0 i1 m, n m, +n -> i0 i1 n | sum: m"),
        ("... m, n m, +n? -> ... n | sum: m", [facts(4), facts(5, 4), None], [facts(5)], "m, n m, - -> n | sum: m"),
        ("..., ... -> ...", [facts(2, 1, 4), facts(3, 1)], [facts(2, 3, 4)], "i0 1 i2, i1 1 -> i0 i1 i2"),
        ("... d*, d*? -> ... d* | whole: d", [facts(2, 3, 4), facts(3, 4)], [facts(2, 3, 4)],
         "i0 d0 d1, d0 d1 -> i0 d0 d1 | whole: d0 d1"),
        ("b (n d) -> b n d", [facts(1, 6)], [facts(1, 3, 2)], "1 (n d) -> 1 n d"),
        ("b (3 h) -> b h, b h, b h", [facts(2, 12)], [facts(2, 4)] * 3, "b (3 h) -> b h, b h, b h"),
        ("a a -> a", [facts(3, 3)], [facts(3)], "a a -> a | whole: a"),
    ],
)  # fmt: skip
def test_binding(text: str, operands: list[TensorFacts | None], results: list[TensorFacts], bound: str) -> None:
    assert str(bind(Rule.parse(text), operands, results)) == bound


@pytest.mark.parametrize(
    ("text", "operands", "results"),
    [
        ("a b -> a b", [facts(3)], [facts(3)]),
        ("a b -> a b", [facts(3, 4)], [facts(3, 5)]),
        ("(2 a) -> a", [facts(5)], [facts(2)]),
        ("a, a -> a", [facts(5)], [facts(5)]),
        ("a, a -> a", [facts(5), None], [facts(5)]),
        ("(a b) -> (a b)", [facts(6)], [facts(6)]),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error(
    text: str, operands: list[TensorFacts | None], results: list[TensorFacts]
) -> None:
    with pytest.raises(RuleError):
        bind(Rule.parse(text), operands, results)


@pytest.mark.parametrize("text", ["n", "n/3", "n*64", "n/3*64", "=", "+", "~0", "~0.1"])
def test_choices_print_and_parse(text: str) -> None:
    assert str(Choice.parse(text)) == text
