"""Search for which place runs which module, if that is left open (`--place auto`): the assignment of the shortest step
found, with a lower bound on that of any.

A unit is what stays together: a leaf module or, of large models, a block, with what rewrites one buffer. Few
assignments are all tried; of many, several starts are improved unit by unit. Seconds are those of the plan's operators,
and messages take what their bytes take on the link between places; the best few are then simulated as the package will
run.

Bound: every micro-batch passes its longest chain of operators once there and back, and K places share all the work:
step >= max(longest chain, micro-batches * work / K, micro-batches * largest unit). Computations alone are counted, so
no simulated step of the package is below it. Where places have meshes of their own, an operator counts as on the place
where it takes least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from autoshard.cluster.hardware import parse_hardware
from autoshard.costs.collective import joint_seconds
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, StagePart, StepPlan
from autoshard.program.lower import lower
from autoshard.program.schedules.placed_parts import components, op_places, parts_on, stored_users
from autoshard.program.weight_buckets import block_of
from autoshard.simulation.step_timeline import PartCosts, PartMessage, StageCosts
from autoshard.simulation.steps.placed_step import PlacedCosts, simulate_places
from autoshard.simulation.working_memory import local_bytes
from autoshard.solvers.common.result import FalseProof
from autoshard.units import ROUNDING

MOST_UNITS = 24  # leaf modules; beyond, blocks: a pass of improvements tries MOST_UNITS x places assignments
MOST_TRIED = 2_000  # assignments, of 12 ms each for Llama of 32 layers on 4 places: half a minute
SIMULATED = 8  # in 45 of 48 trials (4 models, 3 meshes, 2 devices, 1 and 4 micro-batches) the best was one of these


@dataclass(frozen=True)
class PlacedFound:
    """Place of each operator, the seconds of its step, and the lower bound on any assignment."""

    places: tuple[int, ...]
    seconds: float
    bound_seconds: float


def searched_places(
    plan: Plan, graph: Graph, fixed: Sequence[tuple[str, int]], count: int, predicted: Callable[[Plan, Graph], Plan]
) -> PlacedFound:
    """Places found among `count`; `fixed`: modules that a user placed. `plan.step` holds micro-batches and schedule;
    `predicted` simulates a whole step."""
    search = _PlaceSearch(plan, graph, dict(fixed), count)
    fits = [assigned for assigned, seconds in search.tried.items() if seconds < math.inf]
    ranked = sorted(fits, key=lambda assigned: (search.tried[assigned], assigned))
    if not ranked:
        raise UsageError(f"no assignment found in which each of {count} places has work", f"--stages {count - 1}")
    step_times, refused = dict[tuple[int, ...], float](), list[UsageError]()
    for assigned in ranked[:SIMULATED]:
        places = search.op_places(assigned)
        step = replace(plan.step, parts=parts_on(graph, places))
        try:
            step_times[places] = predicted(replace(plan, step=step), graph).step_seconds
        except UsageError as error:  # such as losses that are on places of several meshes
            refused.append(error)
    if not step_times:
        raise refused[0]
    best = min(step_times, key=lambda places: (step_times[places], places))
    if search.bound_seconds > step_times[best] * (1 + ROUNDING):
        raise FalseProof(f"places: a step of {step_times[best]!r} s below its bound of {search.bound_seconds!r} s")
    return PlacedFound(best, step_times[best], search.bound_seconds)


class _PlaceSearch:
    def __init__(self, plan: Plan, graph: Graph, fixed: dict[str, int], count: int) -> None:
        self.plan, self.graph, self.count = plan, graph, count
        pinned = op_places(graph, fixed, unplaced=count)  # no place has that number
        self.units = units_of(graph, pinned)
        own_plans = {place_plan.place: plan.of_place(place_plan) for place_plan in plan.place_plans}
        self.plans = [own_plans.get(place, plan) for place in range(count)]
        self.seconds = [[(op.forward_seconds, op.backward_seconds) for op in each.ops] for each in self.plans]
        self.fixed = [next((pinned[i] for i in unit if pinned[i] < count), None) for unit in self.units]
        places = [range(count) if place is None else (place,) for place in self.fixed]
        of_unit = [*zip(self.units, places, strict=True)]
        self.least = {i: min(sum(self.seconds[place][i]) for place in may) for unit, may in of_unit for i in unit}
        self.tried: dict[tuple[int, ...], float] = {}
        self._search()

    def op_places(self, assigned: Sequence[int]) -> tuple[int, ...]:
        places = [0] * len(self.graph.ops)
        for unit, place in zip(self.units, assigned, strict=True):
            for i in unit:
                places[i] = place
        return tuple(places)

    @cached_property
    def bound_seconds(self) -> float:
        """Lower bound from computations alone, see the module."""
        step, work = self.plan.step, [sum(self.least[i] for i in unit) for unit in self.units]
        longest: dict[int, float] = {}
        maker = {name: i for i, op in enumerate(self.graph.ops) for name in op.results}
        for i, op in enumerate(self.graph.ops):
            before = max((longest[maker[name]] for name in op.operands if name in maker), default=0.0)
            longest[i] = before + self.least[i]
        loss = maker[self.graph.loss or ""]
        return max(longest[loss], step.micro_batches * max(sum(work) / self.count, *work, 0.0))

    def _search(self) -> None:
        open_ = [k for k, place in enumerate(self.fixed) if place is None]
        if self.count ** len(open_) <= MOST_TRIED:
            for places in itertools.product(range(self.count), repeat=len(open_)):
                self._value(self._with(open_, places))
            return
        for start in self._starts(open_):
            best, value = start, self._value(start)
            improved = True
            while improved and len(self.tried) < MOST_TRIED:
                improved = False
                for k, place in itertools.product(open_, range(self.count)):
                    other = (*best[:k], place, *best[k + 1 :])
                    if (other_value := self._value(other)) < value:
                        best, value, improved = other, other_value, True

    def _with(self, open_: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
        assigned = [0 if place is None else place for place in self.fixed]
        for k, place in zip(open_, places, strict=True):
            assigned[k] = place
        return tuple(assigned)

    def _starts(self, open_: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Starts: a split in a row by work, forward and backward over the places; and each unit where it ends first."""
        work = [sum(self.least[i] for i in self.units[k]) for k in open_]
        ends = list(itertools.accumulate(work))
        whole = ends[-1] or 1.0
        pairs = zip(ends, work, strict=True)
        row = [min(self.count - 1, int(self.count * (end - unit_work / 2) / whole)) for end, unit_work in pairs]
        yield self._with(open_, row)
        yield self._with(open_, [self.count - 1 - place for place in row])
        assigned = list(self._with(open_, [0] * len(open_)))
        busy = [0.0] * self.count
        for k, unit_work in zip(open_, work, strict=True):
            assigned[k] = min(range(self.count), key=busy.__getitem__)
            busy[assigned[k]] += unit_work
        yield tuple(assigned)

    def _value(self, assigned: tuple[int, ...]) -> float:
        """Seconds of the step, of the plan's operators and messages; infinite where a place has no work."""
        if assigned not in self.tried:
            used = set(assigned)
            whole = len(used) == self.count
            self.tried[assigned] = self._simulated(assigned) if whole else math.inf
        return self.tried[assigned]

    def _simulated(self, assigned: tuple[int, ...]) -> float:
        step = self.plan.step
        parts = parts_on(self.graph, self.op_places(assigned))
        names = {op.name: i for i, op in enumerate(self.graph.ops)}
        part_of = {op: number for number, part in enumerate(parts) for op in part.ops}
        if self._twice(parts, part_of):
            return math.inf
        maker = {name: part_of[op.name] for op in self.graph.ops for name in op.results}
        costs, sources = [], []
        for number, part in enumerate(parts):
            op_seconds = [self.seconds[part.stage][names[op]] for op in part.ops]
            costs.append(PartCosts(sum(f for f, _ in op_seconds), sum(b for _, b in op_seconds)))
            read = {name for op in part.ops for name in self.graph.ops[names[op]].operands if name in maker}
            sources.append(tuple(sorted((maker[name], self._order[name]) for name in read if maker[name] != number)))
        sizes: dict[tuple[int, int], float] = {}
        for reader, own_sources in enumerate(sources):
            for source, position in own_sources:
                ends = parts[source].stage, parts[reader].stage
                if ends[0] != ends[1]:
                    size = max(self._bytes[self.plans[place].mesh].get(self._names[position], 0.0) for place in ends)
                    sizes[source, reader] = sizes.get((source, reader), 0.0) + size
        messages = tuple(PartMessage(a, b, self._message_seconds(size)) for (a, b), size in sizes.items())
        stages = tuple(part.stage for part in parts)
        loss = maker[self.graph.loss or ""]
        of_places = (StageCosts(),) * self.count
        own_costs = PlacedCosts(
            step.schedule, step.micro_batches, tuple(costs), of_places, (), stages, tuple(sources), messages, loss
        )
        return simulate_places(own_costs).step_seconds

    def _twice(self, parts: Sequence[StagePart], part_of: dict[str, int]) -> bool:
        """True if a place would hold a weight twice, for two of its parts, or places of two meshes hold one."""
        for ops in self._users.values():
            used = {part_of[self.graph.ops[i].name] for i in ops}
            places = {parts[number].stage for number in used}
            if len(used) > len(places) or len({self.plans[place].mesh for place in places}) > 1:
                return True
        return False

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        return stored_users(self.graph)

    @cached_property
    def _names(self) -> list[str]:
        return [name for op in self.graph.ops for name in op.results]

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self._names)}

    @cached_property
    def _bytes(self) -> dict[Mesh, dict[str, float]]:
        """Bytes of each value on one device, by mesh."""
        sizes: dict[Mesh, dict[str, float]] = {}
        for plan in self.plans:
            mesh_sizes = sizes.setdefault(plan.mesh, {})
            for value in () if mesh_sizes else lower(replace(plan, step=StepPlan(), place_plans=()), self.graph).values:
                mesh_sizes.setdefault(value.tensor, local_bytes(value, plan.mesh))
        return sizes

    def _message_seconds(self, size: float) -> float:
        meshes = [plan.mesh for plan in self.plans]
        mean = sum(mesh.size for mesh in meshes) // self.count
        inner = self.plan.mesh.axes if len({*meshes}) == 1 else (("device", mean),)
        return _link_seconds(self.plan.hardware_text, (("pp", self.count), *inner), size)


@cache
def _link_seconds(hardware_text: str, axes: tuple[tuple[str, int], ...], size: float) -> float:
    wide = Mesh(axes)
    return float(joint_seconds(parse_hardware(hardware_text), wide, (0,), "send_receive", size))


def units_of(graph: Graph, pinned: Sequence[int]) -> list[tuple[int, ...]]:
    """Units of operators that share a place, in order of the first; those placed (`pinned`) are with their like."""
    leaves = _units(graph, [(op.module, place) for op, place in zip(graph.ops, pinned, strict=True)])
    if len(leaves) <= MOST_UNITS:
        return leaves
    return _units(graph, [(block_of(op.module) or op.module, p) for op, p in zip(graph.ops, pinned, strict=True)])


def _units(graph: Graph, keys: Sequence[tuple[str, int]]) -> list[tuple[int, ...]]:
    """Runs of operators of one key, with what reads and rewrites one buffer."""
    updated = {buffer for buffer, _ in graph.buffer_updates}
    rewritten = [users for name, users in stored_users(graph).items() if name in updated]
    runs = [[i for i, _ in run] for _, run in itertools.groupby(enumerate(keys), key=lambda pair: pair[1])]
    return components(graph, [*runs, *rewritten])
