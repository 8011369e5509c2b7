"""Fills the template: data in, one HTML text out, the same for the same plan, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.code_text import printable
from autoshard.html_report.diff_page import diff_page
from autoshard.html_report.page import page
from autoshard.replay.simulated_plan import ReportExtras, SimulatedPlan
from autoshard.system.files import data_folder

TABLE_SCRIPTS = ("tables.js",)
DRAWING = "units timeline_data timeline_view timeline_input memory_view stages_view main"
SCRIPTS = (*(f"{name}.js" for name in DRAWING.split()), *TABLE_SCRIPTS)


def render(built: SimulatedPlan, extras: ReportExtras) -> str:
    """The report as HTML."""
    return _filled("report.html.jinja", SCRIPTS, page(built, extras))


def render_diff(one: SimulatedPlan, other: SimulatedPlan) -> str:
    """Two reports side by side, as HTML."""
    return _filled("diff.html.jinja", TABLE_SCRIPTS, diff_page(one, other))


def _filled(template: str, scripts: Sequence[str], content: Mapping[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = data_folder("reports")
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (folder / "report.css").read_text(encoding="utf-8")
    parts = "".join((folder / name).read_text(encoding="utf-8") for name in scripts)
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    return environment.get_template(template).render(**content, style=style, script=script)


def _shown(value: Any) -> Any:
    """Text of a model or person without control and direction marks; its lines stay."""
    plain = isinstance(value, str) and not hasattr(value, "__html__")
    return "\n".join(map(printable, value.split("\n"))) if plain else value
