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
    """Lines of what is communicated: `input add_2: all-reduce over tp, 3 MiB, 22 us`; not slices, masks and pads.

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
    stored = {entry.tensor: entry.path for entry in (*graph.parameters, *graph.buffers)}
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
        for action, where, step_axes in (
            (step.forward, "", step.axes), (step.backward, " in gradient buckets", later),
            (step.backward, " in backward", [axis for axis in step.axes if axis not in later]),
        ):  # fmt: skip
            if action and action not in LOCAL and step_axes and (differentiable or not where):
                axes.setdefault(f"{COLLECTIVES[action].words} over {{}}{where}", []).append("+".join(step_axes))
    return ", ".join(text.format(" and ".join(names)) for text, names in axes.items())


def move_cost(moves: Sequence[RedistributionPlan], graph: Graph, mesh: Mesh) -> str:
    """`3 MiB, 22 us`: bytes of the largest buffer of each on one device, seconds forward and backward."""
    size = format_bytes(sum(moved_bytes(move, graph, mesh) for move in moves), 3)
    return f"{size}, {format_seconds(sum(move.forward_seconds + move.backward_seconds for move in moves), 3)}"


def moved_bytes(move: RedistributionPlan, graph: Graph, mesh: Mesh) -> float:
    """Bytes of the largest collective of a move, as a simulated event counts them: on one device."""
    tensor, layout, most = graph.tensor(move.tensor), move.source, 0.0
    differentiable = graph.loss is not None and tensor.requires_grad
    for plan_step in move.steps:
        step = _step(plan_step, mesh)
        after = step.applied(layout)
        sizes = [activation_bytes(tensor, one, mesh) for one in (layout, after)]
        forward, backward = messages(step, mesh)
        most = max(
            most,
            forward.full_bytes(*sizes) if plan_step.forward not in ("", *LOCAL) else 0.0,
            backward.full_bytes(*sizes) if differentiable and plan_step.backward not in ("", *LOCAL) else 0.0,
        )
        layout = after
    return most


def _step(plan_step: PlanStep, mesh: Mesh) -> Step:
    before, after = (tuple(map(parse_placement, side)) for side in (plan_step.before, plan_step.after))
    return Step(tuple(map(mesh.index, plan_step.axes)), before, after, plan_step.forward, plan_step.backward)


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
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[float, bool]]] = {}
    for event in timeline.events:
        if event.collective:
            groups.setdefault((event.collective, event.axes), []).append((event.bytes, event.instruction is None))
    return {
        key: CollectiveCount(
            len(calls), len({size for size, _ in calls}), sum(s for s, _ in calls), sum(b for _, b in calls)
        )
        for key, calls in groups.items()
    }


def collective_words(timeline: Timeline, step: str = "step") -> str:
    """`52 a step over 2 groups, on 2 streams: 48 all-reduce tp, 4 all-reduce dp (gradient buckets)`; "" without any."""
    counts = collective_counts(timeline)
    kinds = [
        f"{count.calls} {COLLECTIVES[kind].words} {'+'.join(axes)}{_in_buckets(count)}"
        for (kind, axes), count in counts.items()
    ]
    total = sum(count.calls for count in counts.values())
    return f"{total} a {step} over {group_words(counts)}: {', '.join(kinds)}" if counts else ""


def group_words(counts: dict[tuple[str, tuple[str, ...]], CollectiveCount]) -> str:
    """`2 groups, on 2 streams`."""
    groups, streams = {axes for _, axes in counts}, {axis for _, axes in counts for axis in axes}
    return f"{counted(len(groups), 'group')}, on {counted(len(streams), 'stream')}"


def _in_buckets(count: CollectiveCount) -> str:
    words = "gradient buckets" if count.buckets == count.calls else counted(count.buckets, "gradient bucket")
    return f" ({words})" if count.buckets else ""
