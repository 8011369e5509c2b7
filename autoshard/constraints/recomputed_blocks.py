"""Modules that backward can recompute: those that the code of a plan calls, each with all its operators in a row."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.program.module_scopes import CONTAINERS, Scopes, inside, without_call
from autoshard.program.stage_programs import stage_programs


def called_modules(graph: Graph, path: str) -> tuple[str, ...]:
    """Modules that are recomputed for block `path`: itself; for a list of modules, which nothing calls, those in it
    that make several operators, in the order of their calls."""
    classes = dict(graph.modules)
    if classes.get(path) not in CONTAINERS:
        return (path,)
    counts: dict[str, int] = {}
    for op in graph.ops:
        if inside(op.module, path):
            module = _outermost_call(op.module, path, classes)
            counts[module] = counts.get(module, 0) + 1
    return tuple(module for module, count in counts.items() if count > 1 and module)


def _outermost_call(module: str, path: str, classes: dict[str, str]) -> str:
    """Outermost module around `module`, inside list `path`, that is no list; "" without one."""
    names = module.removeprefix(f"{path}.").split(".")
    paths = [f"{path}.{'.'.join(names[: n + 1])}" for n in range(len(names))]
    return next((outer for outer in paths if outer in classes and classes[outer] not in CONTAINERS), "")


def torn_modules(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Modules recomputed by `plan` that are called more than once, by other code each time."""
    often = [path for path in plan.step.keeps if _runs(graph, path) > 1]
    if not often:
        return ()
    whole = lower(replace(plan, step=replace(plan.step, recompute=())), graph)  # with them it would be refused
    program = replace(whole, step=plan.step)
    torn = {path for part in stage_programs(program, plan) for path in without_call(part.once(Scopes), often)}
    return tuple(path for path in often if path in torn)


def _runs(graph: Graph, path: str) -> int:
    """Number of runs in which operators of module `path` follow each other."""
    within = groupby(graph.ops, key=lambda op: op.module == path or inside(op.module, path))
    return sum(in_module for in_module, _ in within)
