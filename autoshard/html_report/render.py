"""Fills the template: data in, one HTML text out, the same for the same plan, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.code_text import printable
from autoshard.html_report.diff_page import Side, diff_page
from autoshard.html_report.page import page
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.search.pareto_front import Point
from autoshard.search.style_plans import StylePlan
from autoshard.simulation import Timeline
from autoshard.simulation.steps.program_step import AccountedStep, accounted_step
from autoshard.system.files import data_folder

TABLE_SCRIPTS = ("tables.js",)
DRAWING = "units timeline_data timeline_view timeline_input memory_view stages_view main"
SCRIPTS = (*(f"{name}.js" for name in DRAWING.split()), *TABLE_SCRIPTS)


def render(
    plan: Plan,
    graph: Graph,
    program: Program,
    hardware: Hardware,
    timeline: Timeline,
    verification: Mapping[str, Any] | None = None,
    *,
    styles: Sequence[StylePlan] = (),
    front: Sequence[Point] = (),
    model_text: str = "",
    step: AccountedStep | None = None,
    others: Sequence[Plan] = (),
) -> str:
    """The report as HTML. `verification` is what `autoshard verify` found, None where it was not run; `styles` and
    `front`, empty where not asked for, are other plans to compare with; `model_text` is the emitted model_parallel.py;
    `step`: the whole step, where it is known; `others`: plans of the package for other numbers of devices.
    """
    step = step or accounted_step(plan, program, graph, hardware, timeline)
    content = page(plan, graph, program, hardware, timeline, verification, styles, front, model_text, step, others)
    return _filled("report.html.jinja", SCRIPTS, content)


def render_diff(one: Side, other: Side) -> str:
    """Two reports beside each other, as HTML."""
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
