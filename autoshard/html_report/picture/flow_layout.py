"""Layout of a block's boxes: one layer under the other along the data flow, long edges in lanes at the side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.html_report.picture.plan_flow import BlockFlow
from autoshard.html_report.picture.svg import SIZES

GAP, MARGIN = SIZES.gap, SIZES.line


@dataclass(frozen=True)
class Place:
    """`floor`: where the highest box of its layer ends, below which an edge may go sideways."""

    x: float
    y: float
    width: float
    height: float
    floor: float


@dataclass(frozen=True)
class Lane:
    """An edge that passes layers: from `start` down to `turn`, across to `x`, down, across, and down to `end`."""

    x: float
    start: tuple[float, float]
    end: tuple[float, float]
    turn: float
    offset: float  # how far above `end` it turns


@dataclass(frozen=True)
class PlacedFlow:
    """Places by box key, straight edges as (from, to) keys, the others as lanes; the size of it all."""

    places: Mapping[str, Place]
    straight: tuple[tuple[str, str], ...]
    lanes: tuple[Lane, ...]
    width: float
    height: float


def placed(flow: BlockFlow, sizes: Mapping[str, tuple[float, float]]) -> PlacedFlow:
    """`sizes`: (width, height) of each box."""
    layers = _layers(flow)
    rows: list[list[str]] = [[] for _ in range(max(layers.values(), default=0) + 1)]
    for box in flow.boxes:
        rows[layers[box.key]].append(box.key)
    wide = max((sum(sizes[key][0] for key in row) + GAP * (len(row) - 1) for row in rows if row), default=0.0)
    places: dict[str, Place] = {}
    y = MARGIN
    for row in rows:
        _ordered(row, flow, places)
        x = MARGIN + (wide - sum(sizes[key][0] for key in row) - GAP * (len(row) - 1)) / 2
        floor = y + max((sizes[key][1] for key in row), default=0.0)
        for key in row:
            places[key] = Place(x, y, *sizes[key], floor)
            x += sizes[key][0] + GAP
        y = floor + GAP
    straight = tuple(edge for edge in flow.edges if layers[edge[1]] - layers[edge[0]] == 1)
    lanes = _lanes([edge for edge in flow.edges if edge not in straight], layers, places, wide + 2 * MARGIN)
    width = max([wide + 2 * MARGIN, *(lane.x + MARGIN for lane in lanes)])
    return PlacedFlow(places, straight, lanes, width, y - GAP + MARGIN)


def _layers(flow: BlockFlow) -> dict[str, int]:
    """Layer of each box: the longest way from an input; an input that is read late is just above its first reader."""
    layers = {box.key: 0 for box in flow.boxes}
    kinds = {box.key: box.kind for box in flow.boxes}
    into: dict[str, list[str]] = {}
    for source, target in flow.edges:
        into.setdefault(target, []).append(source)
    for _ in flow.boxes:  # boxes are not sorted: a move is made before its reader
        changed = False
        for target, sources in into.items():
            layer = 1 + max(layers[source] for source in sources)
            changed |= layer != layers[target]
            layers[target] = layer
        if not changed:
            break
    for key, kind in kinds.items():
        readers = [layers[target] for source, target in flow.edges if source == key]
        if kind == "input" and readers:
            layers[key] = min(readers) - 1
    return layers


def _ordered(row: list[str], flow: BlockFlow, places: Mapping[str, Place]) -> None:
    """Boxes of a row left to right, by the positions of what they read."""

    def middle(key: str) -> float:
        above = [places[s] for s, t in flow.edges if t == key and s in places]
        return sum(p.x + p.width / 2 for p in above) / len(above) if above else 0.0

    row.sort(key=middle)


def _lanes(
    edges: list[tuple[str, str]], layers: Mapping[str, int], places: Mapping[str, Place], left: float
) -> tuple[Lane, ...]:
    """Lanes of the edges: each in the first lane that is free along its way."""
    taken: list[list[tuple[int, int]]] = []
    lanes = []
    for source, target in sorted(edges, key=lambda edge: (layers[edge[0]], -layers[edge[1]])):
        span = layers[source], layers[target]
        lane = next(
            (n for n, spans in enumerate(taken) if all(span[1] <= a or b <= span[0] for a, b in spans)), len(taken)
        )
        if lane == len(taken):
            taken.append([])
        taken[lane].append(span)
        start, end = places[source], places[target]
        offset = 6.0 + 2.0 * (lane % 5)
        lanes.append(
            Lane(
                left + SIZES.lane * lane - MARGIN / 2,
                (start.x + start.width * 0.75, start.y + start.height),
                (end.x + end.width * 0.75, end.y),
                start.floor + offset,
                offset,
            )
        )
    return tuple(lanes)
