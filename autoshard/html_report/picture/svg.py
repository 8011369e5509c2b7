"""A few shapes as SVG text: numbers rounded, names escaped, colours by class, so that a page can be light or dark."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape  # xml.sax.saxutils loads what opens addresses of the internet

from autoshard.code_text import printable

_SPACE = {ord(char): f"&#{ord(char)};" for char in "\t\n\r"}  # in an attribute it would be read as a blank
LETTER = 0.58  # width of a letter of the sans-serif fonts named below, in font sizes, on average


@dataclass(frozen=True)
class Geometry:
    """Lengths of the picture of a plan, in pixels: the rest follows from the height of a line of text."""

    page: float = 1180.0  # its width
    line: float = 14.0
    cell: float = 40.0  # width of a device or a tensor, which is half as high

    @property
    def gap(self) -> float:
        """Gap between boxes."""
        return 1.5 * self.line

    @property
    def lane(self) -> float:
        """Gap between lines that run side by side."""
        return 0.75 * self.line

    @property
    def room(self) -> float:
        """Width of the words in a box."""
        return 16 * self.line

    @property
    def stage(self) -> float:
        """Width of the box of a stage."""
        return 12 * self.line


SIZES = Geometry()


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def attributes(**values: str | float) -> str:
    """` x="1" class="box"`: an underscore at the end is dropped, others are hyphens."""
    shown = ((name.rstrip("_").replace("_", "-"), value) for name, value in values.items())
    return "".join(f" {n}={_quoted(v if isinstance(v, str) else number(v))}" for n, v in shown)


def rect(x: float, y: float, width: float, height: float, **more: str | float) -> str:
    return f"<rect{attributes(x=x, y=y, width=width, height=height, **more)}/>"


def line(x1: float, y1: float, x2: float, y2: float, **more: str | float) -> str:
    return f"<line{attributes(x1=x1, y1=y1, x2=x2, y2=y2, **more)}/>"


def path(d: str, **more: str | float) -> str:
    return f"<path{attributes(d=d, **more)}/>"


def text(x: float, y: float, words: str, **more: str | float) -> str:
    return f"<text{attributes(x=x, y=y, **more)}>{safe(words)}</text>"


def safe(words: str) -> str:
    """Text of a model or person as text, whatever it holds; in its own direction."""
    shown = printable(words)
    if any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in shown):
        shown = f"\u2068{shown}\u2069"  # isolated
    return escape(shown, quote=False)


def quoted(words: str) -> str:
    """An attribute's value, in quotes."""
    return _quoted(printable(words))


def _quoted(value: str) -> str:
    return '"' + escape(value).translate(_SPACE) + '"'


