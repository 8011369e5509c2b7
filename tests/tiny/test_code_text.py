"""Any text as a name, a literal, a comment, a docstring and Markdown: what Python reads back."""

from __future__ import annotations

import ast
import keyword
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.code_text import braced, code_span, distinct, docstring_text, identifier, printable, prose, quoted
from autoshard.emit.code_lines import docstring, packed, split_commas, statement

ANY = st.text(max_size=12)
NASTY = ("", "_", "__w", "class", "ﬁ", "e\u0301", "0", '"', "\\", "\n", "\ud800", "\u2028", "\x00", "{x}", '"""', "\\'")


@given(ANY)
@example("__init__")
@example("\u0345")
def test_an_identifier_is_what_the_parser_sees(text: str) -> None:
    name = identifier(text, {"taken"})
    assert name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__") and name != "taken"
    assert unicodedata.normalize("NFKC", name) == name == identifier(name, {"taken"})
    assert ast.unparse(ast.parse(f"class A:\n    self.{name} = {name}")) == f"class A:\n    self.{name} = {name}"


def test_good_names_stay_and_others_differ() -> None:
    renamed = distinct(["a b", "a_b", "class", "a-b", "x", "forward", "a_b2"], {"forward"})
    assert {name: renamed[name] for name in ("a_b", "x", "a_b2")} == {"a_b": "a_b", "x": "x", "a_b2": "a_b2"}
    assert len(set(renamed.values())) == 7 and renamed["forward"] == "forward_" and renamed["class"] == "class_"


@pytest.mark.parametrize("text", NASTY)
def test_nasty_texts(text: str) -> None:
    check(text)


@given(ANY)
def test_texts_come_back(text: str) -> None:
    check(text)


def check(text: str) -> None:
    for literal in (quoted(text), f'f"{braced(text)}"'):
        assert "\n" not in literal and literal.isprintable()
        assert eval(literal) == text
    (line,) = statement("x = 1", 1, f"why {text}")[-1:]
    assert ast.unparse(ast.parse(line.strip())) == "x = 1"
    body = ast.parse("\n".join(["class A:", *docstring(f"{docstring_free(text)}\nmore {docstring_free(text)}", 1)]))
    assert len(body.body) == 1 and ast.get_docstring(body.body[0]) is not None  # type: ignore[arg-type]
    assert ast.literal_eval(f'"""{docstring_text(text)}"""') is not None
    assert "\n" not in prose(text) + code_span(text)
    assert "<" not in prose(text).replace("\\<", "") and code_span("a`|`b") == "`` a`\\|`b ``"
    parts = [quoted(text), f"f({quoted(text)}, 2)", "[1, 2]"]
    assert split_commas(", ".join(parts)) == parts
    call = f"call({', '.join([quoted(text)] * 40)})"
    assert ast.unparse(ast.parse("\n".join(statement(call, 0)))) == ast.unparse(ast.parse(call))


def docstring_free(text: str) -> str:
    """What stands in a line of a docstring has no line ends of its own."""
    return printable(text)


def test_packed_items_fit() -> None:
    lines = packed(['"a"', '"bb"', '"c, d"'], 11)
    assert lines == ['"a", "bb",', '"c, d",']
