"""Styles in which every mesh axis splits the batch: they differ in where weights are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from autoshard.formulation.fewer_choices import Keep
from autoshard.formulation.formulate import Formulation, Site
from autoshard.ir.graph import CAST, Op
from autoshard.ir.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout, Placement, Shard
from autoshard.rules.algebra.strategy import Strategy

Part = tuple[Placement, ...]
Parts = frozenset[Part]
Known = dict[tuple[int, tuple[Parts | None, ...]], tuple[list[int], list[Parts]]]
Rank = Callable[[Layout], int]  # a weight is stored in a layout that ranks highest


def data_parallel(formulation: Formulation) -> Keep | str:
    """Copied everywhere."""
    return batch_split(formulation, lambda layout: -len(cut_axes(layout)), sharded=False)


def fully_sharded(formulation: Formulation) -> Keep | str:
    """Choices sharded over as many axes as can shard it, one dim rather than several: that is gathered at once."""
    return batch_split(formulation, lambda layout: 10 * len(cut_axes(layout)) - len(_cut_dims(layout)))


def hybrid_sharded(formulation: Formulation) -> Keep | str:
    """Choices sharded over the last axis, replicated over the others."""
    axes = used_axes(formulation)
    if len(axes) < 2:
        return f"it needs two mesh axes, one to copy weights over and one to cut them over: {formulation.mesh} has one"
    return batch_split(
        formulation, lambda layout: sum((axis == axes[-1]) == (axis in cut_axes(layout)) for axis in axes)
    )


def batch_split(formulation: Formulation, stored_best: Rank, *, sharded: bool = True) -> Keep | str:
    """Choices with the batch sharded over all axes, and weights stored as `stored_best` ranks highest."""
    keep = with_batch(formulation, used_axes(formulation), sharded=sharded)
    if isinstance(keep, str):
        return keep
    for n, site in enumerate(formulation.sites):
        if site.kind == "parameter":
            best = max(map(stored_best, site.layouts))
            note(keep, n, [s for s, layout in enumerate(site.layouts) if stored_best(layout) == best], site)
    if sharded:
        _cast_as_stored(formulation, keep)
    return keep


def _cast_as_stored(formulation: Formulation, keep: dict[int, list[int]]) -> None:
    """Cast weights where they are stored, so that all of a block are gathered in the precision of their use: those that
    nothing reads uncast, unlike a tied embedding. Over axes that replicate them their gradients pass the cast as
    partial sums, and are summed with others', once a bucket."""
    graph, sites = formulation.graph, formulation.sites
    stored = {
        site.name: {_stored(site.layouts[s]) for s in keep.get(n, range(len(site.layouts)))}
        for n, site in enumerate(sites)
        if site.kind == "parameter"
    }
    for n, site in enumerate(sites):
        if site.kind != "op" or not _casts_weight(formulation, site):
            continue
        weight = graph.by_op[site.name].operands[0] or ""
        if len(graph.consumers[weight]) > 1:
            continue
        layouts = stored.get(weight, set())
        read = {s: site.strategies[s].operands[0] for s in keep.get(n, range(len(site.strategies)))}
        fitting = [s for s, layout in read.items() if layout and _stored(layout) in layouts]
        summed = {s: _partial_gradients(layout) for s, layout in read.items() if s in fitting and layout}
        note(keep, n, [s for s in fitting if summed[s] == max(summed.values())], site)


def _partial_gradients(layout: Layout) -> int:
    return layout.placements.count(REPLICATE_PARTIAL)


def _stored(layout: Layout) -> Part:
    """Layout of a stored weight; whose gradients are partial does not count."""
    return tuple(placement if isinstance(placement, Shard) else REPLICATE for placement in layout.placements)


