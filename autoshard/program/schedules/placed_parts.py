"""Which place runs which operator, and the parts that a model placed by its modules falls into.

An operator belongs to the innermost module around it that has a place. One without goes where the first of its operands
is made, as MindSpore has it, and to worker 0 where all that it reads is the model's own inputs and weights.
A part is what one place runs between two of its waits, so that parts in their order form a DAG.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.plan import StagePart


def placed_parts(graph: Graph, places: Sequence[tuple[str, int]]) -> tuple[StagePart, ...]:
    """The parts, each after all that it reads. UsageError for a module that is not there, or a place without work."""
    return parts_on(graph, op_places(graph, dict(places)))


def parts_on(graph: Graph, place_of: Sequence[int]) -> tuple[StagePart, ...]:
    """The parts, where each operator of the graph has its place. UsageError for a place without work."""
    used = sorted({*place_of})
    empty = next((place for place, actual in enumerate(used) if place != actual), None)
    if empty is not None:
        message = f"worker {empty} has no operator: modules are placed on {', '.join(map(str, used))}"
        raise UsageError(message, "ranks from 0 on without a gap")
    counts: dict[int, int] = {}
    parts = []
    for place, ops in _runs(graph, place_of):
        chunk = counts[place] = counts.get(place, -1) + 1
        parts.append(StagePart(place, chunk, ops[0], ops))
    return tuple(parts)


def op_places(graph: Graph, places: Mapping[str, int], unplaced: int | None = None) -> list[int]:
    """The place of each operator of the graph; `unplaced`, where given, of those that no module places. UsageError for
    a path without an operator."""
    for path in places:
        if not any(_within(op.module, path) for op in graph.ops):
            near = difflib.get_close_matches(path, sorted({op.module for op in graph.ops}), 1, 0.0)
            raise UsageError(f"place of {path or 'the model'}: no operator is in that module", *near)
    assigned: list[int | None] = [_module_place(op.module, places) for op in graph.ops]
    for group in rewritten(graph):
        first = next((assigned[i] for i in group if assigned[i] is not None), None)
        for i in group:
            assigned[i] = first if assigned[i] is None else assigned[i]
    if unplaced is not None:
        return [unplaced if place is None else place for place in assigned]
    by_value: dict[str, int] = {}
    known = []
    for fixed, op in zip(assigned, graph.ops, strict=True):
        place = fixed if fixed is not None else next((by_value[name] for name in op.operands if name in by_value), 0)
        by_value |= dict.fromkeys(op.results, place)
        known.append(place)
    return known


def _module_place(module: str, places: Mapping[str, int]) -> int | None:
    around = max((path for path in places if _within(module, path)), key=len, default=None)
    return None if around is None else places[around]


def _within(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def _runs(graph: Graph, place_of: Sequence[int]) -> list[tuple[int, tuple[str, ...]]]:
    """(place, its operators), each after all that it reads.

    The level of an operator is how often the longest way to it goes from place to place. What one place has of one
    level waits for the same messages, so it is one part; parts of one level wait for none of each other, and run at the
    same time: two towers, say, on two places.
    """
    units = _units(graph, place_of)
    unit_of = {i: number for number, unit in enumerate(units) for i in unit}
    place = [place_of[unit[0]] for unit in units]
    waits: dict[int, set[int]] = {number: set() for number in range(len(units))}
    for maker, reader in graph.once(_edges):
        if unit_of[maker] != unit_of[reader]:
            waits[unit_of[reader]].add(unit_of[maker])
    levels: dict[int, int] = {}
    for number in TopologicalSorter(waits).static_order():
        here = place[number]
        levels[number] = max((levels[other] + (place[other] != here) for other in waits[number]), default=0)
    data = {unit_of[i] for i, op in enumerate(graph.ops) if not set(op.operands).isdisjoint(graph.inputs)}
    _delay_weights(place, waits, data, levels)
    groups: dict[tuple[int, int], list[int]] = {}
    for number in levels:
        groups.setdefault((levels[number], place[number]), []).extend(units[number])
    ordered = sorted((level, min(ops), owner, sorted(ops)) for (level, owner), ops in groups.items())
    return [(owner, tuple(graph.ops[i].name for i in ops)) for _, _, owner, ops in ordered]


def _delay_weights(place: Sequence[int], waits: Mapping[int, set[int]], data: set[int], levels: dict[int, int]) -> None:
    """Move what is made of weights and constants alone (rows of a packed projection) to the part of its first reader on
    its place: two parts would hold a sharded weight twice. `data`: units that read inputs. `levels`: in order."""
    readers: dict[int, list[int]] = {}
    for number in levels:
        if not data.isdisjoint(waits[number]):
            data.add(number)
        for other in waits[number]:
            readers.setdefault(other, []).append(number)
    for number in reversed(levels):
        if number in readers and number not in data:
            first = min(levels[reader] - (place[reader] != place[number]) for reader in readers[number])
            if any(levels[reader] == first and place[reader] == place[number] for reader in readers[number]):
                levels[number] = first


def _edges(graph: Graph) -> list[tuple[int, int]]:
    """(maker, reader) of each value between operators."""
    maker = {name: i for i, op in enumerate(graph.ops) for name in op.results}
    return [(maker[name], i) for i, op in enumerate(graph.ops) for name in op.operands if name in maker]


def _units(graph: Graph, place_of: Sequence[int]) -> list[tuple[int, ...]]:
    """Operators that one part must have, by the first: those of a place that read one weight, or read and rewrite one
    buffer, with what lies between them; each other one is alone. What can't stay together, as something of another
    place lies between, comes apart."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name, ops in graph.once(stored_users).items():
        for i in ops:
            groups.setdefault((name, place_of[i]), []).append(i)
    together = [group for group in groups.values() if len(group) > 1]
    while True:
        units = components(graph, together)
        torn = [set(unit) for unit in units if len({place_of[i] for i in unit}) > 1]
        if not torn:
            return units
        together = [group for group in together if not any(part.issuperset(group) for part in torn)]


def rewritten(graph: Graph) -> list[tuple[int, ...]]:
    """Operators that read and rewrite a buffer, with what lies between them: they must be on one place."""
    users, updated = graph.once(stored_users), {buffer for buffer, _ in graph.buffer_updates}
    return [group for group in components(graph, [users[name] for name in updated if name in users]) if len(group) > 1]


def stored_users(graph: Graph) -> dict[str, list[int]]:
    """Parameter or changing buffer -> the operators that read it, or make its new value."""
    stored = {p.tensor for p in graph.parameters} | {buffer for buffer, _ in graph.buffer_updates}
    renewed = {new: buffer for buffer, new in graph.buffer_updates}
    users: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        names = {name for name in op.operands if name in stored} | {renewed[n] for n in op.results if n in renewed}
        for name in sorted(names):
            users.setdefault(name, []).append(i)
    return users


def components(graph: Graph, together: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Groups of operators that no order of parts can separate, if each of `together` is in one part."""
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    pairs = [pair for group in together for a, b in pairwise(group) for pair in ((a, b), (b, a))]
    ends = np.array([*graph.once(_edges), *pairs], dtype=np.int64).reshape(-1, 2)
    links = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(graph.ops),) * 2)
    _, labels = connected_components(links, directed=True, connection="strong")
    groups: dict[int, list[int]] = {}
    for i, label in enumerate(labels.tolist()):
        groups.setdefault(label, []).append(i)
    return sorted(map(tuple, groups.values()))
