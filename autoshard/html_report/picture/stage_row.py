"""The stages of a pipeline side by side, above the blocks: what each has, on a mesh of its own."""

from __future__ import annotations

from autoshard.html_report.picture import svg
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.text.stage_table import stage_words

WIDTH, LINE, GAP, PAGE = 168.0, 13.0, 22.0, 1180.0
MOST_LINES = 4


def stage_row(plan: Plan, graph: Graph, x: float, y: float) -> tuple[list[str], float, float]:
    """The shapes, how wide and how high they are: 0 without stages."""
    count = plan.step.stages
    if count == 1:
        return [], 0.0, 0.0
    said = [svg.folded(stage_words(plan, graph, stage), WIDTH - 16, 10, MOST_LINES) for stage in range(count)]
    height = 24 + LINE * max(map(len, said))
    across = max(1, int((PAGE - 2 * x + GAP) // (WIDTH + GAP)))
    body: list[str] = []
    for stage, lines in enumerate(said):
        left, top = x + (stage % across) * (WIDTH + GAP), y + (stage // across) * (height + 8)
        ranks = f"ranks {stage * plan.mesh.size} to {(stage + 1) * plan.mesh.size - 1}"
        body.append(svg.rect(left, top, WIDTH, height, rx=6, class_="panel"))
        body.append(svg.text(left + 8, top + 15, f"stage {stage}", class_="name"))
        body.append(svg.text(left + 62, top + 15, ranks, class_="small soft"))
        body += [svg.text(left + 8, top + 15 + LINE * (n + 1), words, class_="small") for n, words in enumerate(lines)]
        if stage % across and stage:
            middle = top + height / 2
            body.append(svg.line(left - GAP + 3, middle, left - 7, middle, class_="edge"))
            body.append(svg.path(f"M {svg.number(left - 9)} {svg.number(middle - 4)} l 7 4 l -7 4 Z", class_="tip"))
    return body, min(count, across) * (WIDTH + GAP) - GAP, (1 + (count - 1) // across) * (height + 8)
