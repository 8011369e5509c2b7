"""Seconds that each choice of a node, and each redistribution of a value, occupies every resource of a step.

Rows of all arrays: the resources of the forward, then those of the backward; see `step_resources`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain, combinations

import numpy as np

from autoshard import costs
from autoshard.costs.collective import per_byte_seconds
from autoshard.costs.host_memory import TO_DEVICE, host_tasks
from autoshard.costs.links import axes_by_link
from autoshard.costs.memory_traffic import gradient_dtype
from autoshard.costs.operator import compute_seconds, weight_seconds, with_calls
from autoshard.costs.variants import variant_collectives
from autoshard.formulation.dependency_path import longest
from autoshard.formulation.formulate import Formulation
from autoshard.formulation.joined_gathers import joined_less
from autoshard.formulation.value_redistributions import ValueRedistributions
from autoshard.formulation.weight_tasks import GatheredAgain, WeightTasks, members, weight_tasks
from autoshard.ir.graph import DTYPE_BYTES, Op
from autoshard.ir.layout import Layout, largest_shape
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.problem import Floats
from autoshard.program.early_reductions import LINEARS
from autoshard.program.gradient_buckets import FIRST_BUCKET_BYTES
from autoshard.redistribute.path_costs import (
    AGAIN,
    BACKWARD,
    EXCHANGED,
    FORWARD,
    GATHER,
    PARTS,
    SCATTER,
    SUM,
    Axes,
    PathParts,
    axes_of,
)
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.algebra.variant_record import Call

COMPUTE, PATH, IN_ROW, HOST = "computation", "critical path", "serial execution", "host"
HIDDEN = "hidden by "  # and the name of a link: no resource, but what `slowed_rows` takes off
_FIXED = (COMPUTE, PATH, IN_ROW, HOST)
IN_ORDER = True  # the program waits for each collective but those of weights; with others it is to be False
# Of the seconds of weights' collectives, roughly: what nothing hides, and what they slow of what runs beside them.
EXPOSED = {SUM: 0.15, GATHER: 0.3, SCATTER: 0.15}
Locals = tuple[tuple[LocalTensor | None, ...], tuple[LocalTensor, ...]]


class ResourceTables:
    """Tables made once for each distinct operator, parameter and value. `in_order`: see IN_ORDER. `fused`: the plan
    says which collectives go together."""

    def __init__(self, formulation: Formulation, in_order: bool, fused: bool = False) -> None:
        self.formulation, self.in_order = formulation, in_order
        self.graph, self.mesh, self.hardware = formulation.graph, formulation.mesh, formulation.hardware
        self.groups = axes_by_link(formulation.mesh, formulation.hardware)
        self.names = (*_FIXED, *self.groups, *(HIDDEN + link for link in self.groups))
        self.count = len(self.names)
        self.dispatch_seconds = self.hardware.constant("host.dispatch")
        self.slowdown = self.hardware.constant("overlap.slowdown")
        count = formulation.context.micro_batches
        self.of_step = 1 / count  # what runs once a step, of each micro-batch
        self.in_turn = in_order and count == 1  # each weight is gathered and scattered in turn
        self.together = members(self.graph) if self.in_turn and not fused else {}
        self.parameters = {p.tensor for p in self.graph.parameters}
        problem = formulation.problem
        least = {
            site.name: float(node.seconds.min())
            for site, node in zip(formulation.sites, problem.nodes, strict=True)
            if site.kind == "op"
        }
        self.path = longest(self.graph, least)
        self.known: dict[Hashable, Floats] = {}
        self.ways = ValueRedistributions(formulation, self.together)
        self.tasks: dict[Hashable, WeightTasks] = {}
        self.regathers: dict[Hashable, dict[int, Floats]] = {}
        self.regathered = GatheredAgain(formulation, self.path.needed)
        self.shapes: dict[tuple[tuple[int, ...], Layout], tuple[int, ...]] = {}

    def constants(self) -> Floats:
        table = np.zeros(2 * self.count)
        for backward, issued in enumerate(self._issued()):
            table[self._row(HOST, bool(backward))] = self.dispatch_seconds * issued
        return table

    def _issued(self) -> tuple[int, int]:
        """Number of operators that the host issues, forward and backward, before the last task that surely takes time
        on the device: a step ends with that task, whatever views the host issues after it."""
        ops = [(n, site.name) for n, site in enumerate(self.formulation.sites) if site.kind == "op"]
        nodes = {name: self.node(n)[:, np.isfinite(self.formulation.problem.nodes[n].seconds)] for n, name in ops}
        names = [op.name for op in self.graph.ops if op.name in self.path.needed]
        forward = [bool((nodes[name][self._row(COMPUTE, False)] > 0).all()) for name in names]
        backward = [bool((nodes[name][self._row(COMPUTE, True)] > 0).all()) for name in names][::-1]
        later = [name in self.path.grows for name in reversed(names)]
        updated = self.graph.loss is not None and any(
            bool((node.seconds > 0).all())
            for node, site in zip(self.formulation.problem.nodes, self.formulation.sites, strict=True)
            if site.kind == "parameter"
        )
        there = len(names) if updated or any(backward) else _through_last(forward)
        return there, sum(later if updated else later[: _through_last(backward)])

    def _once(self, key: Hashable, make: Callable[[], Floats]) -> Floats:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def _rows(self, axes: Axes, backward: bool) -> list[int]:
        """Rows that a task over `axes` counts in; without axes, those of a local pass."""
        rows = [_FIXED.index(COMPUTE)] if not axes else [
            len(_FIXED) + i for i, held in enumerate(self.groups.values()) if axes in held
        ]  # fmt: skip
        return [row + self.count * backward for row in rows]

    def _row(self, name: str, backward: bool) -> int:
        return _FIXED.index(name) + self.count * backward

    def _hidden(self, backward: bool) -> slice:
        start = len(_FIXED) + len(self.groups) + self.count * backward
        return slice(start, start + len(self.groups))

    # --- nodes ---

    def node(self, n: int) -> Floats:
        """Table of a node, (2 R, choices)."""
        node, site = self.formulation.problem.nodes[n], self.formulation.sites[n]
        if site.kind == "parameter":
            return self._once(("parameter", id(node.seconds)), lambda: self._stored(node.seconds))
        if site.kind != "op":
            count = len(node.seconds)
            return self._once(count, lambda: np.zeros((2 * self.count, count)))
        facts = (site.name in self.path.on, site.name in self.path.needed)
        key = (id(site.strategies), id(node.seconds), *facts)
        return self._once(key, lambda: self._operator(self.graph.by_op[site.name], site.strategies, *facts))

    def _stored(self, seconds: Floats) -> Floats:
        """Table of a stored tensor: the optimizer, which comes after everything else."""
        table = np.zeros((2 * self.count, len(seconds)))
        table[self.count :] = np.where(np.isinf(seconds), 0.0, seconds)
        table[self._hidden(True)] *= self.slowdown  # for no link is busy meanwhile
        return table

    def _operator(self, op: Op, strategies: Sequence[Strategy], on_path: bool, needed: bool) -> Floats:
        table = np.zeros((2 * self.count, len(strategies)))
        known: dict[object, Floats] = {}
        for s, strategy in enumerate(strategies if needed else ()):
            locals_ = self._locals(op, strategy)
            key = s if strategy.variant or strategy.host else locals_
            if key not in known:
                pricer = self._on_host if strategy.host else self._strategy
                known[key] = pricer(op, strategy, locals_, on_path)
            table[:, s] = known[key]
        return table

    def _on_host(self, op: Op, strategy: Strategy, locals_: Locals, on_path: bool) -> Floats:
        """Table of an operator on the host: the device waits; meanwhile the host issues only its transfers up."""
        table = np.zeros(2 * self.count)
        phases = host_tasks(self.hardware, self.graph, op, *locals_, strategy.variant)
        for backward, tasks in enumerate(phases):
            seconds = sum(task.seconds for task in tasks)
            table[self._row(IN_ROW, bool(backward))] = seconds
            table[self._row(PATH, bool(backward))] = seconds if on_path else 0.0
            table[self._row(HOST, bool(backward))] = sum(task.seconds for task in tasks if task.what != TO_DEVICE)
        return table

    def _strategy(self, op: Op, strategy: Strategy, locals_: Locals, on_path: bool) -> Floats:
        table = np.zeros(2 * self.count)
        operands, results = locals_
        times = compute_seconds(self.hardware, self.graph, op, operands, results, strategy.variant)
        inside = variant_collectives(self.mesh, op, strategy.variant, operands, strategy.operands)
        for backward, (compute, calls) in enumerate(zip(times, (inside.forward, inside.backward), strict=True)):
            table[self._row(COMPUTE, bool(backward))] = compute
            moved = list[tuple[Call, float]]()
            for axis, kind, size in calls if compute and strategy.variant else ():
                seconds = costs.collective_seconds(self.hardware, self.mesh, axis, kind, size)
                if seconds:
                    table[self._rows((axis,), bool(backward))] += seconds
                    table[self._row(HOST, bool(backward))] += self.dispatch_seconds
                    moved.append(((axis, kind, size), seconds))
            row = with_calls(compute, moved, inside)
            table[self._row(IN_ROW, bool(backward))] = row
            table[self._row(PATH, bool(backward))] = row if on_path else 0.0
            slower = (1 + self.slowdown) * compute
            table[self._hidden(bool(backward))] = row - compute - (with_calls(slower, moved, inside) - slower)
        return table

    def _locals(self, op: Op, strategy: Strategy) -> Locals:
        operands = tuple(
            None if name is None or layout is None else self._local(name, layout)
            for name, layout in zip(op.operands, strategy.operands, strict=True)
        )
        pairs = zip(op.results, strategy.results, strict=True)
        return operands, tuple(self._local(name, layout) for name, layout in pairs)

    def _local(self, name: str, layout: Layout) -> LocalTensor:
        tensor = self.graph.tensor(name)
        key = (tensor.shape, layout)
        if key not in self.shapes:
            self.shapes[key] = largest_shape(tensor.shape, layout, self.mesh)
        return LocalTensor(self.shapes[key], tensor.dtype, tensor.requires_grad)

    # --- values ---

    def on_path(self, v: int, position: int) -> bool:
        site = self.formulation.sites[self.formulation.problem.values[v].consumers[position]]
        return site.kind == "op" and self.path.reads.get(site.name) == self.formulation.values[v].tensor

    def part(self, v: int, position: int) -> Floats:
        """(2 R, sources, targets): seconds that one reader of a value pays."""
        value, site = self.formulation.problem.values[v], self.formulation.values[v]
        consumer = self.formulation.sites[value.consumers[position]]
        facts = (
            len(value.consumers),
            self.on_path(v, position),
            consumer.kind == "op" and consumer.name in self.path.needed,
            self.regathered.block(v, position) != "",
        )
        beside = self._beside(v)
        key = (id(value.seconds), id(site.sources), *facts, beside.tobytes())
        return self._once(key, lambda: self._part(v, *facts, beside))

    def whole(self, v: int) -> Floats:
        """(2 R, sources, targets): a redistribution as it probably runs."""
        value, site = self.formulation.problem.values[v], self.formulation.values[v]
        regathered = any(self.regathered.is_repeated(site.tensor, consumer) for consumer in value.consumers)
        beside = self._beside(v)
        key = ("whole", id(value.seconds), id(site.sources), regathered, beside.tobytes())
        return self._once(key, lambda: self._whole(v, regathered, beside))

    def _beside(self, v: int) -> Floats:
        """(targets,): the most seconds of a weight product that hides the sum of the gradient of a target's tensor, as
        in `program.early_reductions`: any linear that reads it may be the one."""
        value, site = self.formulation.problem.values[v], self.formulation.values[v]
        table = np.zeros(len(site.targets))
        for consumer, targets in zip(value.consumers, value.targets, strict=True):
            reader = self.formulation.sites[consumer]
            op = self.graph.by_op[reader.name] if reader.kind == "op" else None
            if op is not None and op.target in LINEARS and op.operands[0] == site.tensor:
                np.maximum.at(table, targets, self._weight_products(op, reader.strategies))
        return table

    def _weight_products(self, op: Op, strategies: Sequence[Strategy]) -> Floats:
        """(choices,): seconds of a linear's gradients of weight and bias."""

        def product(strategy: Strategy) -> float:
            plain = not (strategy.variant or strategy.host)
            return weight_seconds(self.hardware, self.graph, op, *self._locals(op, strategy)) if plain else 0.0

        tensors = tuple(self.graph.tensor(name) for name in op.operands if name is not None)
        facts = tuple((x.shape, x.dtype, x.requires_grad) for x in tensors)
        return self._once(("weight", id(strategies), facts), lambda: np.array([product(s) for s in strategies], float))

    def _part(self, v: int, count: int, on_path: bool, needed: bool, regathered: bool, beside: Floats) -> Floats:
        table = self._empty(v)
        if self.formulation.values[v].tied or not needed:
            return table
        if self.formulation.values[v].tensor in self.graph.weights:
            return self._weight_part(table, v, count, regathered)
        parts, summed = self.ways.parts(v), np.zeros(table.shape[1:])
        for (phase, axes), seconds in parts.seconds.items():
            backward = phase != FORWARD
            if phase in PARTS:
                continue
            shared = seconds / count
            _add(table, self._rows(axes, backward), shared)
            if backward and axes:
                summed += seconds
                continue
            table[self._row(IN_ROW, backward)] += shared * self.in_order
            if on_path:
                table[self._row(PATH, backward)] += seconds
        exposed = np.maximum(0.0, summed - beside)
        slowed = np.maximum(0.0, summed - (1 + self.slowdown) * beside)
        table[self._row(IN_ROW, True)] += exposed / count * self.in_order
        table[self._hidden(True)] += (exposed - slowed) / count * self.in_order
        table[self._row(PATH, True)] += exposed * on_path
        for phase, tasks in parts.tasks.items():
            if phase not in PARTS:
                table[self._row(HOST, phase != FORWARD)] += self.dispatch_seconds * tasks / count
        return table

    def _weight_part(self, table: Floats, v: int, count: int, regathered: bool) -> Floats:
        """Certain seconds of a weight's collectives: the links carry their bytes. Nothing else is certain, as they may
        go together with others', ahead of their use or during backward. `regathered`: as one of a block."""
        parameter = self.formulation.values[v].tensor in self.parameters
        parts = self.ways.rates(v)
        for (phase, axes), seconds in parts.seconds.items():
            if phase in (GATHER, SCATTER) or (phase == EXCHANGED and not regathered) or (phase == SUM and parameter):
                continue
            if axes:
                _add(table, self._rows(axes, phase != FORWARD), seconds / count)
        for phase, backward in ((GATHER, False), (SCATTER, True)):
            for row, less in self._joined_less(v, phase, backward).items():
                table[row] -= less / count
        if self.in_turn:
            self._add_tasks(table, v, count)
        if regathered:
            for row, seconds in self._regather_rows(v).items():
                least = np.minimum(seconds, _least_positive(seconds))
                table[row] += least
                if row >= self.count + len(_FIXED):  # ahead of its use: beside what, nobody knows
                    table[row + len(self.groups)] += self.slowdown * least
        if parameter and parts.summed.any():
            self._add_buckets(table, v, parts, count)
        return table

    def _joined_less(self, v: int, phase: str, backward: bool) -> dict[int, Floats]:
        parts, sizes = self.ways.rates(v), self.ways.sizes(v)
        rate, rows = partial(per_byte_seconds, self.hardware, self.mesh), partial(self._rows, backward=backward)
        return joined_less(parts, sizes, phase, self.formulation.values[v].sources, rate, rows)

    def _alike(self, v: int) -> Hashable:
        """Key of all that the tables of a weight's redistribution depend on."""
        site = self.formulation.values[v]
        facts = costs.moving_facts(self.graph, self.graph.tensor(site.tensor))
        group = self.together.get(site.tensor, 0), site.tensor in self.parameters
        return facts, id(site.sources), id(site.targets), group

    def _tasks(self, v: int) -> WeightTasks:
        """Other costs of a weight's collectives: nothing of them is known if a step has several micro-batches."""
        if (key := self._alike(v)) not in self.tasks:
            self.tasks[key] = self._worked_out(v)
        return self.tasks[key]

    def _worked_out(self, v: int) -> WeightTasks:
        parts = self.ways.parts(v)
        copies = {phase: np.zeros(parts.summed.shape) for phase in (FORWARD, BACKWARD)}
        for phase, axes in parts.seconds:
            if phase == GATHER and axes:
                there = parts.seconds[phase, axes] > 0
                for direction in copies:
                    copies[direction] += there * self._copied(v, parts, axes, gradient=direction == BACKWARD)
        site = self.formulation.values[v]
        return weight_tasks(parts, self.ways.rates(v), copies, site.sources, stored=site.tensor in self.parameters)

    def _add_tasks(self, table: Floats, v: int, count: int) -> None:
        """Adds the tasks of a weight, except for those that the backward repeats, see `_regather_rows`."""
        tasks = self._tasks(v)
        for backward, phase in enumerate((FORWARD, BACKWARD)):
            table[self._row(HOST, bool(backward))] += self.dispatch_seconds * tasks.issued[phase] / count
            table[self._row(IN_ROW, bool(backward))] += tasks.seconds[phase] / count

    def _regather_rows(self, v: int) -> dict[int, Floats]:
        """Row -> (sources, targets): seconds of gathering a weight once more."""
        if (key := self._alike(v)) in self.regathers:
            return self.regathers[key]
        rows = self.regathers[key] = {}
        for (phase, axes), seconds in self.ways.rates(v).seconds.items():
            if phase == GATHER and axes:
                for row in self._rows(axes, backward=True):
                    rows[row] = rows[row] + seconds if row in rows else seconds
        for row, less in self._joined_less(v, GATHER, backward=True).items():
            rows[row] = rows[row] - less
        if self.in_turn:
            tasks = self._tasks(v)
            rows[self._row(HOST, True)] = self.dispatch_seconds * tasks.issued[GATHER]
            rows[self._row(IN_ROW, True)] = tasks.seconds[GATHER]
        return rows

    def stays_whole(self, *, cast: bool = False) -> Floats:
        """(2 R,): the most counted for the block that is not gathered again, whichever it is. `cast`: for weights alone
        that are cast before."""
        by_block: dict[str, Floats] = {}
        for v, value in enumerate(self.formulation.problem.values):
            block = self.regathered.block(v, 0) if len(value.consumers) == 1 else ""
            if cast and self.formulation.sites[value.producer].kind != "op":
                continue
            if block and not self.formulation.values[v].tied:
                table = by_block.setdefault(block, np.zeros(2 * self.count))
                for row, seconds in self._regather_rows(v).items():
                    table[row] += _least_positive(seconds)
        most: Floats = np.max([np.zeros(2 * self.count), *by_block.values()], axis=0)
        return most

    def _whole(self, v: int, regathered: bool, beside: Floats) -> Floats:
        table = self._empty(v)
        if self.formulation.values[v].tied:
            return table
        tensor, parts = self.formulation.values[v].tensor, self.ways.parts(v)
        weight, late = tensor in self.graph.weights, tensor in self.parameters
        summed = np.zeros(table.shape[1:])
        for (phase, axes), seconds in parts.seconds.items():
            if phase not in PARTS or (phase in AGAIN and regathered):
                seconds = seconds * self.of_step if phase == SUM and late else seconds
                hidden = weight and axes != () and phase == SUM and late
                _add(table, self._rows(axes, phase != FORWARD), seconds)
                table[self._row(IN_ROW, phase != FORWARD)] += seconds * (EXPOSED[phase] if hidden else 1.0)
                summed += seconds if phase != FORWARD and axes and not weight else 0.0
        table[self._row(IN_ROW, True)] -= (1 - EXPOSED[SUM]) * np.minimum(summed, beside)
        if weight and self.graph.tensor(tensor).bytes >= FIRST_BUCKET_BYTES:
            self._add_together(table, v, parts, regathered)
        for phase, tasks in parts.tasks.items():
            if not ((phase == SUM and late) or phase == SCATTER or (phase in AGAIN and not regathered)):
                table[self._row(HOST, phase != FORWARD)] += self.dispatch_seconds * tasks
        return table

    def _add_together(self, table: Floats, v: int, parts: PathParts, regathered: bool) -> None:
        """Deducts what weights with a single gather save: it goes together with those of others, in parallel to all
        else. A small one in a separate bucket would wait for large ones instead."""
        rates = self.ways.rates(v).seconds
        gathers = [axes for phase, axes in parts.seconds if phase == GATHER]
        collectives = sum(
            (seconds > 0).astype(int) for (phase, axes), seconds in parts.seconds.items() if phase == FORWARD and axes
        )
        for axes in gathers:
            together = (collectives == 1) & (parts.seconds[GATHER, axes] > 0)
            for phase, backward in ((GATHER, False), (GATHER, True), (SCATTER, True)):
                if (phase, axes) not in parts.seconds or (phase == GATHER and backward and not regathered):
                    continue
                joint, alone = rates[phase, axes] * together, parts.seconds[phase, axes] * together
                copied = self._copied(v, parts, axes, gradient=phase == SCATTER) * together
                table[self._rows(axes, backward)] += joint - alone
                table[self._row(COMPUTE, backward)] += copied
                table[self._row(IN_ROW, backward)] += EXPOSED[phase] * joint - alone + copied

    def _copied(self, v: int, parts: PathParts, axes: Axes, *, gradient: bool) -> Floats:
        """(sources, 1): seconds of copying a weight out of what was gathered, or its gradient into what is sent."""
        name = self.formulation.values[v].tensor
        dtype = gradient_dtype(self.graph, name) if gradient else self.graph.tensor(name).dtype
        devices = math.prod(self.mesh.sizes[axis] for axis in axes)
        size = 2.0 * DTYPE_BYTES[dtype] * devices * parts.elements.astype(float)
        return np.asarray(costs.local_pass(self.hardware).seconds(size), float)[:, None]

    def _empty(self, v: int) -> Floats:
        return np.zeros((2 * self.count, *self.formulation.problem.values[v].seconds.shape))

    def _add_buckets(self, table: Floats, v: int, parts: PathParts, count: int) -> None:
        """Adds gradients that stay partial until a bucket reduces them, at the rate of large messages."""
        tensor = self.graph.tensor(self.formulation.values[v].tensor)
        size = parts.elements.astype(float)[:, None] * (DTYPE_BYTES[tensor.dtype] * self.of_step)
        known = (parts.deferred > 0) & (count == 1)
        for certain, where, summed in ((True, known, parts.deferred), (False, ~known, parts.summed)):
            for bits in set(summed[where].flat) - {0}:
                for row, rate in self._rates(axes_of(int(bits)), certain).items():
                    table[row] += np.where(where & (summed == bits), size * rate / count, 0.0)

    def _rates(self, axes: Axes, certain: bool) -> dict[int, float]:
        """Seconds per byte of an all-reduce over the axes, by row; the least of those over some of them, unless it is
        certain that it is over all of them at once."""
        some = [axes] if certain else list(chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1)))
        rates = {over: per_byte_seconds(self.hardware, self.mesh, over, "all_reduce") for over in some}
        best = {}
        for row in self._rows(axes, backward=True):
            axis = self.names[row - self.count].removeprefix("axis ")
            if axis in self.mesh.names:  # one of them has this axis
                best[row] = min(rate for over, rate in rates.items() if self.mesh.index(axis) in over)
            else:
                best[row] = min(rate if row in self._rows(over, backward=True) else 0.0 for over, rate in rates.items())
        return best


def _add(table: Floats, rows: Sequence[int], seconds: Floats) -> None:
    """Adds to each of the rows in place: indexing by a list of rows would copy all of them."""
    for row in rows:
        table[row] += seconds


def _least_positive(seconds: Floats) -> float:
    """Cap on the counted seconds of gathering again: the smaller it is, the less is deducted for one block."""
    return float(seconds[seconds > 0].min(initial=np.inf)) if (seconds > 0).any() else 0.0


def _through_last(certain: Sequence[bool]) -> int:
    """Number of entries up to the last true one."""
    return max((position + 1 for position, sure in enumerate(certain) if sure), default=0)
