"""The whole step of a program that is one micro-batch of it: its parts on their stages, by the schedule of its plan.

Each part is simulated by itself: forward, backward, what the first forward takes more (weights gathered once a step),
and what follows once a step (gradients still being reduced when the last backward ends, and the optimizer). Of a stage
with several parts, only the first part's gradients are late: its backward is the last. A block that keeps less computes
the rest again in its backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.ir.graph import Graph
from autoshard.ir.layout import PARTIAL, largest_shape
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, Plan, StepPlan
from autoshard.ir.program import Compute, Program
from autoshard.program.instruction_storage import rerun_ids, reused_results
from autoshard.program.module_scopes import called_in, reads_of
from autoshard.program.schedules.place_order import Sources
from autoshard.program.stage_programs import handed_from, handed_to, shared_parameters, stage_programs
from autoshard.program.weights import weight_ways
from autoshard.redistribute.two_meshes import sent_and_received
from autoshard.simulation.engine import timed
from autoshard.simulation.memory_curve import MemoryPlan, Span, levels, plan_memory
from autoshard.simulation.step_account import StepAccount, one_stage
from autoshard.simulation.step_operators import (
    PartOperators,
    Segment,
    StepOperators,
    one_after_another,
    single,
    step_operators,
    window,
    with_gaps,
)
from autoshard.simulation.step_timeline import (
    PartCosts,
    PartMessage,
    StageCosts,
    StepCosts,
    StepTimeline,
    simulate_step,
)
from autoshard.simulation.steps.placed_step import PlacedCosts, simulate_places
from autoshard.simulation.steps.server_step import server_account, worker_program
from autoshard.simulation.timeline import Timeline, Timing
from autoshard.simulation.weight_spans import whole_weights
from autoshard.simulation.working_memory import local_bytes

STAGE_AXIS = "pp"


def simulate_plan_step(plan: Plan, program: Program, graph: Graph, hardware: Hardware) -> StepTimeline:
    """The predicted step of a plan, of which `program` is the lowered micro-batch."""
    return _simulated(step_costs(plan, program, graph, hardware))


@dataclass(frozen=True, eq=False)
class AccountedStep:
    """A whole step: where it goes, and its operators where it is more than one micro-batch on one stage that keeps
    all."""

    account: StepAccount
    operators: StepOperators | None = None

    @property
    def timeline(self) -> StepTimeline | None:
        """Its slots."""
        return self.operators.timeline if self.operators else None


def accounted_step(plan: Plan, program: Program, graph: Graph, hardware: Hardware, once: Timeline) -> AccountedStep:
    """The step that a plan predicts. `once`: of its program, simulated."""
    if plan.servers.count:
        share = accounted_step(*worker_program(plan, graph), hardware, once)
        return AccountedStep(server_account(plan, share.account))
    if not plan.step.is_whole:
        return AccountedStep(one_stage(once))
    step = plan.step
    measured = MeasuredProgram(plan, program, graph, hardware, step.stages)
    timeline = _simulated(_step_costs(measured, step))
    operators = step_operators(timeline, measured.operators(step.recompute))
    accounts = tuple(map(operators.account, range(step.stages)))
    return AccountedStep(StepAccount(timeline.step_seconds, accounts), operators)


def step_costs(plan: Plan, program: Program, graph: Graph, hardware: Hardware) -> StepCosts:
    """Costs of the parts into which the plan splits its program."""
    return _step_costs(MeasuredProgram(plan, program, graph, hardware, plan.step.stages), plan.step)


def _step_costs(measured: MeasuredProgram, step: StepPlan) -> StepCosts:
    measures = measured.keeping(step.recompute)
    whole = tuple(stage_costs([measures[number] for number in step.parts_of(stage)]) for stage in range(step.stages))
    parts = tuple(part.costs for part in measures)
    if not step.placed:
        skips = tuple(message for message in measured.messages if message.reader != message.maker + 1)
        return StepCosts(step.schedule, measured.micro_batches, parts, whole, skips)
    parts = tuple(
        replace(
            part,
            saved_bytes=part.saved_bytes + measured.received_bytes[number],
            working_bytes=part.working_bytes + _further_gradients(measured.messages, number),
            receive_seconds=0.0,
        )
        for number, part in enumerate(parts)
    )
    last = next(number for number, part in enumerate(measured.programs) if part.loss)
    between = (step.part_stages, measured.sources, measured.messages, last)
    return PlacedCosts(step.schedule, step.micro_batches, parts, whole, (), *between)


def _further_gradients(messages: Sequence[PartMessage], part: int) -> float:
    """Bytes: what each place that reads something of a part gives back; the first is what the part's program has."""
    sizes = [message.bytes for message in messages if message.maker == part]
    return sum(sizes) - max(sizes, default=0.0)


