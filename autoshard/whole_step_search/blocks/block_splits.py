"""Splits of all blocks over the devices of one model replica: the least time, and less memory for it.

The replica's mesh has the axis tp, and a second one if it is offered (cp or ep, see context_expert_axes.py); replicas
(dp) each take other samples and are priced separately. Parameters are stored as they are used: sharding of weights and
optimizer state over the replicas is a separate choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.errors import InfeasibleError
from autoshard.formulation.fewer_choices import Keep, narrowed
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph
from autoshard.ir.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.problem import Floats, Node, Problem, Value
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.search.build_plan import Origin, plan_of
from autoshard.solvers.common.result import Solution
from autoshard.solvers.common.solver_options import Options
from autoshard.styles.known_styles import STYLES
from autoshard.whole_step_search.blocks.block_pins import NOTHING_SAID, Left, pins_together, style_refused
from autoshard.whole_step_search.blocks.context_expert_axes import second_cuts

STYLE = "megatron-sp"  # tried beside what is searched
OF_STYLE = {  # of what --strategy says, the styles inside a replica
    "dp": ("dp",),
    "fsdp": ("dp",),
    "megatron": ("megatron",),
    "megatron-sp": ("megatron-sp",),
    "fsdp-tp": ("megatron", "megatron-sp"),
}
ONCE = 1 / 16  # of the seconds of what a step does once, however many micro-batches it has


@dataclass(frozen=True, eq=False)
class BlockSplit:
    """Plan and program of the short graph on the mesh of one replica. `name` says how it was found, `left` what pins
    left of it."""

    name: str
    plan: Plan
    program: Program
    graph: Graph
    mesh: Mesh
    left: Left = NOTHING_SAID


@dataclass(frozen=True)
class SplitRequest:
    """Request to every split in addition to pins: a style of OF_STYLE for whatever no pin decides, and whether
    all-to-all exchanges are allowed."""

    style: str = ""
    all_to_all: bool = True


def block_splits(
    graph: Graph, mesh: Mesh, hardware: Hardware, left: Left = NOTHING_SAID, request: SplitRequest | None = None
) -> tuple[BlockSplit, ...]:
    """Different splits of `graph` over the devices of a replica; the first is the fastest by the sum of costs. `left`:
    choices that pins leave. PinRefused if no split satisfies `left` and `request`."""
    request = request or SplitRequest()
    cuts = second_cuts(graph, mesh)
    whole = _stored_as_used(formulate(PlanningContext(graph, mesh, hardware, all_to_all=request.all_to_all), cuts))
    splits: list[BlockSplit] = []
    for title, base in _in_styles(whole, request.style, left):
        pinned = base if left == NOTHING_SAID else left.narrowed(base)
        choices = _choices(pinned, title, with_style=not request.style)
        solutions = [(name, Solution(pinned.problem, choice, 0.0, "auto")) for choice, name in choices.items()]
        splits += [replace(_split(name, pinned, solution, graph, mesh), left=left) for name, solution in solutions]
    if not splits and left == NOTHING_SAID and not request.style:
        raise InfeasibleError(f"the blocks have no split on {mesh}", "another mesh, or other sizes of the model")
    if not splits:
        raise pins_together(f"on {mesh} no plan keeps them in which weights are stored as they are used")
    return tuple(splits)


def _choices(whole: Formulation, title: str, with_style: bool) -> dict[tuple[int, ...], str]:
    """Different choices of a formulation, each with how it was found. `with_style`: also that of a known style."""
    first = _solved(whole)
    if first is None:
        return {}
    names = {first.choice: title or "least time"}
    for name, formulation, keep in _variants(whole, first, with_style) if whole.mesh.size > 1 else ():
        if (solution := _solved(formulation)) is not None:
            choice = tuple(int(keep[n][s]) if n in keep else s for n, s in enumerate(solution.choice))
            names.setdefault(choice, f"{title}, {name}" if title else name)
    return names


def _solved(formulation: Formulation) -> Solution | None:
    try:
        return solvers.solve(formulation.problem, "auto", Options(rough=True))
    except InfeasibleError:
        return None


def _in_styles(whole: Formulation, style: str, left: Left) -> Iterator[tuple[str, Formulation]]:
    """Pairs (title, `whole` in a style) for each style asked for; what pins decide stays free. PinRefused if no style
    is possible."""
    if not style:
        yield "", whole
        return
    named, why = dict(left.ops), list[str]()
    for name in OF_STYLE[style]:
        keep = STYLES[name].keep(whole)
        if isinstance(keep, str):
            why.append(keep)
            continue
        ops = {n: whole.sites[n].name for n in keep if whole.sites[n].kind == "op"}  # weights are stored as used
        yield STYLES[name].title, narrowed(whole, {n: keep[n] for n, op in ops.items() if op not in named})
    if len(why) == len(OF_STYLE[style]):
        raise style_refused(style, why[0])


def _split(name: str, formulation: Formulation, solution: Solution, graph: Graph, mesh: Mesh) -> BlockSplit:
    plan = plan_of(formulation, solution, Origin(graph.source), float("inf"), "search")
    return BlockSplit(name, plan, lower(plan, graph), graph, mesh)


def _variants(whole: Formulation, fastest: Solution, with_style: bool) -> Iterator[tuple[str, Formulation, Keep]]:
    """Triples (name, a formulation, choices that remain for restricted nodes)."""
    priced = _with_memory(whole.problem, fastest.objective / max(fastest.peak_bytes, 1.0))
    yield "its bytes worth its seconds", replace(whole, problem=priced), {}
    keep = STYLES[STYLE].keep(whole) if with_style else ""
    if not isinstance(keep, str):
        yield STYLES[STYLE].title, narrowed(whole, keep), keep


def _with_memory(problem: Problem, price: float) -> Problem:
    """Problem whose seconds include `price` for each byte kept until backward. Equal arrays stay one object."""
    nodes: dict[object, Floats] = {}
    moved: dict[object, Floats] = {}

    def node(unpriced: Node) -> Node:
        key = id(unpriced.seconds), id(unpriced.bytes)
        if key not in nodes:
            nodes[key] = unpriced.seconds + price * unpriced.bytes
        return replace(unpriced, seconds=nodes[key])

    def value(unpriced: Value) -> Value:
        if not any(stop > problem.horizon // 2 for _, stop in unpriced.intervals):
            return unpriced
        key = id(unpriced.seconds), id(unpriced.bytes)
        if key not in moved:
            moved[key] = unpriced.seconds + price * unpriced.bytes[None, :]
        return replace(unpriced, seconds=moved[key])

    return replace(problem, nodes=tuple(map(node, problem.nodes)), values=tuple(map(value, problem.values)))


def _stored_as_used(formulation: Formulation) -> Formulation:
    """Formulation in which no weight is gathered for use, and the remaining weight communication, once a step, costs
    little. Gradients summed before they pass a weight's cast are summed for each micro-batch."""
    parameters = {p.tensor for p in formulation.graph.parameters}
    weights = parameters | set(formulation.graph.weights)
    known: dict[object, Floats] = {}
    values = []
    for value, site in zip(formulation.problem.values, formulation.values, strict=True):
        if value.name in weights and not site.tied:
            once = ONCE if value.name in parameters else 1.0
            key = id(value.seconds), site.sources, site.targets, once
            if key not in known:
                same = np.array([[_held(s) == _held(t) for t in site.targets] for s in site.sources])
                known[key] = np.where(same, value.seconds * once, np.inf)
            if np.isfinite(known[key]).any():
                value = replace(value, seconds=known[key])
        values.append(value)
    return replace(formulation, problem=replace(formulation.problem, values=tuple(values)))


def _held(layout: Layout) -> Layout:
    """`layout` of the value alone. A partial gradient does not change the value; and a sum of one device's value and
    zeros elsewhere, as for a bias added to a product, is made of a whole weight in place."""
    whole = (REPLICATE_PARTIAL, PARTIAL)
    return Layout(tuple(REPLICATE if placement in whole else placement for placement in layout.placements))