def width_of(words: str, size: float = 11) -> float:
    """Rough width of words: wide letters of eastern scripts count twice."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in words)
    return (len(words) + wide) * LETTER * size


def clipped(words: str, room: float, size: float = 11) -> str:
    """Words that fit, the end replaced by an ellipsis."""
    if width_of(words, size) <= room:
        return words
    keep = max(1, int(room / (LETTER * size)) - 1)
    while keep > 1 and width_of(words[:keep], size) > room:
        keep -= 1
    return words[:keep].rstrip() + "…"


def ending(words: str, room: float, size: float = 11) -> str:
    """Words that fit, the beginning replaced by an ellipsis: the end of a module path says most. Starts after a dot if
    the names behind it are more than half of what fits."""
    if width_of(words, size) <= room:
        return words
    tail = clipped(words[::-1], room, size)[-2::-1]
    whole = tail.partition(".")[2]
    return "…" + (whole if 2 * len(whole) > len(tail) else tail)


def folded(words: str, room: float, size: float = 11, most: int = 3) -> list[str]:
    """Lines that fit, at most `most`."""
    lines = [""]
    for word in words.split():
        joined = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_of(joined, size) > room:
            lines.append(word)
        else:
            lines[-1] = joined
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [clipped(row, room, size) for row in lines if row]


def document(
    width: float, height: float, title: str, about: str, body: Sequence[str], key: str = "plan", role: str = "img"
) -> str:
    """A whole SVG; `title` and `about` are what a screen reader says. Its style holds inside it only. `role`: an "img",
    or a "group" where it holds links."""
    head = attributes(
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {number(width)} {number(height)}", width=width, height=height,
        class_=f"autoshard-{key}", role=role, aria_labelledby=f"{key}-svg-title {key}-svg-about",
    )  # fmt: skip
    named = f'<title id="{key}-svg-title">{safe(title)}</title><desc id="{key}-svg-about">{safe(about)}</desc>'
    page = rect(0, 0, width, height, class_="page")
    return "\n".join([f"<svg{head}>", named, f"<style>{style(key)}</style>", page, *body, "</svg>", ""])


AXIS_COLOURS = ("#0b66c3", "#b4501a", "#177245", "#7b45b5", "#0a7c86", "#b3246f", "#6c6a00", "#5a6270")
_DARK_AXES = ("#7db8f5", "#f0955c", "#6fcf97", "#c9a3f2", "#5fd0da", "#f08fc0", "#d6d25c", "#b3bac4")
_LIGHT = {"page": "#fcfcfb", "panel": "#f2f2ef", "box": "#ffffff", "line": "#b9b9b2", "text": "#1b1d1f",
          "soft": "#575b60", "talk": "#a34a10", "talkbox": "#fdf1e7", "part": "#c9d9ea"}  # fmt: skip
_DARK = {"page": "#16181a", "panel": "#212427", "box": "#2b2f33", "line": "#5a6067", "text": "#e9eaeb",
         "soft": "#b0b5bb", "talk": "#f0a36c", "talkbox": "#3a2c20", "part": "#3d5a78"}  # fmt: skip


def style(key: str) -> str:
    """The rules of a picture, that hold inside it only."""
    root = f".autoshard-{key}"
    font = 'font: 11px "DejaVu Sans", Verdana, system-ui, sans-serif'
    rules = [f"{root} text {{ {font} }}", f"{root} .head {{ font-weight: 600; font-size: 13px }}"]
    rules += [f"{root} .name {{ font-weight: 600 }}", f"{root} .small {{ font-size: 10px }}"]
    rules += [f"{root} .edge {{ fill: none; stroke-width: 1.4 }}", f"{root} .mid {{ text-anchor: middle }}"]
    dark = " ".join(_colours(root, _DARK, _DARK_AXES))
    rules += _colours(root, _LIGHT, AXIS_COLOURS)
    return " ".join([*rules, f"@media screen and (prefers-color-scheme: dark) {{ {dark} }}"])


def _colours(root: str, named: dict[str, str], axes: Sequence[str]) -> list[str]:
    rules = [f"{root} .{name} {{ fill: {named[name]} }}" for name in ("page", "part")]
    rules += [f"{root} .{name} {{ fill: {named[name]}; stroke: {named['line']} }}" for name in ("panel", "box")]
    rules += [f"{root} .talkbox {{ fill: {named['talkbox']}; stroke: {named['talk']} }}"]
    rules += [f"{root} text {{ fill: {named['text']} }}", f"{root} .soft {{ fill: {named['soft']} }}"]
    rules += [f"{root} text.talk {{ fill: {named['talk']} }}", f"{root} text.inside {{ fill: {named['page']} }}"]
    rules += [f"{root} .edge, {root} .cell {{ stroke: {named['soft']} }}", f"{root} .tip {{ fill: {named['soft']} }}"]
    rules += [f"{root} .cell {{ fill: {named['box']} }}"]
    for index, colour in enumerate(axes):
        rules.append(f"{root} .axis{index} {{ stroke: {colour} }} {root} .ink{index} {{ fill: {colour} }}")
    return rules