def _simulated(costs: StepCosts) -> StepTimeline:
    return simulate_places(costs) if isinstance(costs, PlacedCosts) else simulate_step(costs)


@dataclass(frozen=True)
class PartMeasure:
    """One part of the model: a micro-batch through it, bytes that it always holds, and seconds once a step: of
    gradients after its last backward, between stages that hold the same parameters, and of the optimizer."""

    costs: PartCosts
    static_bytes: float
    late_seconds: float
    tied_seconds: float
    update_seconds: float


def measured_parts(
    plan: Plan, program: Program, graph: Graph, hardware: Hardware, stages: int
) -> tuple[PartMeasure, ...]:
    """Measures of the parts into which the plan splits its program; messages are those between `stages`."""
    return MeasuredProgram(plan, program, graph, hardware, stages).keeping(plan.step.recompute)


class MeasuredProgram:
    """Parts into which a plan splits its program, each simulated, whatever is recomputed."""

    def __init__(self, plan: Plan, program: Program, graph: Graph, hardware: Hardware, stages: int) -> None:
        parts = self.programs = stage_programs(program, plan)
        inner = program.mesh.axes if not program.others else (("device", program.firsts[-1] // stages),)
        wide = Mesh(((STAGE_AXIS, stages), *inner))
        tied = _tied_seconds(parts, plan.step, wide, hardware)
        of = plan.step.part_stages
        self.tied = [tied.get(stage, 0.0) * (stage not in of[:number]) for number, stage in enumerate(of)]
        self.sources = handed_from(parts, program)
        self.messages = tuple(_messages(parts, self.sources, of, wide, hardware)) if stages > 1 else ()
        self.place_of = {step.op: n for n, step in enumerate(program.instructions) if isinstance(step, Compute)}
        kinds, several = stage_hardware(hardware, program), plan.step.micro_batches > 1
        self.micro_batches = plan.step.micro_batches
        if plan.step.batch_shares:
            measured = measured_shares(plan, program, graph, hardware)
            self.micro_batches, slowest = max(measured, key=lambda share: share[0] * slice_seconds(share[1], plan))
            self.parts = [slowest]
        else:
            pairs = zip(parts, of, strict=True)
            self.parts = [_MeasuredPart(part, program, graph, kinds[stage], several) for part, stage in pairs]
        self.received_bytes = [
            sum(local_bytes(part.value(name), part.mesh) for name in handed_to(part, program)) for part in parts
        ]
        self.following = {message.reader: message for message in self.messages if message.reader == message.maker + 1}

    def keeping(self, policies: Iterable[BlockPolicy]) -> tuple[PartMeasure, ...]:
        """Measures of the parts if blocks keep what `policies` say. The program must be lowered for these: recomputed
        blocks gather weights differently if these are gathered for each use."""
        policies, measures = tuple(policies), []
        nothing = PartMessage(0, 0, 0.0)
        for number, (part, tied) in enumerate(zip(self.parts, self.tied, strict=True)):
            before = self.following.get(number, nothing)
            costs = replace(part.costs(policies), received_bytes=before.bytes, receive_seconds=before.seconds)
            measures.append(PartMeasure(costs, part.static_bytes, part.late_seconds, tied, part.update_seconds))
        return tuple(measures)

    def operators(self, policies: Iterable[BlockPolicy]) -> tuple[PartOperators, ...]:
        """Operators of the parts, with policies as in `keeping`; instructions are those of the whole program."""
        policies = tuple(policies)
        return tuple(
            part.operators(policies, tied, self.place_of) for part, tied in zip(self.parts, self.tied, strict=True)
        )


def measured_shares(
    plan: Plan, program: Program, graph: Graph, hardware: Hardware
) -> tuple[tuple[int, _MeasuredPart], ...]:
    """(slices, part) for each coordinate of the mesh's first axis: how many slices its devices compute, and one of them
    measured on their kind of device; they wait for others only at the end of the step."""
    count, known = plan.mesh.sizes[0], dict[Hardware, _MeasuredPart]()
    size, shares = plan.mesh.size // count, list[tuple[int, _MeasuredPart]]()
    for number, share in enumerate(plan.step.batch_shares or (plan.step.micro_batches,) * count):
        devices = hardware.of_ranks(number * size, size)
        if devices not in known:
            known[devices] = _MeasuredPart(stage_programs(program, plan)[0], program, graph, devices, True)
        shares.append((share, known[devices]))
    return tuple(shares)


def slice_seconds(part: _MeasuredPart, plan: Plan) -> float:
    """Forward and backward of one slice."""
    costs = part.costs(plan.step.recompute)
    return costs.forward_seconds + costs.backward_seconds


def stage_hardware(hardware: Hardware, program: Program) -> tuple[Hardware, ...]:
    """Devices of each stage, numbered through by rank."""
    return tuple(hardware.of_ranks(first, stop - first) for first, stop in pairwise(program.firsts))


def stage_costs(parts: Sequence[PartMeasure]) -> StageCosts:
    """Costs of a stage with these parts."""
    tied = sum(part.tied_seconds for part in parts)
    update = sum(part.update_seconds for part in parts)
    between = (("gradients between stages", tied),) if tied else ()
    tail = (("gradients between replicas", parts[0].late_seconds), *between, ("optimizer", update))
    return StageCosts(sum(part.static_bytes for part in parts), tail)


def mean_seconds(program: Program, once: Timeline, graph: Graph, hardware: Hardware, micro_batches: int) -> float:
    """Mean seconds of one of `micro_batches` on one stage that recomputes nothing: what runs once a step is divided
    among them equally. `once`: timeline of a step of one micro-batch."""
    if micro_batches == 1 or not program.has_backward:
        return once.step_seconds
    count = len(program.instructions)
    body = _body_seconds(_among(program, graph, hardware), count)
    tail = _late_seconds(once, body, count) + _update_seconds(once, count)
    return body + tail / micro_batches


def _messages(
    parts: Sequence[Program], sources: Sources, part_stages: Sequence[int], wide: Mesh, hardware: Hardware
) -> Iterator[PartMessage]:
    """Between parts of different places; what a place has received already is not sent again."""
    arrived: dict[tuple[int, int, int], int] = {}
    for reader, inputs in enumerate(sources):
        sizes: dict[int, float] = {}
        sums: dict[int, float] = {}
        for maker, position in inputs:
            key = (maker, position, part_stages[reader])
            if part_stages[maker] != part_stages[reader] and arrived.setdefault(key, reader) == reader:
                name = parts[maker].outputs[position]
                size, own_seconds = _travels(parts[maker], parts[reader], name, hardware)
                sizes[maker], sums[maker] = sizes.get(maker, 0.0) + size, sums.get(maker, 0.0) + own_seconds
        for maker, size in sizes.items():
            seconds = joint_seconds(hardware, wide, (0,), "send_receive", size) + sums[maker]
            yield PartMessage(maker, reader, seconds, size)


def _travels(maker: Program, reader: Program, name: str, hardware: Hardware) -> tuple[float, float]:
    """Bytes of the device that sends or receives most of a value between places, and seconds of the sum before."""
    value = maker.value(name)
    size = local_bytes(value, maker.mesh)
    if maker.mesh == reader.mesh:
        return size, 0.0
    first, second = (maker.mesh, value.layout), (reader.mesh, reader.value(name).layout)
    sent, received = sent_and_received(value.shape, first, second)
    summed = tuple(axis for axis, placement in enumerate(value.layout.placements) if placement == PARTIAL)
    seconds = joint_seconds(hardware, maker.mesh, summed, "all_reduce", size) if summed else 0.0
    element = size / max(math.prod(largest_shape(value.shape, value.layout, maker.mesh)), 1)
    return max(*sent, *received) * element, seconds


def _tied_seconds(parts: Iterable[Program], step: StepPlan, wide: Mesh, hardware: Hardware) -> dict[int, float]:
    """Seconds that each stage waits for the gradients of parameters that other stages hold too."""
    parts, waits = list(parts), dict[int, float]()
    values = {p.path: (part, p.value) for part in parts for p in part.parameters}
    for path, holders in shared_parameters(parts, step).items():
        part, name = values[path]
        size = local_bytes(part.value(name), part.mesh)
        seconds = joint_seconds(hardware, wide, (0,), "send_receive", size) * (len(holders) - 1)
        for stage in holders:
            waits[stage] = waits.get(stage, 0.0) + seconds
    return waits


def _among(program: Program, graph: Graph, hardware: Hardware) -> Timing:
    """A micro-batch but the first and the last."""
    return timed(program, graph, hardware, among=True)


def _forward_busy(timing: Timing) -> tuple[float, float]:
    """Seconds that forward computes, and that it communicates."""
    forward = [event for event in timing.events if event.phase == "forward"]
    each = (math.fsum(e.duration_seconds for e in forward if bool(e.collective) == talks) for talks in (False, True))
    return next(each), next(each)


def _body_seconds(timeline: Timing, count: int) -> float:
    """Forward and backward of `count` instructions."""
    return timeline.starts[2 * count + 1] - timeline.starts[0]


def _late_seconds(once: Timeline | Timing, body_seconds: float, count: int) -> float:
    """Seconds of gradients' sums that no backward hides."""
    return max(0.0, once.starts[2 * count + 1] - body_seconds - once.starts[0])


def _update_seconds(once: Timeline | Timing, count: int) -> float:
    return once.step_seconds - once.starts[2 * count + 1]


@dataclass(frozen=True)
class _Recomputed:
    """Recompute of a block in backward, and what the block therefore does not keep; `saved`: results that it finds and
    that no backward reads, which are there for the second forward. `last`: its last instruction."""

    seconds: float
    dropped: tuple[Span, ...]
    saved: tuple[Span, ...]
    last: int

    @property
    def bytes(self) -> float:
        return sum(span.held.bytes for span in self.dropped) - sum(span.held.bytes for span in self.saved)


class _MeasuredPart:
    """`accumulates`: micro-batches before it have left gradients."""

    def __init__(
        self,
        part: Program,
        whole: Program,
        graph: Graph,
        hardware: Hardware,
        accumulates: bool,
    ) -> None:
        self.part, self.count, self.handed, self.graph = part, len(part.instructions), handed_to(part, whole), graph
        self.timeline = _among(part, graph, hardware)
        self.memory: MemoryPlan = plan_memory(
            part, graph, accumulates=accumulates, block_bytes=hardware.constant("allocator.block")
        )
        starts = self.timeline.starts
        self.forward_seconds = starts[self.count] - starts[0]
        self.backward_seconds = starts[2 * self.count + 1] - starts[self.count]
        self.once = once = timed(part, graph, hardware)
        self.first_seconds = max(0.0, once.starts[self.count] - once.starts[0] - self.forward_seconds)
        copied, self.gather_seconds = (
            first - among for first, among in zip(_forward_busy(once), _forward_busy(self.timeline), strict=True)
        )
        self.once_copy_seconds = min(self.first_seconds, copied)
        late = _late_seconds(once, _body_seconds(self.timeline, self.count), self.count)
        self.late_seconds = max(0.0, late - self.first_seconds)
        self.update_seconds = _update_seconds(once, self.count)

    @cached_property
    def _saved(self) -> list[Span]:
        """Spans that are alive between forward and backward."""
        turn = self.count - 1
        return [
            span
            for span in self.memory.spans
            if span.held.kind in ("activation", "extra") and span.start <= turn < span.last
        ]

    @property
    def _handed_on(self) -> float:
        """Bytes of outputs that nothing of the backward keeps: the schedule has them until then."""
        known = {span.held.name for span in self._saved} | {*self.handed}
        outputs = () if self.part.loss else self.part.outputs
        return sum(local_bytes(self.part.value(name), self.part.mesh) for name in outputs if name not in known)

    @property
    def static_bytes(self) -> float:
        """Parameters, gradients, optimizer state and buffers, and the model's own inputs of one micro-batch."""
        steps, handed = len(self.memory.bytes), {*self.handed}
        return sum(
            span.held.bytes
            for span in self.memory.spans
            if span.start == 0 and span.last == steps - 1 and span.held.name not in handed
        )

    def costs(self, policies: Iterable[BlockPolicy]) -> PartCosts:
        blocks = [self._recomputation(policy) for policy in policies if policy.keep != "all"]
        kept_bytes = sum(span.held.bytes for span in self._saved) - sum(block.bytes for block in blocks)
        received = sum(local_bytes(self.part.value(name), self.part.mesh) for name in self.handed)
        return PartCosts(
            self.forward_seconds,
            self.backward_seconds + sum(block.seconds for block in blocks),
            kept_bytes + self._handed_on,
            max(0.0, max(self._bytes(blocks)) - self.static_bytes - received - kept_bytes),
            first_seconds=self.first_seconds,
            once_copy_seconds=self.once_copy_seconds,
            gather_seconds=self.gather_seconds,
        )

    def operators(
        self, policies: Sequence[BlockPolicy], tied_seconds: float, place_of: Mapping[str, int]
    ) -> PartOperators:
        """Operators that its seconds are spent on."""
        reruns = sorted((self._recomputed(policy) for policy in policies if policy.keep != "all"), key=itemgetter(0))
        numbers: dict[int | None, int | None] = {
            n: place_of.get(step.op) for n, step in enumerate(self.part.instructions) if isinstance(step, Compute)
        }

        def named(segment: Segment) -> Segment:
            events = (event._replace(instruction=numbers.get(event.instruction)) for event in segment.events)
            return Segment(tuple(events), segment.seconds)

        def backward(timing: Timing) -> Segment:
            starts = timing.starts
            segment = window(timing.events, starts[count], starts[2 * count + 1])
            gaps = [(starts[turn] - starts[count], rerun) for turn, rerun in reruns]
            return named(with_gaps(segment, gaps))

        timeline, once, count = self.timeline, self.once, self.count
        tied = single("gradients between stages", tied_seconds, "backward", "send_receive")
        return PartOperators(
            named(window(timeline.events, timeline.starts[0], timeline.starts[count])),
            backward(timeline),
            named(window(once.events, once.starts[0], once.starts[count])),
            backward(once),
            one_after_another([tied, named(window(once.events, once.starts[2 * count + 1], once.step_seconds))]),
        )

    def _recomputed(self, policy: BlockPolicy) -> tuple[int, Segment]:
        """Step of the backward at which a block's instructions are recomputed, and what their forwards did."""
        starts, runs = self.timeline.starts, list[list[int]]()
        for i in sorted(self._rerun(policy)[0]):
            if runs and runs[-1][-1] + 1 == i:
                runs[-1].append(i)
            else:
                runs.append([i])
        segment = one_after_another(window(self.timeline.events, starts[run[0]], starts[run[-1] + 1]) for run in runs)
        phase = tuple(event._replace(phase="recompute") for event in segment.events)
        return 2 * self.count - 1 - max(called_in(self.part, policy.module), default=0), Segment(phase, segment.seconds)

    def _bytes(self, blocks: Sequence[_Recomputed]) -> tuple[float, ...]:
        """Bytes in memory at each step: what a block drops is there until its forward has ended, and again from where
        its backward begins."""
        changed = {id(span) for block in blocks for span in (*block.dropped, *block.saved)}
        spans = [span for span in self.memory.spans if id(span) not in changed]
        for block in blocks:
            begins = 2 * self.count - 1 - block.last
            spans += [replace(span, last=begins) for span in block.saved]
            spans += [replace(span, last=block.last) for span in block.dropped]
            spans += [replace(span, start=begins) for span in block.dropped]
        return levels(spans, len(self.memory.bytes))

    def _recomputation(self, policy: BlockPolicy) -> _Recomputed:
        """A block at `policy.module`."""
        inside = {*called_in(self.part, policy.module)}
        outside = {
            name for i, step in enumerate(self.part.instructions) if i not in inside for name in reads_of(step) if name
        } | {*self.part.outputs, *whole_weights(self.part)}
        run, dear = self._rerun(policy)
        starts = self.timeline.starts
        seconds = math.fsum(starts[i + 1] - starts[i] for i in run)  # what the host takes, too
        dropped = [span for span in self._saved if span.start in inside - dear and span.held.name not in outside]
        saved = [
            span
            for span in self.memory.spans
            if span.held.kind == "activation" and span.start in dear and span.last < self.count
        ]
        return _Recomputed(seconds, tuple(dropped), tuple(saved), max(inside, default=0))

    def _rerun(self, policy: BlockPolicy) -> tuple[list[int], set[int]]:
        """Instructions that backward recomputes in a block, and those whose results it finds."""
        inside = {*called_in(self.part, policy.module)}
        ways = self.part.once(weight_ways)
        dear = {*reused_results(self.part.instructions, inside, policy.keep, self.graph, ways)}
        return [i for i in rerun_ids(self.part.instructions, inside, self.graph) if i not in dear], dear
