"""Buckets of dynamic sizes: smaller steps with strategies of their own, over one layout of parameters and inputs.

A bucket holds the steps none of whose sizes is above its own, so its largest step is known and its memory is held
there; buckets lie in each other, and a step belongs to the smallest that holds it. All chains of buckets whose corners
are sizes of the histogram are tried, each bucket with the best of the plans that store parameters alike: those that
were found, and the best for each size with parameters and inputs held where a plan has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.constraints.held_pins import held_pins
from autoshard.errors import UserError
from autoshard.formulation.planning_context import context_of
from autoshard.graph_capture.dynamic_sizes.numbers import resized
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import OUTPUT, Plan, SizeBucket
from autoshard.program.lower import lower
from autoshard.replay.sized_plans import Sized, SizedRequest
from autoshard.search.build_plan import priced, redistribution
from autoshard.search.fixed_step import predicted
from autoshard.units import format_seconds

LEAST_GAIN = 0.01  # of the expected step: medians of 60 steps of one package differ by 2 % from run to run (3 runs)
Held = Callable[[Graph, Mesh, tuple[str, ...]], Plan]  # the best plan on a mesh, with these pins
Box = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Bucketed:
    """A plan with buckets, and its step at each point."""

    plan: Plan
    seconds: tuple[float, ...]


def bucketed(candidates: Sequence[Sized], workload: SizedRequest, most: int, held: Held) -> Bucketed | None:
    """Plan of at most `most` buckets, the last without a limit, with the least expected step; None if none is
    `LEAST_GAIN` better than the best of `candidates`."""
    best = min(sized.expected(workload.points) for sized in candidates)
    trials = []
    for base in _bases(candidates, workload):
        options = _Options(base, candidates, workload, held)
        trials += [options.taken(chain) for chain in _chains([point.sizes for point in workload.points], most)]
    least = min((one for one in trials if one is not None), key=lambda one: _expected(one, workload), default=None)
    return least if least is not None and _expected(least, workload) < best * (1 - LEAST_GAIN) else None


def bucket_words(plan: Plan, expected: float, alone: float) -> str:
    """Sentence on what the buckets gain over one plan, whose expected step is `alone`."""
    if not plan.buckets:
        return f"no buckets: none make the expected step {LEAST_GAIN:.0%} shorter than one plan for all sizes does"
    listed = "; ".join(f"{_most(item)} ({_changed(item, plan)} of {len(plan.ops)} operators)" for item in plan.buckets)
    gain = f"expected step {format_seconds(expected)}, of one plan for all sizes {format_seconds(alone)}"
    return f"buckets with their own strategies: {listed}; {gain}"


def _most(bucket: SizeBucket) -> str:
    return " and ".join(f"{name} up to {size}" for name, size in bucket.most)


def _changed(bucket: SizeBucket, plan: Plan) -> int:
    return sum(op.strategy != other.strategy for op, other in zip(bucket.ops, plan.ops, strict=True))


def _expected(one: Bucketed, workload: SizedRequest) -> float:
    return sum(point.weight * seconds for point, seconds in zip(workload.points, one.seconds, strict=True))


def _bases(candidates: Sequence[Sized], workload: SizedRequest) -> list[Sized]:
    """Best candidate for each layout of parameters."""
    by_layout: dict[object, Sized] = {}
    for one in sorted(candidates, key=lambda one: one.expected(workload.points)):
        by_layout.setdefault(_stored(one.plan), one)
    return list(by_layout.values())


def _stored(plan: Plan) -> tuple[object, ...]:
    """Part of a plan that all buckets of a package share."""
    layouts = [(t.name, str(t.layout)) for t in (*plan.inputs, *plan.parameters, *plan.buffers)]
    return plan.mesh, plan.fusion, replace(plan.step, predicted_seconds=0.0, predicted_peak_bytes=0.0), tuple(layouts)


def _chains(boxes: Sequence[Box], most: int) -> Iterator[tuple[Box, ...]]:
    """Chains of at most `most - 1` boxes, each within the next."""
    ordered = sorted({*boxes}, key=lambda box: sorted(size for _, size in box))
    for count in range(1, most):
        for chain in itertools.combinations(ordered, count):
            if all(within(dict(one), other) for one, other in itertools.pairwise(chain)):
                yield chain


def within(sizes: Mapping[str, int], box: Box) -> bool:
    """True if a step of these sizes is in the box."""
    return all(sizes[name] <= most for name, most in box)


class _Options:
    """Plans that store parameters as `base` does."""

    def __init__(self, base: Sized, candidates: Sequence[Sized], workload: SizedRequest, held: Held) -> None:
        self.wanted = workload
        self.plans = [one for one in candidates if _stored(one.plan) == _stored(base.plan)]
        outputs = _outputs(base.plan, workload.graph)
        self.plans = [one for one in self.plans if _outputs(one.plan, workload.graph) == outputs]
        texts = held_pins(base.plan, workload.graph, inputs=True)
        for at, point in zip(workload.graphs, workload.points, strict=True):
            try:
                plan = workload.at(held(at, base.plan.mesh, texts), at, workload.graph)
                plan = _with_outputs(plan, outputs, workload)
            except UserError:  # a strategy or a redistribution that the largest sizes do not have
                continue
            if _stored(plan) == _stored(base.plan) and plan.ops not in [one.plan.ops for one in self.plans]:
                self.plans.append(Sized(point.words(), plan, workload.steps(plan)))
        self.largest = [one for one in self.plans if workload.holds(one.plan)]
        self._peaks: dict[tuple[int, Box], float] = {}

    def taken(self, chain: Sequence[Box]) -> Bucketed | None:
        """Best plan with these buckets; None if one would be empty. No size of the histogram need be left over."""
        left = {n: dict(point.sizes) for n, point in enumerate(self.wanted.points)}
        groups = []
        for box in chain:
            groups.append([n for n, sizes in left.items() if within(sizes, box)])
            left = {n: sizes for n, sizes in left.items() if n not in groups[-1]}
        if not all(groups) or not self.largest:
            return None
        main = min(self.largest, key=lambda one: (self._seconds(one, [*left]), one.plan.step_seconds))
        seconds, buckets = list(main.seconds), []
        for box, group in zip(chain, groups, strict=True):
            fastest = min(self._fitting(box, main), key=lambda one: self._seconds(one, group))
            buckets.append(SizeBucket(box, fastest.plan.ops, fastest.plan.redistributions))
            for n in group:
                seconds[n] = fastest.seconds[n]
        return Bucketed(replace(main.plan, buckets=tuple(buckets)), tuple(seconds))

    def _seconds(self, one: Sized, group: Sequence[int]) -> float:
        return sum(self.wanted.points[n].weight * one.seconds[n] for n in group)

    def _fitting(self, box: Box, main: Sized) -> list[Sized]:
        """Plans that need no more memory at the bucket's largest step than `main` at the largest step of all."""
        numbers = [n for n, one in enumerate(self.plans) if one is not main]
        return [main, *(self.plans[n] for n in numbers if self._peak(n, box) <= main.plan.step_peak_bytes)]

    def _peak(self, number: int, box: Box) -> float:
        if (number, box) not in self._peaks:
            there = resized(self.wanted.graph, dict(box))
            self._peaks[number, box] = self.wanted.at(self.plans[number].plan, self.wanted.graph, there).step_peak_bytes
        return self._peaks[number, box]


def _outputs(plan: Plan, graph: Graph) -> tuple[str, ...]:
    program = lower(plan, graph)
    return tuple(str(program.value(name).layout) for name in program.outputs)


def _with_outputs(plan: Plan, wanted: Sequence[str], workload: SizedRequest) -> Plan:
    """`plan`, with its outputs in the layouts `wanted`."""
    program, context = lower(plan, workload.graph), context_of(plan, workload.graph, workload.hardware)
    more = [
        redistribution(
            context, value.tensor, value.layout, type(value.layout).parse(layout), (OUTPUT,)
        )
        for value, layout in zip(map(program.value, program.outputs), wanted, strict=True)
        if str(value.layout) != layout
    ]  # fmt: skip
    extended = replace(plan, redistributions=(*plan.redistributions, *more))
    return predicted(priced(extended, workload.graph, workload.hardware), workload.graph) if more else plan
