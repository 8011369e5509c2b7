"""Names and strings of a model, as they enter code and pages: nothing of a model is printed but through one of these.

`identifier` makes a Python name, `quoted` and `formatted` string literals, `printable` text of a comment, `prose` and
`code_span` Markdown. A model's own names may be any text: keywords, quotes, newlines, other alphabets.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Collection, Iterable

_MARKS = re.compile(r"([\\`<>\[\]|])")


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
    """One line: newlines, control and direction marks, and what no file can hold are written as escapes."""
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
    """Markdown that shows `text` as it is."""
    return _MARKS.sub(r"\\\1", printable(text))


def code_span(text: str) -> str:
    """Markdown that shows `text` as code, also in a table."""
    line = printable(text).replace("|", "\\|")
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{line}{space}{fence}"
