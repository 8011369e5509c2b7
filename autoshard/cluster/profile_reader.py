"""Reads the tables of a profile. Every accessor checks its key; faults are collected and reported together, with lines.

An accessor that finds a fault notes it and returns a stand-in of the right type, so that reading goes on; the reader
calls `Faults.raise_all` before it uses what it read.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autoshard.errors import InvalidFileError, UsageError

KINDS = ("measured", "datasheet", "derived", "default")
_FIGURE = frozenset({"value", "kind", "source"})
PROFILE_HINT = "compare with one that ships: autoshard profiles cpu-local"
_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\-\"' ]+?)\s*=")


@dataclass
class Faults:
    """Faults of a file, in its order. `place(key)` gives its name and line, e.g. `mine.toml:12`."""

    place: Callable[[str], str]
    entries: list[tuple[str, str]] = field(default_factory=list)

    def note(self, key: str, message: str) -> None:
        if all(key != other for other, _ in self.entries):
            self.entries.append((key, message))

    def raise_all(self) -> None:
        """Raises InvalidFileError with a line for each fault, if there is one."""
        if self.entries:
            places = [(*self.place(key).rpartition(":")[::2], key, message) for key, message in self.entries]
            places.sort(key=lambda place: (place[0], int(place[1])))
            lines = [f"{file}:{line}: {key or 'the file'}: {message}" for file, line, key, message in places]
            more = f"{len(lines)} errors:\n  " if len(lines) > 1 else ""
            raise InvalidFileError(more + "\n  ".join(lines), PROFILE_HINT)


def line_numbers(text: str) -> dict[str, int]:
    """Dotted key -> line (from 1) in TOML of the plain kind that profiles use: one key a line, no multi-line keys."""
    lines: dict[str, int] = {"": 1}
    counts: dict[str, int] = {}
    prefix, depth = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if depth == 0 and (header := _HEADER.match(line)):
            prefix = header[2].replace('"', "").replace("'", "")
            if header[1] == "[[":
                index = counts[prefix] = counts.get(prefix, -1) + 1
                lines.setdefault(prefix, number)
                prefix = f"{prefix}[{index}]"
            lines.setdefault(prefix, number)
        elif depth == 0 and (key := _KEY.match(line)):
            name = key[1].replace('"', "").replace("'", "").replace(" ", "")
            lines.setdefault(f"{prefix}.{name}" if prefix else name, number)
        bare = re.sub(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*', "", line)
        if not _HEADER.match(line):
            depth = max(0, depth + bare.count("[") + bare.count("{") - bare.count("]") - bare.count("}"))
    return lines


def line_of(lines: dict[str, int], key: str) -> int:
    """The line of a key, or of the innermost table around it that has one."""
    while key not in lines:
        key = key.rpartition(".")[0]
    return lines[key]


@dataclass(eq=False)
class Table:
    """One TOML table. `path` is its dotted place in the file."""

    data: dict[str, Any]
    faults: Faults
    path: str = ""
    requested: dict[str, None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def fault(self, key: str, message: str) -> None:
        self.faults.note(self._place(key), message)

    def _place(self, key: str) -> str:
        return ".".join(part for part in (self.path, key) if part)

    def has(self, key: str) -> bool:
        self.requested[key] = None
        return key in self.data

    def _get(self, key: str) -> Any:
        """Value of a key; None where it is missing (a TOML value never is None), which `finish` reports."""
        if not self.has(key):
            self.missing.append(key)
        return self.data.get(key)

    def finish(self) -> None:
        """Notes faults for keys that are missing, and for those that are not read. Called once, after all is read."""
        unknown = [key for key in self.data if key not in self.requested]
        for key in self.missing:
            near = difflib.get_close_matches(key, unknown, n=1)
            if near:
                unknown.remove(near[0])
                self.fault(near[0], f"unknown key {near[0]!r}: did you mean {key!r}?")
            else:
                self.fault(key, "is missing")
        for key in unknown:
            near = difflib.get_close_matches(key, self.requested, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self.requested)}"
            self.fault(key, f"unknown key {key!r}: {hint}")

    def table(self, key: str) -> Table:
        value = self._get(key)
        if value is not None and not isinstance(value, dict):
            self.fault(key, f"expected a table, got {value!r}")
        if isinstance(value, dict):
            return Table(value, self.faults, self._place(key))
        return Table({}, Silent(self.faults.place), self._place(key))

    def tables(self, key: str) -> list[Table]:
        value = self._get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.fault(key, "expected an array of tables")
            return []
        return [Table(item, self.faults, f"{self._place(key)}[{index}]") for index, item in enumerate(value)]

    def expect(self, key: str, wanted: int) -> None:
        value = self._get(key)
        if value is not None and (value != wanted or isinstance(value, bool)):
            self.fault(key, f"expected {wanted}, got {value!r}")

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str:
        value = self._get(key)
        if value is not None and not isinstance(value, str):
            self.fault(key, f"expected text, got {value!r}")
        elif value is not None and choices and value not in choices:
            near = difflib.get_close_matches(value, choices, n=1)
            did = f"; did you mean {near[0]!r}?" if near else ""
            self.fault(key, f"expected {', '.join(choices)}, got {value!r}{did}")
        return value if isinstance(value, str) and (not choices or value in choices) else (choices or ("",))[0]

    def integer(self, key: str) -> int:
        value = self._get(key)
        if value is None:
            return 1
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fault(key, f"expected a positive integer, got {value!r}")
            return 1
        return value

    def value(self, key: str) -> Any:
        """The value of a figure, with its kind and source checked; None where there is none."""
        entry = self._get(key)
        if entry is None:
            return None
        if not isinstance(entry, dict):
            self.fault(key, f"expected {{ value = …, kind = …, source = … }}, got {entry!r}")
            return None
        figure = Table(entry, self.faults, self._place(key))
        figure.text("kind", KINDS)
        figure.text("source")
        value = figure._get("value")
        figure.finish()
        return value

    def figure(self, key: str, parse: Callable[[str], float], zero: bool = False) -> float:
        """A quantity with a unit, above zero (or, with `zero`, at least zero)."""
        value = self.value(key)
        if value is None:
            return 1.0
        if not isinstance(value, str):
            self.fault(key, f"expected a quantity with its unit in quotes, got {value!r}")
            return 1.0
        try:
            parsed = parse(value)
        except UsageError as error:
            self.fault(key, f"{error.message}, such as {error.hint}")
            return 1.0
        if parsed == 0 and not zero:
            self.fault(key, f"expected more than zero, got {value!r}")
        return parsed or (0.0 if zero else 1.0)

    def number(self, key: str) -> float:
        value = self.value(key)
        if value is None:
            return 1.0
        if not isinstance(value, int | float) or isinstance(value, bool) or not (0 <= value < math.inf):
            self.fault(key, f"expected a number, at least 0, got {value!r}")
            return 1.0
        return float(value)

    def fraction(self, key: str) -> float:
        value = self.number(key)
        if not 0 < value <= 1:
            self.fault(key, f"expected a fraction above 0, at most 1, got {value!r}")
            return 1.0
        return value


class Silent(Faults):
    """Faults below a table that is missing: its keys are missing too, which need no message."""


def figures(data: Any, path: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every figure below some TOML data: (dotted key, value, kind, source)."""
    if isinstance(data, dict) and data.keys() >= _FIGURE:
        yield path, str(data["value"]), str(data["kind"]), str(data["source"])
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from figures(value, f"{path}.{key}" if path else key)
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from figures(item, f"{path}[{index}]")
