"""Sharding propagation in the words of the graph: who decided each choice, and where neighbours disagreed."""

from __future__ import annotations

from dataclasses import replace

from autoshard.constraints.apply_pins import choice_text, label
from autoshard.errors import NAMED
from autoshard.formulation.formulate import Formulation
from autoshard.ir.plan import Plan
from autoshard.search.build_plan import labelled
from autoshard.search.search_task import SearchTask, SolvedLevel
from autoshard.solvers.heuristics.propagation import Conflict, propagate
from autoshard.units import format_seconds

DECIDED = {
    "start": "search",
    "propagated": "propagated",
    "conflict": "propagated (neighbours disagree)",
    "repaired": "propagated (moved to fit)",
}


def propagated(task: SearchTask, result: SolvedLevel) -> SolvedLevel:
    """`result` with who decided each choice, and a note on each of the first few conflicts."""
    last = replace(result.candidates[-1], outcome="chosen")
    result = replace(result, candidates=(*result.candidates[:-1], last))
    problem = replace(task.formulation.problem, capacity_bytes=result.target_bytes)
    message = propagate(problem, task.starts(problem))
    if message.choice != result.levelled.solution.choice:  # of another level's prices
        return result
    by = {n: DECIDED.get(decided, "pin") for n, decided in enumerate(message.decided) if n not in task.fixed}
    lines = [_line(task.formulation, conflict) for conflict in message.conflicts[:NAMED]]
    if len(message.conflicts) > NAMED:
        lines.append(f"and neighbours disagree at {len(message.conflicts) - NAMED} more places")
    plan: Plan = labelled(result.plan, task.formulation, by)
    return replace(result, plan=plan, notes=(*result.notes, *lines))


def _line(formulation: Formulation, conflict: Conflict) -> str:
    """`relu: linear_0 wants Shard(0)@tp, linear_1 Replicate@tp; it took Shard(0)@tp, 3 us more expensive for them`."""
    sites, mesh = formulation.sites, formulation.mesh
    site = sites[conflict.node]
    wanted_by = [
        f"{sites[n].name} wants {choice_text(site, wanted, mesh)}"
        for n, wanted in zip(conflict.neighbours, conflict.wanted, strict=True)
    ]
    taken, extra = choice_text(site, conflict.taken, mesh), format_seconds(sum(conflict.seconds), 3)
    name = label(formulation.graph, site)
    return f"{name}: {', '.join(dict.fromkeys(wanted_by))}; it took {taken}, {extra} more expensive for its neighbours"
