"""Lines about collectives, in the console and the report: those before an operator, and those of a simulated step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.costs.device_bytes import activation_bytes
from autoshard.ir.graph import Graph
from autoshard.ir.layout import parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, PlanStep, RedistributionPlan
from autoshard.program.lower import lower
from autoshard.redistribute import COLLECTIVES, LOCAL, Step, messages
from autoshard.simulation.timeline import Timeline
from autoshard.text.plan_labels import known_of
from autoshard.units import counted, format_bytes, format_seconds


def move_lines(moves: Sequence[RedistributionPlan], plan: Plan, graph: Graph) -> list[str]:
    """What is communicated, a line each: `input add_2: all-reduce over tp, 3 MiB, 22 us`; not slices, masks and pads.

    Parameters and buffers of one op that move alike share a line.
    """
    paths = stored_paths(graph)
    groups: dict[tuple[str, str], list[RedistributionPlan]] = {}
    for move in moves:
        if done := collectives(move, plan, graph):
            groups.setdefault(("" if move.tensor in paths else move.tensor, done), []).append(move)
    lines = []
    for (_, done), group in groups.items():
        names = ", ".join(_moved(move.tensor, paths, graph) for move in group)
        lines.append(f"{names}: {done}, {move_cost(group, graph, plan.mesh)}")
    return lines


def _moved(tensor: str, paths: Mapping[str, str], graph: Graph) -> str:
    """`weight`; the model's own name of its input; `input add_2`, what another operator computed."""
    known = paths.get(tensor, tensor if tensor in graph.inputs else "")
    return known.rpartition(".")[2] or f"input {tensor}"


def stored_paths(graph: Graph) -> dict[str, str]:
    """Tensor of a parameter or buffer, or a cast of a parameter -> its path in the state dict."""
    stored = {own.tensor: own.path for own in (*graph.parameters, *graph.buffers)}
    return stored | {name: stored[parameter] for name, parameter in graph.weights.items()}


def bucketed_axes(plan: Plan, graph: Graph) -> dict[str, tuple[str, ...]]:
    """Tensor of a weight, or a cast of it -> the axes over which its gradient is reduced in a bucket."""
    return known_of(_bucketed_axes, plan, graph)


def _bucketed_axes(plan: Plan, graph: Graph) -> dict[str, tuple[str, ...]]:
    axes = {path: bucket.axes for bucket in lower(plan, graph).gradient_buckets for path in bucket.parameters}
    return {tensor: axes[path] for tensor, path in stored_paths(graph).items() if path in axes}


def collectives(move: RedistributionPlan, plan: Plan, graph: Graph) -> str:
    """`all-reduce over tp and dp`, `all-gather over tp in backward`; empty where every step is local."""
    differentiable = graph.loss is not None and graph.tensor(move.tensor).requires_grad
    bucketed = bucketed_axes(plan, graph).get(move.tensor, ())
    axes: dict[str, list[str]] = {}
    for step in move.steps:
        later = [axis for axis in step.axes if axis in bucketed and not step.forward]
        for action, where, own in (
            (step.forward, "", step.axes), (step.backward, " in gradient buckets", later),
            (step.backward, " in backward", [axis for axis in step.axes if axis not in later]),
        ):  # fmt: skip
            if action and action not in LOCAL and own and (differentiable or not where):
                axes.setdefault(f"{COLLECTIVES[action].words} over {{}}{where}", []).append("+".join(own))
    return ", ".join(text.format(" and ".join(names)) for text, names in axes.items())


def move_cost(moves: Sequence[RedistributionPlan], graph: Graph, mesh: Mesh) -> str:
    """`3 MiB, 22 us`: bytes of the largest buffer of each on one device, seconds forward and backward."""
    size = format_bytes(sum(moved_bytes(move, graph, mesh) for move in moves), 3)
    return f"{size}, {format_seconds(sum(move.forward_seconds + move.backward_seconds for move in moves), 3)}"


def moved_bytes(move: RedistributionPlan, graph: Graph, mesh: Mesh) -> float:
    """Bytes of the largest collective of a move, as a simulated event counts them: on one device."""
    tensor, layout, found = graph.tensor(move.tensor), move.source, 0.0
    differentiable = graph.loss is not None and tensor.requires_grad
    for own in move.steps:
        step = _step(own, mesh)
        after = step.applied(layout)
        sizes = [activation_bytes(tensor, one, mesh) for one in (layout, after)]
        forward, backward = messages(step, mesh)
        found = max(
            found,
            forward.full_bytes(*sizes) if own.forward not in ("", *LOCAL) else 0.0,
            backward.full_bytes(*sizes) if differentiable and own.backward not in ("", *LOCAL) else 0.0,
        )
        layout = after
    return found


def _step(own: PlanStep, mesh: Mesh) -> Step:
    before, after = (tuple(map(parse_placement, side)) for side in (own.before, own.after))
    return Step(tuple(map(mesh.index, own.axes)), before, after, own.forward, own.backward)


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of a kind over one group, in a step: how many, of how many sizes, and their bytes on one device.
    `buckets`: how many of them reduce the gradients of a bucket."""

    calls: int
    sizes: int
    bytes: float
    buckets: int = 0


def collective_counts(timeline: Timeline) -> dict[tuple[str, tuple[str, ...]], CollectiveCount]:
    """(kind, axes of the group) -> their count, in the order of the first."""
    found: dict[tuple[str, tuple[str, ...]], list[tuple[float, bool]]] = {}
    for event in timeline.events:
        if event.collective:
            found.setdefault((event.collective, event.axes), []).append((event.bytes, event.instruction is None))
    return {
        key: CollectiveCount(len(own), len({size for size, _ in own}), sum(s for s, _ in own), sum(b for _, b in own))
        for key, own in found.items()
    }


def collective_words(timeline: Timeline, step: str = "step") -> str:
    """`52 a step over 2 groups, on 2 streams: 48 all-reduce tp, 4 all-reduce dp (gradient buckets)`; "" without any."""
    found = collective_counts(timeline)
    kinds = [
        f"{own.calls} {COLLECTIVES[kind].words} {'+'.join(axes)}{_in_buckets(own)}"
        for (kind, axes), own in found.items()
    ]
    total = sum(own.calls for own in found.values())
    return f"{total} a {step} over {group_words(found)}: {', '.join(kinds)}" if found else ""


def group_words(found: dict[tuple[str, tuple[str, ...]], CollectiveCount]) -> str:
    """`2 groups, on 2 streams`."""
    groups, streams = {axes for _, axes in found}, {axis for _, axes in found for axis in axes}
    return f"{counted(len(groups), 'group')}, on {counted(len(streams), 'stream')}"


def _in_buckets(own: CollectiveCount) -> str:
    words = "gradient buckets" if own.buckets == own.calls else counted(own.buckets, "gradient bucket")
    return f" ({words})" if own.buckets else ""
