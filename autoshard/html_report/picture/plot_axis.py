"""Axis of a plot: from values to places, with round marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.html_report.picture import svg


@dataclass(frozen=True)
class PlotAxis:
    """`low` to `high` stand at `first` to `last`, which may be the smaller number."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool
    unit: float = 1.0  # marks are round numbers of these

    @staticmethod
    def of(values: Sequence[float], first: float, last: float, unit: float = 1.0) -> PlotAxis:
        """Axis with room around the values, which are above 0. `unit`: marks are round numbers of its powers (1024)."""
        least, most = min(values), max(values)
        size = unit ** math.floor(math.log(most, unit)) if unit > 1 and most >= 1 else 1.0
        if math.log10(most / least) > 1:  # a decade or more has marks enough of its own
            return PlotAxis(least / 1.3, most * 1.3, first, last, True, size)
        room = max((most - least) * 0.12, most * 0.02)
        return PlotAxis(least - room, most + room, first, last, False, size)

    @property
    def note(self) -> str:
        return ", logarithmic" if self.logarithmic else ""

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high

    def at(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Three to eight round values."""
        low, high = self.low / self.unit, self.high / self.unit
        if self.logarithmic:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            marks = [step * 10.0**power * self.unit for power in powers for step in (1, 2, 5)]
            return [mark for mark in marks if self.covers(mark)]
        rough = (high - low) / 7
        power = 10.0 ** math.floor(math.log10(rough))
        size = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
        return [n * size * self.unit for n in range(math.ceil(low / size), math.floor(high / size) + 1)]


@dataclass(frozen=True)
class PlotFrame:
    """The panel of a plot, in pixels: the size of the picture and the margins around the panel."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    @property
    def end(self) -> float:
        return self.width - self.right

    @property
    def floor(self) -> float:
        return self.height - self.bottom

    def panel(
        self, marks: Sequence[tuple[float, str]], up: PlotAxis, shown: Callable[[float, int], str], names: Sequence[str]
    ) -> list[str]:
        """The panel with `marks` (place, words) below and those of `up` at the left, and the names of both axes."""
        below, aside = names
        body = [svg.rect(self.left, self.top, self.end - self.left, self.floor - self.top, class_="panel")]
        for x, words in marks:
            body.append(svg.line(x, self.floor, x, self.floor + 4, class_="edge"))
            body.append(svg.text(x, self.floor + 17, words, class_="small mid"))
        for value in up.ticks():
            y = up.at(value)
            body.append(svg.line(self.left - 4, y, self.left, y, class_="edge"))
            body.append(svg.text(self.left - 8, y + 4, shown(value, 3), class_="small", text_anchor="end"))
        body.append(svg.text((self.left + self.end) / 2, self.height - 8, below, class_="mid"))
        return [*body, svg.text(4, 12, aside)]
