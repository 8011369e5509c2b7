"""Escapes every name and string of a model before it enters code or pages.

`identifier` makes a Python name, `quoted` and `formatted` string literals, `printable` text of a comment, `prose` and
`code_span` Markdown, `typed` a command of a shell. A model's own names may be any text: keywords, quotes, newlines,
other alphabets.
"""

from __future__ import annotations

import keyword
import re
import shlex
import unicodedata
from collections.abc import Collection, Iterable
from pathlib import Path

_WORD = re.compile(r"""(?:\$'(?:[^'\\]|\\.)*'|'[^']*'|"[^"]*"|[^\s'"])+""")  # of a shell
_MARKS = re.compile(r"([\\`<>\[\]|])")

WIDTH = 120  # of a line of emitted code


def identifier(text: str, reserved: Collection[str] = ()) -> str:
    """`text` as a name: itself where it is one; no keyword, not reserved, and none that a class body would mangle."""
    name = unicodedata.normalize("NFKC", text)
    name = "".join(char if f"_{char}".isidentifier() else "_" for char in name)
    name = unicodedata.normalize("NFKC", name)  # what the parser makes of it
    if not f"_{name}".isidentifier():
        name = re.sub(r"[^A-Za-z0-9_]", "_", name)
    name = re.sub("^__+", "_", name)
    if not name.strip("_"):
        name = "value"
    elif not name.isidentifier():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in reserved else name


def distinct(names: Iterable[str], reserved: Collection[str] = ()) -> dict[str, str]:
    """Each name with an identifier of its own. Those that are identifiers already keep theirs."""
    names = list(dict.fromkeys(names))
    result = {name: name for name in names if identifier(name, reserved) == name}
    for name in names:
        if name not in result:
            result[name] = fresh(identifier(name, reserved), {*result.values(), *reserved})
    return {name: result[name] for name in names}


def fresh(stem: str, taken: Collection[str]) -> str:
    """`stem`, or it with the first number from 2 on that is not taken."""
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}{number}"
    return name


def printable(text: str) -> str:
    """Text on one line: newlines, control and direction marks, and what no file can hold are written as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _escaped(text: str) -> str:
    return printable(text.replace("\\", "\\\\").replace('"', '\\"'))


def quoted(text: str) -> str:
    """A literal in double quotes."""
    return f'"{_escaped(text)}"'


def braced(text: str) -> str:
    """`text` as a part of an f-string in double quotes."""
    return _escaped(text).replace("{", "{{").replace("}", "}}")


def docstring_text(text: str) -> str:
    """One line of a docstring in triple double quotes."""
    return re.sub('"(?="|$)', '\\\\"', printable(text.replace("\\", "\\\\")))


def prose(text: str) -> str:
    """Markdown that shows `text` unchanged."""
    return _MARKS.sub(r"\\\1", printable(text))


def code_span(text: str) -> str:
    """Markdown that shows `text` as code, also in a table."""
    line = printable(text).replace("|", "\\|")
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{line}{space}{fence}"


def typed(*words: str | Path) -> str:
    """A command, or a part of one, as typed in a shell. A path that begins with a dash is no option."""
    return " ".join(map(_word, words))


def typed_lines(command: str, width: int) -> list[str]:
    """A typed command on several lines, which a shell reads as one: broken between its words."""
    lines = [""]
    for word in _WORD.findall(command):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _word(word: str | Path) -> str:
    text = f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
    if text.isprintable():
        return shlex.quote(text)
    plain = (char if char.isprintable() else _bytes_of(char) for char in re.sub(r"(['\\])", r"\\\1", text))
    return f"$'{''.join(plain)}'"  # as bash and zsh read it


def _bytes_of(char: str) -> str:
    """Octal escapes, for any locale of the shell. Three digits each: what follows can't be one of them."""
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))
