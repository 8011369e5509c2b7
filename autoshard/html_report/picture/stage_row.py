"""The stages of a pipeline, or the places of a model, side by side above the blocks: what each has, on a mesh of its
own, and what they give each other."""

from __future__ import annotations

import math
from itertools import accumulate

from autoshard.cluster.hardware import Hardware
from autoshard.html_report.picture import svg
from autoshard.ir.graph import DTYPE_BYTES, Graph
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.program.stage_programs import handed_from, stage_programs
from autoshard.text.stage_table import stage_words
from autoshard.units import format_bytes

WIDTH, LINE, GAP = svg.SIZES.stage, svg.SIZES.line, svg.SIZES.gap


def stage_row(plan: Plan, graph: Graph, hardware: Hardware, x: float, y: float) -> tuple[list[str], float, float]:
    """The shapes, how wide and how high they are: 0 without stages."""
    count = plan.step.stages
    if count == 1:
        return [], 0.0, 0.0
    said = [_lines(plan, graph, hardware, stage) for stage in range(count)]
    height = 24 + LINE * max(map(len, said))
    across = max(1, int((svg.SIZES.page - 2 * x + GAP) // (WIDTH + GAP)))
    corners = [(x + (n % across) * (WIDTH + GAP), y + (n // across) * (height + 8)) for n in range(count)]
    firsts = list(accumulate((mesh.size for mesh in plan.meshes), initial=0))
    body: list[str] = []
    for stage, ((left, top), lines) in enumerate(zip(corners, said, strict=True)):
        first, last = firsts[stage], firsts[stage + 1] - 1
        ranks = f"ranks {first} to {last}" if last > first else f"rank {first}"
        body.append(svg.rect(left, top, WIDTH, height, rx=6, class_="panel"))
        body.append(svg.text(left + 8, top + 15, f"{plan.step.word} {stage}", class_="name"))
        body.append(svg.text(left + 62, top + 15, ranks, class_="small soft"))
        body += [svg.text(left + 8, top + 15 + LINE * (n + 1), words, class_="small") for n, words in enumerate(lines)]
        if stage % across and not plan.step.placed:
            middle = top + height / 2
            body.append(svg.line(left - GAP + 3, middle, left - 7, middle, class_="edge"))
            body.append(svg.path(f"M {svg.number(left - 9)} {svg.number(middle - 4)} l 7 4 l -7 4 Z", class_="tip"))
    high = (1 + (count - 1) // across) * (height + 8)
    ways, deep = _ways(handed_bytes(plan, graph), corners, y + high - 8) if plan.step.placed else ([], 0.0)
    return [*body, *ways], min(count, across) * (WIDTH + GAP) - GAP, high + deep


def _lines(plan: Plan, graph: Graph, hardware: Hardware, stage: int) -> list[str]:
    """Lines of a stage's box; with places or several kinds of devices, the mesh and the kind too."""
    mesh = plan.meshes[stage]
    first = sum(before.size for before in plan.meshes[:stage])
    kind = hardware.of_ranks(first, mesh.size).name if hardware.kinds else ""
    where = [f"{mesh} of {kind}" if kind else str(mesh)] if kind or plan.step.placed else []
    words = stage_words(plan, graph, stage)
    return [*where, *svg.folded(words, WIDTH - 16, 10, len(words))]


def handed_bytes(plan: Plan, graph: Graph) -> dict[tuple[int, int], float]:
    """(place that makes them, place that reads them) -> bytes of the whole values, of a micro-batch in forward."""
    program, places = lower(plan, graph), plan.step.part_stages
    parts = stage_programs(program, plan)
    sent = {
        (maker, position, places[reader])
        for reader, sources in enumerate(handed_from(parts, program))
        for maker, position in sources
        if places[maker] != places[reader]
    }
    sizes: dict[tuple[int, int], float] = {}
    for maker, position, place in sorted(sent):
        pair, value = (places[maker], place), parts[maker].value(parts[maker].outputs[position])
        sizes[pair] = sizes.get(pair, 0.0) + math.prod(value.shape) * DTYPE_BYTES[value.dtype]
    return sizes


def _ways(pairs: dict[tuple[int, int], float], corners: list[tuple[float, float]], y: float) -> tuple[list[str], float]:
    """A way below the boxes for each pair of places, the shorter ones above, and how deep they go. Of boxes in several
    rows in words."""
    said = {pair: f"{pair[0]} to {pair[1]}: {format_bytes(size)}" for pair, size in pairs.items()}
    if len({top for _, top in corners}) > 1:
        lines = svg.folded("; ".join(said.values()), svg.SIZES.page - 2 * corners[0][0], 10, len(said))
        words = [svg.text(corners[0][0], y + LINE * (n + 1), row, class_="small soft") for n, row in enumerate(lines)]
        return words, LINE * len(lines) + 8
    body, taken = list[str](), list[list[tuple[int, int]]]()
    for pair in sorted(pairs, key=lambda pair: (abs(pair[1] - pair[0]), pair)):
        first, last = sorted(pair)
        free = (n for n, spans in enumerate(taken) if all(last <= left or right <= first for left, right in spans))
        level = next(free, len(taken))
        if level == len(taken):
            taken.append([])
        taken[level].append((first, last))
        start, end = corners[pair[0]][0] + WIDTH * 0.7, corners[pair[1]][0] + WIDTH * 0.3
        low = y + (LINE + 4) * (level + 1)
        route = f"M {svg.number(start)} {svg.number(y)} V {svg.number(low)} H {svg.number(end)} V {svg.number(y + 6)}"
        body.append(svg.path(route, class_="edge", fill="none"))
        body.append(svg.path(f"M {svg.number(end - 4)} {svg.number(y + 7)} l 4 -7 l 4 7 Z", class_="tip"))
        middle = (start + end) / 2
        body.append(svg.text(middle, low - 3, said[pair], class_="small soft", text_anchor="middle"))
    return body, (LINE + 4) * len(taken) + 8 * bool(taken)
