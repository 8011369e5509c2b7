"""Other plans worth simulating next to the solver's optimum: the additive model does not know what overlaps.

Each is a way to solve the same problem again: communication that may be hidden made cheaper, the strategies of a known
style only (work is repeated where that is cheapest), the least communication, or the optimum's most expensive choice
forbidden. The name says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from autoshard.errors import InfeasibleError
from autoshard.formulation.fewer_choices import Keep, narrowed
from autoshard.formulation.formulate import Formulation, Site
from autoshard.ir.plan import Parts
from autoshard.ir.problem import Floats, Problem
from autoshard.rules.algebra.strategy import Strategy
from autoshard.search.objectives import Solver, ratio_problem
from autoshard.styles.tensor_styles import splits_tensors

# What is paid of a parameter's redistributions and of the others': gradients are reduced beside the backward of the
# layers before, and the rest is hidden in part. Of GPT-2 on 4 to 64 devices these gave the fastest programs, the first
# most often.
PRICES = (
    ("weights' communication at 1/4, the rest at 1/2", 0.25, 0.5),
    ("weights' communication at 1/2, the rest at 3/4", 0.5, 0.75),
    ("weights' communication at 1/4", 0.25, 1.0),
)
Choice = tuple[int, ...]


def contenders(
    formulation: Formulation, best: Choice, parts: Sequence[Parts], capacity_bytes: float, solver: Solver
) -> Iterator[tuple[str, Choice]]:
    """(name, choice), fastest to find first; infeasible ones are left out. `parts` are those of `best`."""
    stored = _parameters(formulation)
    variants: list[tuple[str, Callable[[], tuple[Problem, Keep]]]] = [
        *((name, partial(_priced, formulation, stored, of_stored, of_others)) for name, of_stored, of_others in PRICES),
        ("least communication and replicated work", lambda: (ratio_problem(formulation), {})),
        ("only Megatron's strategies", lambda: (formulation.problem, _megatron(formulation))),
        ("only whole weights", lambda: (formulation.problem, _whole_weights(formulation))),
        (
            "without the optimum's most expensive choice",
            lambda: (formulation.problem, _without_dearest(formulation, best, parts)),
        ),
    ]
    for name, variant in variants:
        problem, keep = variant()
        small = narrowed(replace(formulation, problem=replace(problem, capacity_bytes=capacity_bytes)), keep)
        try:
            choice = solver(small.problem).choice
        except InfeasibleError:
            continue
        yield name, tuple(int(keep[n][s]) if n in keep else s for n, s in enumerate(choice))


def _priced(
    formulation: Formulation, stored: frozenset[str], of_stored: float, of_others: float
) -> tuple[Problem, Keep]:
    return cheaper(formulation.problem, stored, of_stored, of_others), {}


def cheaper(problem: Problem, stored: frozenset[str], of_stored: float, of_others: float) -> Problem:
    """Problem with redistributions of the values `stored`, and of the others, at these parts of their seconds."""
    scaled: dict[tuple[int, float], Floats] = {}

    def price(seconds: Floats, factor: float) -> Floats:
        key = (id(seconds), factor)
        if key not in scaled:
            scaled[key] = seconds * factor
        return scaled[key]

    values = tuple(
        replace(value, seconds=price(value.seconds, of_stored if value.name in stored else of_others))
        for value in problem.values
    )
    return replace(problem, values=values)


def _parameters(formulation: Formulation) -> frozenset[str]:
    return frozenset(parameter.tensor for parameter in formulation.graph.parameters)


def _fitting(formulation: Formulation, fits: Callable[[Site, Strategy], bool]) -> dict[int, list[int]]:
    """Strategies that fit, at the operators where some but not all do."""
    keep = {}
    for n, site in enumerate(formulation.sites):
        fitting = [s for s, strategy in enumerate(site.strategies) if fits(site, strategy)]
        if fitting and len(fitting) < len(site.strategies):
            keep[n] = fitting
    return keep


def _megatron(formulation: Formulation) -> dict[int, list[int]]:
    return _fitting(formulation, lambda site, strategy: splits_tensors(formulation.graph.by_op[site.name], strategy))


def _whole_weights(formulation: Formulation) -> dict[int, list[int]]:
    """Strategies under which no operator shards a parameter: each is whole where it is used."""
    stored = _parameters(formulation)

    def whole(site: Site, strategy: Strategy) -> bool:
        operands = formulation.graph.by_op[site.name].operands
        used = [layout for name, layout in zip(operands, strategy.operands, strict=True) if name in stored]
        return all(layout is None or not any(layout.shards(dim) for dim in range(8)) for layout in used)

    return _fitting(formulation, whole)


def _without_dearest(formulation: Formulation, best: Choice, parts: Sequence[Parts]) -> dict[int, list[int]]:
    """Choices left once the one with most communication, over all operators with the same choices, is forbidden."""
    totals: dict[tuple[int, int], float] = {}
    for n, site in enumerate(formulation.sites):
        if len(site.strategies) > 1:
            key = (id(formulation.problem.nodes[n].seconds), best[n])
            totals[key] = totals.get(key, 0.0) + parts[n].communication_seconds
    largest = max(totals, key=lambda key: totals[key], default=None)
    nodes = [] if largest is None else _family(formulation, best, largest)
    return {n: [s for s in range(len(formulation.sites[n].strategies)) if s != best[n]] for n in nodes}


def _family(formulation: Formulation, best: Choice, key: tuple[int, int]) -> list[int]:
    nodes = formulation.problem.nodes
    return [n for n in range(len(nodes)) if (id(nodes[n].seconds), best[n]) == key]
