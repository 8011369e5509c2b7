"""Python text as the formatter would lay it out: statements broken at brackets, comments beside or above."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from autoshard.code_text import WIDTH, docstring_text, printable

_OPEN, _CLOSE = "([{", ")]}"


def statement(text: str, indent: int, comment: str = "") -> list[str]:
    """A statement at `indent` levels, broken where it is too long; the comment stands beside it or, if long, above."""
    margin, comment = " " * 4 * indent, printable(comment)
    if comment and len(margin + text) + len(comment) + 4 <= WIDTH:
        return [f"{margin}{text}  # {comment}"]
    above = [f"{margin}# {line}" for line in textwrap.wrap(comment, WIDTH - len(margin) - 2)]
    return above + [margin + line for line in broken(text, WIDTH - len(margin))]


def broken(text: str, width: int, tail: str = "") -> list[str]:
    """`text` in lines of at most `width`, split at its last bracket pair; `tail` must fit behind the last line."""
    if len(text) + len(tail) <= width:
        return [text]
    start = _last_group(text)
    stop = _matching(text, start)
    if start < 0 or stop < 0 or not text[start + 1 : stop].strip():
        return [text]
    head, inner, closing = text[: start + 1], text[start + 1 : stop], text[stop:]
    parts = split_commas(inner)
    joined = ", ".join(parts)
    if len(joined) + 4 <= width and not (text[start] == "(" and len(parts) == 1 and inner.rstrip().endswith(",")):
        return [head, "    " + joined, closing]
    lines: list[str] = []
    for part in parts:
        pieces = broken(part, width - 4, ",")
        lines += ["    " + piece for piece in pieces[:-1]]
        lines.append(f"    {pieces[-1]},")
    return [head, *lines, closing]


def split_commas(text: str) -> list[str]:
    """Splits at the commas outside brackets and quotes."""
    parts, start = [], 0
    for i, char, depth in _code(text):
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _last_group(text: str) -> int:
    """Position where the last bracket group outside all others opens."""
    opened = [i for i, char, depth in _code(text) if char in _OPEN and depth == 0]
    return next((i for i in reversed(opened) if text[i + 1 : i + 2] not in _CLOSE), -1)


def _matching(text: str, start: int) -> int:
    """Position where the group that opens at `start` closes."""
    level = next((depth for i, _, depth in _code(text) if i == start), 0)
    return next((i for i, char, depth in _code(text) if i > start and char in _CLOSE and depth == level), -1)


def _code(text: str) -> Iterator[tuple[int, str, int]]:
    """(position, character, bracket depth) of what is outside string literals; a bracket has the depth around it."""
    depth, quote, skip = 0, "", False
    for i, char in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth -= char in _CLOSE
            yield i, char, depth
            depth += char in _OPEN


def packed(items: Sequence[str], width: int) -> list[str]:
    """Items with commas, as many on a line as fit."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= width:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")
    return lines


def docstring(text: str, indent: int) -> list[str]:
    """A docstring: one line, or a summary and a body whose lines are given. Backslashes are seen as they are where
    they can be: a command may end its lines with them."""
    margin = " " * 4 * indent
    first, *body = map(docstring_text, text.split("\n"))
    if body and "\\" in text and '""' not in text and all(not line or line.isprintable() for line in text.split("\n")):
        first, *body = text.split("\n")
        return [f'{margin}r"""{first}', *(f"{margin}{line}".rstrip() for line in body), f'{margin}"""']
    if not body:
        return [f'{margin}"""{first}"""']
    return [f'{margin}"""{first}', *(f"{margin}{line}".rstrip() for line in body), f'{margin}"""']
