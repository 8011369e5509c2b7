"""Of the strategies and redistributions that a model offers: which were executed, and plans that execute them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autoshard import costs, redistribute, solvers
from autoshard.cluster.hardware import Hardware
from autoshard.errors import InfeasibleError
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph, Tensor
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.problem import Integers, Problem
from autoshard.ir.program import Program
from autoshard.search import build_plan
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_styles import plan_of_choice
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.heuristics import random_plans
from autoshard.verification.coverage import BUCKET, plan_kinds, program_kinds, step_kind, strategy_kinds


@dataclass(frozen=True)
class Coverage:
    """Kinds by name. What was executed but not offered does not count."""

    offered: frozenset[str]
    executed: frozenset[str]

    @property
    def missing(self) -> list[str]:
        return sorted(self.offered - self.executed)

    def __or__(self, other: Coverage) -> Coverage:
        return Coverage(self.offered | other.offered, self.executed | other.executed)

    def __str__(self) -> str:
        missing = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        return f"{len(self.offered & self.executed)} of {len(self.offered)} kinds executed{missing}"


def strategy_coverage(formulation: Formulation, plans: Iterable[Plan]) -> Coverage:
    """Of the strategies of every op, on the formulation's graph and mesh. The plans are those that ran."""
    graph, mesh = formulation.graph, formulation.mesh
    offered: set[str] = set()
    for site in formulation.sites:
        if site.kind == "op":
            for strategy in site.strategies:
                offered |= set(strategy_kinds(graph, graph.by_op[site.name], strategy, mesh))
    executed = {kind for plan in plans for kind in plan_kinds(plan, graph)}
    return Coverage(frozenset(offered), frozenset(executed))


def redistribution_coverage(formulation: Formulation, programs: Iterable[Program]) -> Coverage:
    """Of the steps on the cheapest ways between all the layouts that producers leave and consumers need."""
    executed = {kind for program in programs for kind in program_kinds(program)}
    return Coverage(frozenset(_offered_steps(formulation)), frozenset(executed))


def _offered_steps(formulation: Formulation) -> set[str]:
    graph, mesh = formulation.graph, formulation.mesh
    kinds = {BUCKET} if graph.loss is not None and mesh.size > 1 else set()
    seen = set()
    for site in formulation.values:
        tensor = graph.tensor(site.tensor)
        key = (costs.moving_facts(graph, tensor), site.sources, site.targets)
        if not site.tied and key not in seen:
            kinds |= _step_kinds(formulation, tensor, site.sources, site.targets)
            seen.add(key)
    return kinds


@lru_cache(maxsize=4096)
def _step_kinds(
    formulation: Formulation, tensor: Tensor, sources: tuple[Layout, ...], targets: tuple[Layout, ...]
) -> set[str]:
    """The kinds of steps on the cheapest ways from these sources to these targets."""
    terms = costs.moving_terms(
        formulation.hardware, formulation.mesh, formulation.graph, tensor, formulation.context.all_to_all
    )
    steps = redistribute.steps_between(sources, targets, terms)
    return {step_kind(tensor.shape, layout, step, formulation.mesh) for layout, step in steps}


# --- plans made to execute a kind -----------------------------------------------------------------------------------

Pins = dict[int, Integers]  # node of the problem -> the choices it may take


def forced_plan(formulation: Formulation, kind: str) -> Plan | None:
    """The best plan that executes `kind`; None where no op, and no pair of nodes, forces it."""
    pins = _forcing_op(formulation, kind) if ":" in kind else _forcing_pair(formulation, kind)
    if pins is None:
        return None
    nodes = list(formulation.problem.nodes)
    for node, choices in pins.items():
        seconds = np.full_like(nodes[node].seconds, np.inf)
        seconds[choices] = nodes[node].seconds[choices]
        nodes[node] = replace(nodes[node], seconds=seconds)
    solution = solvers.solve(replace(formulation.problem, nodes=tuple(nodes)))
    origin = build_plan.Origin(formulation.graph.source)
    plan = build_plan.plan_of(formulation, solution, origin, formulation.problem.capacity_bytes, f"forced: {kind}")
    return build_plan.priced(plan, formulation.graph, formulation.hardware)


