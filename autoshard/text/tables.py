"""Text tables, as wide as the reader's terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP = "  "
WIDTH = 80  # where there is no terminal to ask: a file, a pipe
LEAST = 8  # columns that a cell keeps


def terminal_width() -> int:
    """Columns of the terminal that stdout is; 80 if stdout is a file or a pipe."""
    return tty_width() or WIDTH


def tty_width() -> int | None:
    """Columns of the terminal that stdout is; None if stdout is a file or a pipe, where long lines may stay whole."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return max(40, shutil.get_terminal_size((WIDTH, 24)).columns) if is_terminal else None


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Left-aligned columns, two spaces apart; the last column is not padded, nor is a row of a lone first cell.

    If the table is wider than `width`, cells of its widest columns are broken into lines; None: no limit.
    """
    tabular = [row for row in rows if any(row[1:])]
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*tabular, strict=True)]
    if width is not None:
        widths = _narrowed(widths, width - len(GAP) * (len(widths) - 1))
    lines: list[str] = []
    for row in rows:
        if not any(row[1:]):
            lines += [row[0]] if width is None else wrapped(row[0], width)
            continue
        cells = [[cell] if width is None else wrapped(cell, room) for cell, room in zip(row, widths, strict=True)]
        for index in range(max(map(len, cells))):
            parts = [cell[index] if index < len(cell) else "" for cell in cells]
            padded = [part.ljust(room) for part, room in zip(parts[:-1], widths, strict=False)]
            lines.append(GAP.join([*padded, parts[-1]]).rstrip())
    return lines


def _narrowed(widths: list[int], room: int) -> list[int]:
    """Column widths that fit in `room`: the widest columns are reduced first, down to equal widths."""
    result = list(widths)
    while sum(result) > room and max(result, default=0) > LEAST:
        result[result.index(max(result))] -= 1
    return result


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` letters; continued lines are indented like the first one, and a long name is broken
    after a dot or underscore."""
    indent = text[: len(text) - len(text.lstrip())]
    room = max(width - len(indent), LEAST)
    text = indent + " ".join(word if len(word) <= room else _parted(word, room) for word in text.lstrip().split(" "))
    return textwrap.wrap(text, max(width, len(indent) + LEAST), subsequent_indent=indent, break_on_hyphens=False) or [
        ""
    ]


def _parted(word: str, room: int) -> str:
    """The word broken into pieces, each as long as there is room."""
    pieces = [""]
    for part in re.split(r"(?<=[_.])", word):
        if len(pieces[-1]) + len(part) <= room or not pieces[-1]:
            pieces[-1] += part
        else:
            pieces.append(part)
    return " ".join(pieces)
