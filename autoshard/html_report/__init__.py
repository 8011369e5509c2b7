"""Plan + Program + Timeline -> one self-contained HTML page. The template, style and script are in `reports/`."""

from autoshard.html_report.render import render

__all__ = ["render"]
