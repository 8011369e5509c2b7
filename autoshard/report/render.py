"""Fills the template: data in, one HTML text out, the same for the same plan, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.report.page import page
from autoshard.search.pareto_front import Point
from autoshard.search.style_plans import StylePlan
from autoshard.simulate import Timeline
from autoshard.system.data_files import data_folder


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
) -> str:
    """The report as HTML. `verification` is what `autoshard verify` found, None where it was not run; `styles` and
    `front`, empty where not asked for, are other plans to compare with."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = data_folder("reports")
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    content = page(plan, graph, program, hardware, timeline, verification, styles)
    return environment.get_template("report.html.jinja").render(**content, style=style, script=script)
