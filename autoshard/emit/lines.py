"""Python text as the formatter would lay it out: statements broken at brackets, comments beside or above."""

from __future__ import annotations

import textwrap

WIDTH = 120
_OPEN, _CLOSE = "([{", ")]}"


def statement(text: str, indent: int, comment: str = "") -> list[str]:
    """A statement at `indent` levels, broken where it is too long; the comment stands beside it or, if long, above."""
    margin = " " * 4 * indent
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
    head, inner, rest = text[: start + 1], text[start + 1 : stop], text[stop:]
    parts = split_commas(inner)
    joined = ", ".join(parts)
    if len(joined) + 4 <= width and not (text[start] == "(" and len(parts) == 1 and inner.rstrip().endswith(",")):
        return [head, "    " + joined, rest]
    lines: list[str] = []
    for part in parts:
        pieces = broken(part, width - 4, ",")
        lines += ["    " + piece for piece in pieces[:-1]]
        lines.append(f"    {pieces[-1]},")
    return [head, *lines, rest]


def split_commas(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, start, quote = [], 0, 0, ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _last_group(text: str) -> int:
    """Where the last bracket group outside all others opens."""
    depth, found, quote = 0, -1, ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _OPEN:
            found = i if depth == 0 and text[i + 1 : i + 2] not in _CLOSE else found
            depth += 1
        elif char in _CLOSE:
            depth -= 1
    return found


def _matching(text: str, start: int) -> int:
    depth, quote = 0, ""
    for i in range(max(start, 0), len(text)):
        char = text[i]
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
            if depth == 0:
                return i
    return -1


def docstring(text: str, indent: int) -> list[str]:
    """A docstring: one line, or a summary and a body whose lines are given."""
    margin = " " * 4 * indent
    first, *rest = text.splitlines()
    if not rest:
        return [f'{margin}"""{first}"""']
    return [f'{margin}"""{first}', *(f"{margin}{line}".rstrip() for line in rest), f'{margin}"""']


def quoted(text: str) -> str:
    return f'"{text}"'