def with_batch(formulation: Formulation, axes: Sequence[int], *, sharded: bool) -> dict[int, list[int]] | str:
    """Choices in which `axes` shard the batch in every input and every operator that it reaches, and nothing else: what
    an operator reads lies on them as it was made. An operator that can't keep to that is left free.

    `sharded`: weights may be cast as they are stored, so that shards are gathered in the precision they are used in. A
    sentence if no input can be sharded so. An input is of the batch if its dim 0 is as long as that of most inputs.
    """
    graph = formulation.graph
    keep: dict[int, list[int]] = {}
    parts_of: dict[str, Parts] = {parameter.tensor: frozenset([_whole(axes)]) for parameter in graph.parameters}
    known: Known = {}
    lengths = Counter(graph.tensor(name).shape[0] for name in graph.inputs if graph.tensor(name).shape)
    batch = max(lengths, key=lambda length: lengths[length], default=0)
    split = False
    for n, site in enumerate(formulation.sites):
        if site.kind == "input" and graph.tensor(site.name).shape[:1] == (batch,):
            fitting = [s for s, layout in enumerate(site.layouts) if [a for a, _ in layout.shards(0)] == list(axes)]
            split |= bool(fitting)
            note(keep, n, fitting, site)
            parts_of[site.name] = frozenset(_part(site.layouts[s], axes) for s in fitting)
        elif site.kind == "op" and sharded and _casts_weight(formulation, site):
            note(keep, n, [s for s, strategy in enumerate(site.strategies) if not _sums(strategy)], site)
            parts_of[formulation.graph.by_op[site.name].results[0]] = frozenset([_whole(axes)])  # gathered after it
        elif site.kind == "op":
            note(keep, n, _as_produced(graph.by_op[site.name], site, axes, parts_of, known), site)
    if axes and not split:
        over = "x".join(str(formulation.mesh.sizes[axis]) for axis in axes)
        return f"no input of {batch} samples can be split over {over} devices"
    return keep


def _casts_weight(formulation: Formulation, site: Site) -> bool:
    op = formulation.graph.by_op[site.name]
    return op.target == CAST and op.operands[0] in formulation.graph.weights


def _sums(strategy: Strategy) -> bool:
    """Is what it reads a partial sum? A weight in shards would be padded with zeros for that, and never gathered."""
    return any(layout is not None and PARTIAL in layout.placements for layout in strategy.operands)


def _as_produced(op: Op, site: Site, axes: Sequence[int], parts_of: dict[str, Parts], known: Known) -> list[int]:
    """The strategies that read everything as it was made, as far as that is known; notes what they make.

    What is made of no input and no weight, as a mask is, can be made in any way. `known`: answers for equal operators.
    """
    read = tuple(parts_of.get(name) if name is not None else None for name in op.operands)
    key = (id(site.strategies), read)
    if key not in known:
        fitting = [s for s, strategy in enumerate(site.strategies) if _reads(strategy.operands, read, axes)]
        parts = [frozenset(_part(site.strategies[s].results[r], axes) for s in fitting) for r in range(len(op.results))]
        known[key] = fitting, parts
    fitting, parts = known[key]
    if fitting and any(operand is not None for operand in read):
        parts_of.update(zip(op.results, parts, strict=True))
    return fitting


def _reads(layouts: Sequence[Layout | None], read: Sequence[Parts | None], axes: Sequence[int]) -> bool:
    pairs = zip(layouts, read, strict=True)
    return all(parts is None or layout is None or _part(layout, axes) in parts for layout, parts in pairs)


def _part(layout: Layout, axes: Sequence[int]) -> Part:
    """Layout on some of the axes; whose gradients are partial does not count."""
    return tuple(
        REPLICATE if placement == REPLICATE_PARTIAL else placement
        for placement in (layout.placements[axis] for axis in axes)
    )


def _whole(axes: Sequence[int]) -> Part:
    return (REPLICATE,) * len(axes)


def note(keep: dict[int, list[int]], node: int, fitting: list[int], site: Site) -> None:
    """Record in `keep` the choices that fit, if only some of them do."""
    if fitting and len(fitting) < len(site.strategies or site.layouts):
        keep[node] = fitting


def used_axes(formulation: Formulation) -> list[int]:
    """The axes of more than one device."""
    return [axis for axis, size in enumerate(formulation.mesh.sizes) if size > 1]


def cut_axes(layout: Layout) -> list[int]:
    return [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Shard)]


def _cut_dims(layout: Layout) -> set[int]:
    return {placement.dim for placement in layout.placements if isinstance(placement, Shard)}
