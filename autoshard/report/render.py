"""Fills the template: data in, one HTML text out, the same for the same plan, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.graph.model import Graph
from autoshard.hardware import Hardware
from autoshard.plan import Plan
from autoshard.program.model import Program
from autoshard.report.page import page
from autoshard.resources import data_folder
from autoshard.simulate import Timeline


def render(
    plan: Plan,
    graph: Graph,
    program: Program,
    hardware: Hardware,
    timeline: Timeline,
    verification: Mapping[str, Any] | None = None,
) -> str:
    """The report as HTML. `verification` is what `autoshard verify` found, None where it was not run."""
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
    content = page(plan, graph, program, hardware, timeline, verification)
    return environment.get_template("report.html.jinja").render(**content, style=style, script=script)
