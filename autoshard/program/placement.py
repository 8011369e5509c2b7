"""Which place runs which operator, and the parts that a model placed by its modules falls into.

An operator belongs to the innermost module around it that has a place. One without goes where the first of its operands
is made, and where all that it reads is the model's own inputs, where it is first read: values travel least so.
A part is a run of operators on one place that waits for nothing in between, so that parts in their order form a DAG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.plan import StagePart


def placed_parts(graph: Graph, places: Sequence[tuple[str, int]]) -> tuple[StagePart, ...]:
    """The parts, each after all that it reads. UsageError for a module that is not there, or a place without work."""
    place_of = op_places(graph, dict(places))
    used = set(place_of)
    empty = [place for place in range(max(used) + 1) if place not in used]
    if empty:
        told = f"worker {empty[0]} has no operator: modules are placed on {', '.join(map(str, sorted(used)))}"
        raise UsageError(told, "ranks from 0 on without a gap")
    counts: dict[int, int] = {}
    found = []
    for place, ops in _runs(graph, place_of):
        chunk = counts[place] = counts.get(place, -1) + 1
        found.append(StagePart(place, chunk, ops[0], ops))
    return tuple(found)


def op_places(graph: Graph, places: Mapping[str, int]) -> list[int]:
    """The place of each operator of the graph. UsageError for a path without an operator."""
    for path in places:
        if not any(_within(op.module, path) for op in graph.ops):
            raise UsageError(f"place of {path or 'the model'}: no operator is in that module", "autoshard trace MODEL")
    found: list[int | None] = [_given(op.module, places) for op in graph.ops]
    made: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        own = found[i]
        if own is None:
            own = found[i] = next((made[name] for name in op.operands if name in made), None)
        if own is not None:
            made |= dict.fromkeys(op.results, own)
    read: dict[str, int] = {}
    for i in reversed(range(len(found))):
        op, own = graph.ops[i], found[i]
        if own is None:
            own = found[i] = next((read[name] for name in op.results if name in read), 0)
        read |= {name: own for name in op.operands if name is not None}
    return [own or 0 for own in found]


def _given(module: str, places: Mapping[str, int]) -> int | None:
    around = max((path for path in places if _within(module, path)), key=len, default=None)
    return None if around is None else places[around]


def _within(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def _runs(graph: Graph, place_of: Sequence[int]) -> list[tuple[int, tuple[str, ...]]]:
    """(place, its operators) one after another, each run as long as what it waits for allows.

    Greedy: all that is ready on one place is taken, then the place goes on whose next operator is the first of the
    model. Alternating places so give one part each per dependency, not one per change in the model's text.
    """
    maker = {name: i for i, op in enumerate(graph.ops) for name in op.results}
    waits = [{maker[name] for name in op.operands if name in maker} for op in graph.ops]
    done: set[int] = set()
    left = {place: [i for i, own in enumerate(place_of) if own == place] for place in set(place_of)}
    found: list[tuple[int, tuple[str, ...]]] = []
    while any(left.values()):
        ready = {place: next((i for i in own if waits[i] <= done), None) for place, own in left.items()}
        place = min((i, place) for place, i in ready.items() if i is not None)[1]
        taken = []
        for i in left[place]:
            if waits[i] <= done:
                done.add(i)
                taken.append(i)
        left[place] = [i for i in left[place] if i not in done]
        found.append((place, tuple(graph.ops[i].name for i in taken)))
    return found