def _forcing_op(formulation: Formulation, kind: str) -> Pins | None:
    graph, mesh = formulation.graph, formulation.mesh
    for node, site in enumerate(formulation.sites):
        op = graph.by_op[site.name] if site.kind == "op" else None
        kinds = [set(strategy_kinds(graph, op, s, mesh)) if op else set() for s in site.strategies]
        strategies = np.flatnonzero([kind in op_kinds for op_kinds in kinds])
        if len(strategies):
            return {node: strategies}
    return None


def _forcing_pair(formulation: Formulation, kind: str) -> Pins | None:
    """A producer and a consumer between whose choices a step of `kind` is made."""
    for value, site in zip(formulation.problem.values, formulation.values, strict=True):
        tensor = formulation.graph.tensor(site.tensor)
        if site.tied or kind not in _step_kinds(formulation, tensor, site.sources, site.targets):
            continue
        for i, source in enumerate(site.sources):
            for j, target in enumerate(site.targets):
                if not _may_step(source, target, kind):
                    continue
                users = [(c, np.flatnonzero(t == j)) for c, t in zip(value.consumers, value.targets, strict=True)]
                users = [(consumer, choices) for consumer, choices in users if len(choices)]
                if users and kind in _step_kinds(formulation, tensor, (source,), (target,)):
                    return {value.producer: np.flatnonzero(value.source == i), users[0][0]: users[0][1]}
    return None


def _may_step(source: Layout, target: Layout, kind: str) -> bool:
    """Does an axis go from one to the other as `kind` says? A quick test before the way is worked out."""
    if kind.startswith(redistribute.BY_INDEX):
        shards = [p for p in (*source.placements, *target.placements) if isinstance(p, Shard)]
        blocked = any((shard.blocks, shard.unit) != (1, 1) for shard in shards)
        return source != target and (blocked or "blocked" not in kind)
    pairs = zip(source.placements, target.placements, strict=True)
    return any(x != y and kind.startswith(f"{redistribute.kind(x)} -> {redistribute.kind(y)}") for x, y in pairs)


def covering_plans(
    graph: Graph, mesh: Mesh, hardware: Hardware, seed: int, *, origin: Origin | None = None
) -> list[Plan]:
    """A few valid plans that together use every strategy that every *different* op of the graph offers."""
    formulation = formulate(PlanningContext(graph, mesh, hardware))
    wanted = _different_ops(formulation)
    choices = _cover(formulation.problem, seed, wanted)
    return [plan_of_choice(formulation, choice, origin, f"cover:{seed}.{i}") for i, choice in enumerate(choices)]


def _different_ops(formulation: Formulation) -> list[int]:
    """One node for each different (target, strategies) among the ops."""
    seen: dict[tuple[object, ...], int] = {}
    for node, site in enumerate(formulation.sites):
        if site.kind == "op":
            op = formulation.graph.by_op[site.name]
            seen.setdefault((op.target, tuple(map(str, site.strategies))), node)
    return list(seen.values())


def _cover(problem: Problem, seed: int, wanted: Sequence[int]) -> list[Choice]:
    """Few choices that together use every strategy of the nodes `wanted` that any valid choice can use."""
    generator = np.random.default_rng(seed)
    open_ = {n: set(range(len(problem.nodes[n].seconds))) for n in wanted}
    choices: list[Choice] = []
    while any(open_.values()):
        costs = [generator.random(len(node.seconds)) / (2.0 * len(problem.nodes)) for node in problem.nodes]
        for n, strategies in open_.items():
            costs[n][sorted(strategies)] -= 1.0  # one more strategy covered outweighs all random costs together
        choice, exact = random_plans._cheapest(problem, costs, {})
        covered = [n for n, strategies in open_.items() if choice[n] in strategies]
        if not covered:
            return choices if exact else choices + _each_alone(problem, seed, open_)
        for n in covered:
            open_[n].discard(choice[n])
        choices.append(choice)
    return choices


def _each_alone(problem: Problem, seed: int, left: Mapping[int, set[int]]) -> list[Choice]:
    choices: list[Choice] = []
    for n, s in [(node, strategy) for node in sorted(left) for strategy in sorted(left[node])]:
        if not any(choice[n] == s for choice in choices):
            with suppress(InfeasibleError):
                choices.append(random_plans.forced(problem, {n: s}, seed))
    return choices
