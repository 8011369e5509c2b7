"""The plan as a picture: the mesh on its cluster, and each distinct block once, its operators along the data flow.

A static SVG that prints and stands in documents: the same plan gives the same text.
"""

from __future__ import annotations

from autoshard.cluster.hardware import Hardware
from autoshard.html_report.picture import svg
from autoshard.html_report.picture.cluster_picture import axis_words, cluster
from autoshard.html_report.picture.flow_layout import Lane, Place, placed
from autoshard.html_report.picture.plan_flow import BlockFlow, FlowBox, TensorShards, flows
from autoshard.html_report.picture.shard_glyph import glyph, shape_text
from autoshard.html_report.picture.shard_glyph import words as shard_words
from autoshard.html_report.picture.stage_row import handed_bytes, stage_row
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.text.stage_table import stage_words
from autoshard.units import format_bytes, format_seconds

MARGIN = LINE = svg.SIZES.line
GAP, ROOM = svg.SIZES.gap, svg.SIZES.room
SHARDS = svg.SIZES.cell / 2 + 5  # height of a tensor's drawing with the room around it


def plan_svg(plan: Plan, graph: Graph, hardware: Hardware, key: str = "plan") -> str:
    """The picture as one SVG document; `key` tells its names from those of another on the same page."""
    mesh, model = plan.mesh, plan.model or graph.name
    body = [svg.text(MARGIN, 26, f"{model} on {mesh} of {plan.hardware}", class_="head")]
    seconds = plan.step_seconds
    peak = plan.step_peak_bytes
    message = f"predicted {format_seconds(seconds)} a step, {format_bytes(peak)} a device"
    body.append(
        svg.text(MARGIN, 43, f"{message}; boxes: what runs; orange: what crosses devices, forward and backward")
    )
    drawn = cluster(mesh, hardware)
    stages, stages_width, stages_height = stage_row(plan, graph, hardware, MARGIN, 58)
    body += stages
    body.append(_at(MARGIN, 56 + stages_height, drawn.body))
    y = 56 + stages_height + drawn.height + 8
    panels = [_panel(flow, mesh) for flow in flows(plan, graph)]
    shapes, width, height = _shelved(panels, y)
    wide = max(
        width,
        max(drawn.width, stages_width) + 2 * MARGIN,
        MARGIN + svg.width_of(f"{model} on {mesh} of {plan.hardware}", 13),
    )
    title, words = f"The plan of {model}", about(plan, graph, hardware)
    return svg.document(wide, height + MARGIN, title, words, [*body, *shapes], key)


def about(plan: Plan, graph: Graph, hardware: Hardware) -> str:
    """The picture in words, for readers who don't see it."""
    lines = [words for _, words in axis_words(plan.mesh, hardware)]
    if plan.step.stages > 1:
        word, pairs = plan.step.word, handed_bytes(plan, graph) if plan.step.placed else {}
        lines += [f"{word} {stage} has {stage_words(plan, graph, stage)}" for stage in range(plan.step.stages)]
        lines += [f"place {one} gives place {other} {format_bytes(size)}" for (one, other), size in pairs.items()]
    for flow in flows(plan, graph):
        said = [_said(box, plan.mesh) for box in flow.boxes if box.kind in ("op", "move")]
        lines.append(f"{flow.title}: {'; '.join(said)}")
    return ". ".join(lines) + "."


def _said(box: FlowBox, mesh: Mesh) -> str:
    where = ", ".join(shard_words(tensor.shape, tensor.layout, mesh) for tensor in box.tensors[-1:])
    talks = ", ".join(talk for tensor in box.tensors for talk in tensor.talks)
    words = f"{box.name} {box.what}".strip() + f" ({box.words}), {where}"
    return words + (f", {talks}" if talks else "")


def _at(x: float, y: float, body: tuple[str, ...] | list[str]) -> str:
    return f'<g transform="translate({svg.number(x)} {svg.number(y)})">' + "\n".join(body) + "</g>"


def _shelved(panels: list[tuple[list[str], float, float]], y: float) -> tuple[list[str], float, float]:
    """Panels side by side in the order of execution, on as many shelves as they need."""
    shapes: list[str] = []
    x, shelf, widest = MARGIN, 0.0, 0.0
    for index, (body, width, height) in enumerate(panels):
        if x > MARGIN and x + width > svg.SIZES.page:
            x, y, shelf = MARGIN, y + shelf + GAP, 0.0
        if index and x > MARGIN:
            shapes.append(_arrow(x - GAP + 3, y + 12, x - 3, y + 12))
        shapes.append(_at(x, y, body))
        x, shelf = x + width + GAP, max(shelf, height)
        widest = max(widest, x - GAP + MARGIN)
    return shapes, widest, y + shelf


def _panel(flow: BlockFlow, mesh: Mesh) -> tuple[list[str], float, float]:
    sizes = {box.key: _size(box) for box in flow.boxes}
    layout = placed(flow, sizes)
    width = max(layout.width, min(360.0, svg.width_of(flow.title, 13)) + 28)
    shift = (width - layout.width) / 2
    body = [svg.rect(0, 0, width, layout.height + 24, rx=8, class_="panel")]
    body.append(svg.text(12, 19, svg.clipped(flow.title, width - 20, 13), class_="head"))
    inner = [_edge(layout.places[a], layout.places[b]) for a, b in layout.straight]
    inner += [_lane(lane) for lane in layout.lanes]
    for box in flow.boxes:
        inner += _box(box, layout.places[box.key], mesh)
    return [*body, _at(shift, 24, inner)], width, layout.height + 24


