"""Reads the tables of a profile: each accessor checks its key and raises InvalidFileError that names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autoshard.errors import InvalidFileError, UsageError

KINDS = ("measured", "datasheet", "derived", "default")


@dataclass(frozen=True, eq=False)
class Table:
    """One TOML table. `path` is its dotted place in the file `where`."""

    data: dict[str, Any]
    where: str
    path: str = ""

    def error(self, key: str, message: str) -> InvalidFileError:
        return InvalidFileError(f"{self.where}: {self._place(key) or 'the file'}: {message}")

    def _place(self, key: str) -> str:
        return ".".join(part for part in (self.path, key) if part)

    def _get(self, key: str) -> Any:
        if key not in self.data:
            raise self.error(key, "is missing")
        return self.data[key]

    def table(self, key: str) -> Table:
        value = self._get(key)
        if not isinstance(value, dict):
            raise self.error(key, f"expected a table, got {value!r}")
        return Table(value, self.where, self._place(key))

    def tables(self, key: str) -> list[Table]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(key, "expected an array of tables")
        return [Table(item, self.where, f"{self._place(key)}[{index}]") for index, item in enumerate(value)]

    def expect(self, key: str, wanted: int) -> None:
        if self._get(key) != wanted:
            raise self.error(key, f"expected {wanted}, got {self.data[key]!r}")

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self.error(key, f"expected text, got {value!r}")
        return value

    def integer(self, key: str) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"expected a positive integer, got {value!r}")
        return value

    def _value(self, key: str) -> Any:
        """The value of a figure, with its kind and source checked."""
        figure = self.table(key)
        if figure.text("kind") not in KINDS:
            raise figure.error("kind", f"expected {', '.join(KINDS)}, got {figure.data['kind']!r}")
        figure.text("source")
        return figure._get("value")

    def figure(self, key: str, parse: Callable[[str], float], zero: bool = False) -> float:
        """A quantity with a unit, above zero (or, with `zero`, at least zero)."""
        value = self._value(key)
        if not isinstance(value, str):
            raise self.error(key, f"expected a quantity with its unit in quotes, got {value!r}")
        try:
            parsed = parse(value)
        except UsageError as error:
            raise InvalidFileError(f"{self.where}: {self._place(key)}: {error.message}", error.hint) from error
        if parsed == 0 and not zero:
            raise self.error(key, f"expected more than zero, got {value!r}")
        return parsed

    def number(self, key: str) -> float:
        value = self._value(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not (0 <= value < math.inf):
            raise self.error(key, f"expected a number, at least 0, got {value!r}")
        return float(value)

    def fraction(self, key: str) -> float:
        value = self.number(key)
        if not 0 < value <= 1:
            raise self.error(key, f"expected a fraction above 0, at most 1, got {value!r}")
        return value

    def figures(self) -> Iterator[tuple[str, str, str, str]]:
        """Every figure below this table: (dotted key, value, kind, source)."""
        if {"value", "kind", "source"} <= self.data.keys():
            yield self.path, str(self.data["value"]), str(self.data["kind"]), str(self.data["source"])
            return
        for key, value in self.data.items():
            if isinstance(value, dict):
                yield from self.table(key).figures()
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                for table in self.tables(key):
                    yield from table.figures()
