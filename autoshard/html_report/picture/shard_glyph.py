"""One tensor on the mesh as a small drawing: shard lines, copies and sums in the colour of the axis that makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.html_report.picture import svg
from autoshard.ir.layout import Layout, Replicate, Shard
from autoshard.ir.mesh import Mesh
from autoshard.text.plan_labels import placement_words

SHIFT = 3.0  # of a copy from the one before it
MOST_PARTS = 16  # of a tensor, devices of a node: drawn one by one


def glyph(x: float, y: float, layout: Layout, mesh: Mesh) -> list[str]:
    """The whole tensor as a rectangle at (x, y): rows are its first sharded dim, columns its last; what the first
    device holds is filled. Behind it a copy for each axis that copies, before it a Σ for each that has partial sums."""
    cut = sorted({p.dim for p, n in zip(layout.placements, mesh.sizes, strict=True) if isinstance(p, Shard) and n > 1})
    copies = [a for a, p in enumerate(layout.placements) if mesh.sizes[a] > 1 and isinstance(p, Replicate)]
    sums = [a for a, p in enumerate(layout.placements) if mesh.sizes[a] > 1 and not isinstance(p, Replicate | Shard)]
    parts = [f"<title>{svg.safe(f'{layout.on(mesh)}: {placement_words(layout, mesh)}')}</title>"]
    width, height = (side - SHIFT * len(copies) for side in (svg.SIZES.cell, svg.SIZES.cell / 2))
    for depth, axis in reversed(list(enumerate(copies, 1))):
        place = (x + SHIFT * depth, y + SHIFT * (len(copies) - depth), width, height)
        parts.append(svg.rect(*place, class_=f"cell axis{axis % 8}"))
    top = y + SHIFT * len(copies)
    parts.append(svg.rect(x, top, width, height, class_="cell"))
    rows = _axes(layout, mesh, cut[0]) if cut else []
    columns = _axes(layout, mesh, cut[-1]) if len(cut) > 1 else []
    if rows and not columns and cut[0] > 0:
        rows, columns = columns, rows
    size = (width / _count(columns, mesh), height / _count(rows, mesh))
    parts.append(svg.rect(x, top, *size, class_="part"))
    parts += [svg.line(x + at * width, top, x + at * width, top + height, class_=c) for at, c in _cuts(columns, mesh)]
    parts += [svg.line(x, top + at * height, x + width, top + at * height, class_=c) for at, c in _cuts(rows, mesh)]
    for index, axis in enumerate(sums):
        parts.append(svg.text(x + 4 + 11 * index, top + height - 4, "Σ", class_=f"name ink{axis % 8}"))
    return ["<g>", *parts, "</g>"]


def _axes(layout: Layout, mesh: Mesh, dim: int) -> list[int]:
    """Axes that shard a dim, outermost first."""
    return [axis for axis, _ in layout.shards(dim) if mesh.sizes[axis] > 1]


def _drawn(axes: Sequence[int], mesh: Mesh) -> list[tuple[int, int]]:
    """(axis, shards that it splits each part into), the outer ones as long as the parts can be drawn one by one."""
    drawn: list[tuple[int, int]] = []
    count = 1
    for axis in axes:
        if count * mesh.sizes[axis] > MOST_PARTS and drawn:
            break
        size = min(mesh.sizes[axis], MOST_PARTS)
        drawn.append((axis, size))
        count *= size
    return drawn


def _count(axes: Sequence[int], mesh: Mesh) -> int:
    return math.prod(size for _, size in _drawn(axes, mesh))


def _cuts(axes: Sequence[int], mesh: Mesh) -> list[tuple[float, str]]:
    """(place from 0 to 1, class) of each shard line, in the colour of the outermost axis that splits there."""
    drawn, total = _drawn(axes, mesh), _count(axes, mesh)
    cuts: list[tuple[float, str]] = []
    for place in range(1, total):
        inner = total
        for axis, size in drawn:
            inner //= size
            if place % inner == 0:
                cuts.append((place / total, f"axis{axis % 8}"))
                break
    return cuts


def shape_text(x: float, y: float, shape: Sequence[int], layout: Layout, mesh: Mesh, room: float) -> str:
    """`4/dp × 256 × 768/tp`: each dim with the axes that shard it, in their colours."""
    words, spans = "", []
    for dim, size in enumerate(shape):
        start = " × " if dim else ""
        words += f"{start}{size}"
        spans.append(f"{start}{size}")
        for axis in _axes(layout, mesh, dim):
            words += f"/{mesh.names[axis]}"
            spans.append(f'<tspan class="name ink{axis % 8}">/{svg.safe(mesh.names[axis])}</tspan>')
    if svg.width_of(words) > room:
        return svg.text(x, y, svg.clipped(words or "scalar", room), class_="small")
    return f"<text{svg.attributes(x=x, y=y)}>{''.join(spans) or 'scalar'}</text>"


def words(shape: Sequence[int], layout: Layout, mesh: Mesh) -> str:
    """The layout as plain text: `4 × 256 × 768, dim 0 cut over dp, copied over tp`."""
    return f"{' × '.join(map(str, shape)) or 'scalar'}, {placement_words(layout, mesh)}"
