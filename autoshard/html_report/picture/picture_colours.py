"""Colours and fonts of the drawn pictures, light and dark, by class: mesh axes, boxes, collectives (`talk`)."""

from __future__ import annotations

from collections.abc import Sequence

AXIS_COLOURS = ("#0b66c3", "#b4501a", "#177245", "#7b45b5", "#0a7c86", "#b3246f", "#6c6a00", "#5a6270")
_DARK_AXES = ("#7db8f5", "#f0955c", "#6fcf97", "#c9a3f2", "#5fd0da", "#f08fc0", "#d6d25c", "#b3bac4")
_LIGHT = {"page": "#fcfcfb", "panel": "#f2f2ef", "box": "#ffffff", "line": "#b9b9b2", "text": "#1b1d1f",
          "soft": "#575b60", "talk": "#a34a10", "talkbox": "#fdf1e7", "part": "#c9d9ea"}  # fmt: skip
_DARK = {"page": "#16181a", "panel": "#212427", "box": "#2b2f33", "line": "#5a6067", "text": "#e9eaeb",
         "soft": "#b0b5bb", "talk": "#f0a36c", "talkbox": "#3a2c20", "part": "#3d5a78"}  # fmt: skip


def style(key: str) -> str:
    """The rules of a picture, that hold inside it only."""
    own = f".autoshard-{key}"
    font = 'font: 11px "DejaVu Sans", Verdana, system-ui, sans-serif'
    rules = [f"{own} text {{ {font} }}", f"{own} .head {{ font-weight: 600; font-size: 13px }}"]
    rules += [f"{own} .name {{ font-weight: 600 }}", f"{own} .small {{ font-size: 10px }}"]
    rules += [f"{own} .edge {{ fill: none; stroke-width: 1.4 }}", f"{own} .mid {{ text-anchor: middle }}"]
    dark = " ".join(_colours(own, _DARK, _DARK_AXES))
    rules += _colours(own, _LIGHT, AXIS_COLOURS)
    return " ".join([*rules, f"@media screen and (prefers-color-scheme: dark) {{ {dark} }}"])


def _colours(own: str, named: dict[str, str], axes: Sequence[str]) -> list[str]:
    rules = [f"{own} .{name} {{ fill: {named[name]} }}" for name in ("page", "part")]
    rules += [f"{own} .{name} {{ fill: {named[name]}; stroke: {named['line']} }}" for name in ("panel", "box")]
    rules += [f"{own} .talkbox {{ fill: {named['talkbox']}; stroke: {named['talk']} }}"]
    rules += [f"{own} text {{ fill: {named['text']} }}", f"{own} .soft {{ fill: {named['soft']} }}"]
    rules += [f"{own} text.talk {{ fill: {named['talk']} }}", f"{own} text.inside {{ fill: {named['page']} }}"]
    rules += [f"{own} .edge, {own} .cell {{ stroke: {named['soft']} }}", f"{own} .tip {{ fill: {named['soft']} }}"]
    rules += [f"{own} .cell {{ fill: {named['box']} }}"]
    for index, colour in enumerate(axes):
        rules.append(f"{own} .axis{index} {{ stroke: {colour} }} {own} .ink{index} {{ fill: {colour} }}")
    return rules