def _size(box: FlowBox) -> tuple[float, float]:
    if box.kind in ("input", "output"):
        return min(ROOM, svg.width_of(box.name, 10)) + 16, 18.0
    if box.kind == "join":
        return 120.0, 18.0
    lines = len(_title_lines(box)) + len(_lines(box))
    lines += sum(len(tensor.talks) and len(_talk_lines(tensor)) for tensor in box.tensors)
    return ROOM + 16, 10 + LINE * lines + SHARDS * len(box.tensors) + LINE * bool(box.after)


def _title_lines(box: FlowBox) -> list[str]:
    """The module and the operator on two lines where one has no room for the module's own name."""
    if not box.name:
        return svg.folded(box.what, ROOM, 12, 2)
    title, name = f"{box.name} · {box.what}", box.name.rpartition(".")[2]
    one = svg.ending(title, ROOM, 12)
    return [one] if f"{name} · {box.what}" in one else [svg.ending(box.name, ROOM, 12), svg.clipped(box.what, ROOM, 12)]


def _label(words: str, room: float) -> str:
    """The label, shortened to its room; of `from MODULE` the end of the module's name stays."""
    first, space, tail = words.partition(" ")
    return first + space + svg.ending(tail, room - svg.width_of(first + space, 10), 10)


def _lines(box: FlowBox) -> list[str]:
    return svg.folded(box.words, ROOM)


def _talk_lines(tensor: TensorShards) -> list[str]:
    return [part for talk in tensor.talks for part in svg.folded(talk, ROOM - 12, 10)]


def _box(box: FlowBox, at: Place, mesh: Mesh) -> list[str]:
    middle = at.x + at.width / 2
    if box.kind in ("input", "output"):
        return [svg.text(middle, at.y + 13, _label(box.name, at.width), class_="small soft mid")]
    if box.kind == "join":
        shape = svg.rect(at.x, at.y, at.width, at.height, rx=9, class_="box")
        return [shape, svg.text(middle, at.y + 13, svg.clipped(box.what, at.width), class_="mid")]
    kind, ink = ("talkbox", "talk") if box.kind == "move" else ("box", "")
    body = [svg.rect(at.x, at.y, at.width, at.height, rx=4, class_=kind)]
    left, y = at.x + 8, at.y + 17 - LINE
    title = f"{box.name} · {box.what}" if box.name else box.what
    body.append(f"<title>{svg.safe(f'{title}: {box.words}')}</title>")
    for words in _title_lines(box):
        y += LINE
        body.append(svg.text(left, y, words, class_=f"name {ink}".strip()))
    for words in _lines(box):
        y += LINE
        body.append(svg.text(left, y, words))
    for tensor in box.tensors:
        body += _shards(tensor, left, y, mesh)
        y += SHARDS
        for words in _talk_lines(tensor) if tensor.talks else ():
            y += LINE
            body.append(svg.text(left + 12, y, words, class_="small talk"))
    if box.after:
        body.append(svg.text(left, y + LINE, svg.clipped(f"then {', '.join(box.after)}", ROOM), class_="small soft"))
    return ["<g>", *body, "</g>"]


def _shards(tensor: TensorShards, x: float, y: float, mesh: Mesh) -> list[str]:
    """The tensor's drawing, its name and its shape."""
    start, room = x + svg.SIZES.cell + 8, ROOM - svg.SIZES.cell - 8
    drawn = [*glyph(x, y + 5, tensor.layout, mesh)]
    if not tensor.name:
        return [*drawn, shape_text(start, y + 19, tensor.shape, tensor.layout, mesh, room)]
    name = svg.text(start, y + 12, svg.clipped(tensor.name, room, 10), class_="small soft")
    return [*drawn, name, shape_text(start, y + 24, tensor.shape, tensor.layout, mesh, room)]


def _edge(a: Place, b: Place) -> str:
    """Edge down to the end of its layer, so that it passes next to higher boxes there, and in a curve to the next."""
    x1, y1, x2, y2 = a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y
    half, n = (a.floor + y2) / 2, svg.number
    curve = ", ".join(f"{n(x)} {n(y)}" for x, y in ((x1, half), (x2, half), (x2, y2 - 5)))
    return svg.path(f"M {n(x1)} {n(y1)} V {n(a.floor)} C {curve}", class_="edge") + _tip(x2, y2)


def _lane(lane: Lane) -> str:
    (x1, y1), (x2, y2) = lane.start, lane.end
    n = svg.number
    d = f"M {n(x1)} {n(y1)} V {n(lane.turn)} H {n(lane.x)} V {n(y2 - lane.offset)} H {n(x2)} V {n(y2 - 5)}"
    return svg.path(d, class_="edge", stroke_linejoin="round") + _tip(x2, y2)


def _tip(x: float, y: float) -> str:
    n = svg.number
    return svg.path(f"M {n(x - 4)} {n(y - 6)} L {n(x + 4)} {n(y - 6)} L {n(x)} {n(y)} Z", class_="tip")


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    n = svg.number
    head = svg.path(f"M {n(x2 - 6)} {n(y2 - 4)} L {n(x2 - 6)} {n(y2 + 4)} L {n(x2)} {n(y2)} Z", class_="tip")
    return svg.line(x1, y1, x2 - 5, y2, class_="edge") + head
