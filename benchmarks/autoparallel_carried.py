"""A plan of one tool in the words of the other: autoparallel's as pins, autoshard's as what is left of its choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.constraints.apply_pins import fitting_choices, nodes_of
from autoshard.constraints.pins import parse_pin
from autoshard.errors import InfeasibleError, UsageError
from autoshard.formulation.formulate import Formulation
from autoshard.ir.graph import Graph, Parameter
from autoshard.ir.plan import Plan
from autoshard.ir.problem import Problem
from autoshard.replay.reevaluate import chosen
from autoshard.solvers.common.arc_consistency import Fences
from benchmarks import autoparallel_mapping as mapping
from benchmarks.autoparallel_mapping import Operator, Pair, Placements, Theirs, Wish


@dataclass(frozen=True)
class Carried:
    """`fixed`: what of `choices` the other tool was told; `lacking`: where it offers nothing like it, alone or beside
    the rest. `otherwise`: products of a backward that are split otherwise than their forward."""

    choices: int
    fixed: int
    lacking: int
    otherwise: int = 0


Told = Callable[[str], bool]


def everything(path: str) -> bool:
    return True


def matched(graph: Graph, theirs: Theirs) -> list[Pair]:
    """The operators that both graphs have."""
    ops = [Operator(op.name, op.target, op.module, graph.tensor(op.results[0]).shape) for op in graph.ops]
    return mapping.pairs(ops, theirs.operators.values())


def as_pins(
    formulation: Formulation, theirs: Theirs, pairs: Sequence[Pair], told: Told = everything
) -> tuple[list[str], Carried]:
    """Its plan as pins of those that are offered; what is not pinned autoshard chooses. `told`: of parameters and
    modules, which are pinned."""
    names = formulation.mesh.names
    parameters = [parameter for parameter in formulation.graph.parameters if told(parameter.path)]
    pairs = [pair for pair in pairs if told(pair.op.module)]
    lies = {
        node.name: layouts[choice]
        for node, layouts, choice in zip(theirs.problem.nodes, theirs.layouts, theirs.choice, strict=True)
    }
    found = [mapping.pin("parameter", p.path, lies[_node(theirs, p)], names) for p in parameters]
    otherwise = 0
    for pair in pairs:
        wanted: Placements | None = lies.get(pair.node)
        if pair.products:
            own = {product: mapping.splits(pair.op, product, lies[node]) for product, node in pair.products}
            split = own[mapping.FORWARD]
            otherwise += sum(other != split for other in own.values())
            wanted = mapping.result_of(pair.op, split) if split else None
        found += [mapping.pin("op", pair.op.name, wanted, names)] if wanted else []
    pins = [text for text in found if _offered(formulation, text)]
    return pins, Carried(_count(formulation), len(pins), len(parameters) + len(pairs) - len(pins), otherwise)


def _node(theirs: Theirs, parameter: Parameter) -> str:
    return next(theirs.parameters[path] for path in (parameter.path, *parameter.ties) if path in theirs.parameters)


def _offered(formulation: Formulation, text: str) -> bool:
    """Whether every node that the pin names has a choice that fits."""
    try:
        pin = parse_pin(text, formulation.mesh)
    except UsageError:  # a mean or a maximum in parts
        return False
    return all(fitting_choices(formulation, formulation.sites[n], pin.wants) for n in nodes_of(formulation, pin))


def _count(formulation: Formulation) -> int:
    """Parameters and operators that choose among several."""
    kinds = ("parameter", "op")
    return sum(len(s.strategies or s.layouts) > 1 for s in formulation.sites if s.kind in kinds)


def as_choices(
    formulation: Formulation, plan: Plan, theirs: Theirs, pairs: Sequence[Pair], told: Told = everything
) -> tuple[Problem, Carried]:
    """Its problem with the choices alone that agree with the plan, of the nodes that the plan says something of.
    `told`: of parameters and modules, which count."""
    wanted = _wishes(formulation, plan, theirs, pairs, told)
    kept, _ = mapping.joint([wish for wish in wanted if wish.fits], lambda some: _possible(theirs, some))
    choices = sum(len(node.seconds) > 1 for node in theirs.problem.nodes)
    return _restricted(theirs, kept), Carried(choices, len(kept), len(wanted) - len(kept))


def _wishes(formulation: Formulation, plan: Plan, theirs: Theirs, pairs: Sequence[Pair], told: Told) -> list[Wish]:
    layouts = {
        formulation.sites[n].name: formulation.sites[n].strategies[choice].results[0]
        for n, choice in chosen(plan, formulation).items()
        if formulation.sites[n].kind == "op"
    }
    known = {parameter.path: parameter for parameter in formulation.graph.parameters}
    index = {node.name: i for i, node in enumerate(theirs.problem.nodes)}

    def wish(kind: str, node: str, agrees: Callable[[Placements], bool]) -> Wish:
        own = zip(theirs.layouts[index[node]], theirs.usable[index[node]], strict=True)
        return Wish(kind, node, tuple(s for s, (there, usable) in enumerate(own) if usable and agrees(there)))

    found = []
    for stored in (parameter for parameter in plan.parameters if told(parameter.path)):
        found.append(wish("parameter", _node(theirs, known[stored.path]), mapping.plain(str(stored.layout)).__eq__))
    for pair in (pair for pair in pairs if told(pair.op.module)):
        layout = mapping.plain(str(layouts[pair.op.name]))
        for product, node in pair.products:
            found.append(wish(pair.op.target, node, _splits_alike(pair.op, product, layout)))
        if pair.node:
            found.append(wish(pair.op.target, pair.node, layout.__eq__))
    return found


def _splits_alike(op: Operator, product: str, layout: Placements) -> Callable[[Placements], bool]:
    """Whether a product is split as autoshard's linear is, whose result lies in `layout`."""
    split = mapping.splits_of_result(op, layout)
    return lambda there: split is not None and mapping.splits(op, product, there) == split


def _restricted(theirs: Theirs, wishes: Sequence[Wish]) -> Problem:
    """Equal nodes with equal wishes share their arrays, by which a solver sees what repeats."""
    by_node: dict[str, set[int]] = {}
    for wish in wishes:
        by_node[wish.node] = by_node.get(wish.node, set(wish.fits)) & set(wish.fits)
    shared: dict[object, object] = {}
    nodes = []
    for node in theirs.problem.nodes:
        if node.name in by_node:
            key = id(node.seconds), tuple(sorted(by_node[node.name]))
            if key not in shared:
                allowed = np.isin(np.arange(len(node.seconds)), key[1])
                shared[key] = np.where(allowed, node.seconds, np.inf)
            node = replace(node, seconds=shared[key])
        nodes.append(node)
    return replace(theirs.problem, nodes=tuple(nodes))


def _possible(theirs: Theirs, wishes: Sequence[Wish]) -> bool:
    """As far as pairs tell: no node is left without a choice."""
    try:
        Fences(_restricted(theirs, wishes))
    except InfeasibleError:
        return False
    return True
