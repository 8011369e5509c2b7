"""Discrete-event simulation of one step of a Program on one device (SPMD: all devices do the same).

One compute stream, one communication stream per mesh axis. As in the emitted code, the forward and backward run in
program order and wait for their collectives; gradient buckets are started together after the backward, and
the optimizer waits for them. Nothing else overlaps. Not modelled: the host's dispatch, gradient clipping,
two axes that use one link at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.costs.collective import collective_seconds
from autoshard.costs.compute import LocalTensor
from autoshard.costs.memory import optimizer_seconds
from autoshard.costs.operator import Call, compute_seconds, variant_collectives
from autoshard.graph.model import DTYPE_BYTES, Graph
from autoshard.hardware import Hardware, check_mesh
from autoshard.program.model import Collective, Compute, GradientBucket, Instruction, Program
from autoshard.simulate.memory import local_tensor, plan_memory
from autoshard.simulate.timeline import COMPUTE, Event, Phase, Timeline, axis_stream
from autoshard.simulate.transfers import LOCAL, actions


@dataclass(frozen=True)
class Task:
    """An event that has no time yet."""

    name: str
    stream: str
    seconds: float
    phase: Phase
    bytes: float
    module: str
    reason: str
    instruction: int | None = None


def simulate(program: Program, graph: Graph, hardware: Hardware) -> Timeline:
    """The predicted step of `program`. Raises UsageError for a mesh or dtype that the hardware does not have."""
    check_mesh(hardware, program.mesh)
    schedule = Schedule()
    pricer = _Pricer(program, graph, hardware)
    starts: list[float] = []
    for index, instruction in enumerate(program.instructions):
        starts.append(schedule.now)
        schedule.run_in_order(pricer.tasks(index, instruction, "forward"))
    if program.loss is not None:
        for index, instruction in reversed(list(enumerate(program.instructions))):
            starts.append(schedule.now)
            schedule.run_in_order(pricer.tasks(index, instruction, "backward"))
        schedule.run_together([pricer.bucket(bucket, n) for n, bucket in enumerate(program.gradient_buckets)])
        starts.append(schedule.now)
        schedule.run_in_order(pricer.optimizer())
    return _timeline(program, graph, schedule, starts or [0.0])


class Schedule:
    """Places tasks on streams: a task starts when what it waits for has ended and its stream is free."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.free: dict[str, float] = {COMPUTE: 0.0}
        self.waits: tuple[int, ...] = ()  # what the next task in order waits for

    @property
    def now(self) -> float:
        """When the next task in order may start, stream aside."""
        return max((self.events[index].end_seconds for index in self.waits), default=0.0)

    def run_in_order(self, tasks: Iterator[Task]) -> None:
        for task in tasks:
            if task.seconds > 0:
                self.waits = (self._place(task, self.waits),)

    def run_together(self, chains: list[list[Task]]) -> None:
        """Every chain starts now, asynchronously; what follows waits for all of them."""
        ends = []
        for chain in chains:
            waits = self.waits
            for task in chain:
                if task.seconds > 0:
                    waits = (self._place(task, waits),)
            ends.append(waits)
        if ends:
            self.waits = tuple(sorted({index for waits in ends for index in waits}))

    def _place(self, task: Task, waits: tuple[int, ...]) -> int:
        ready = max((self.events[index].end_seconds for index in waits), default=0.0)
        start = max(ready, self.free.get(task.stream, 0.0))
        self.free[task.stream] = start + task.seconds
        self.events.append(
            Event(task.name, task.stream, start, task.seconds, task.phase, task.bytes, task.module, task.reason,
                  task.instruction, waits)
        )  # fmt: skip
        return len(self.events) - 1


class _Pricer:
    """The tasks of each instruction, with their seconds."""

    def __init__(self, program: Program, graph: Graph, hardware: Hardware) -> None:
        self.program, self.graph, self.hardware, self.mesh = program, graph, hardware, program.mesh

    def _local(self, name: str) -> LocalTensor:
        return local_tensor(self.program.value(name), self.mesh)

    def tasks(self, index: int, instruction: Instruction, phase: Phase) -> Iterator[Task]:
        if isinstance(instruction, Compute):
            return self._compute(index, instruction, phase)
        return self._collective(index, instruction, phase)

    def _compute(self, index: int, instruction: Compute, phase: Phase) -> Iterator[Task]:
        op = self.graph.by_op[instruction.op]
        operands = tuple(None if name is None else self._local(name) for name in instruction.operands)
        results = tuple(self._local(name) for name in instruction.results)
        seconds = compute_seconds(self.hardware, self.graph, op, operands, results)[phase == "backward"]
        size = float(sum(result.bytes for result in results))
        strategy = f"{instruction.target} {instruction.strategy}"
        yield Task(op.name, COMPUTE, seconds, phase, size, instruction.module, strategy, index)
        if phase == "forward":
            layouts = tuple(None if n is None else self.program.value(n).layout for n in instruction.operands)
            for call in variant_collectives(self.mesh, instruction.variant, operands, layouts):
                yield self._call(
                    call, f"{op.name}: {call[1]}", phase, instruction.module, f"inside {instruction.variant}", index
                )

    def _collective(self, index: int, instruction: Collective, phase: Phase) -> Iterator[Task]:
        operand, result = self._local(instruction.operand), self._local(instruction.result)
        forward, backward = actions(instruction.before, instruction.after)
        action = forward if phase == "forward" else backward
        if not action or (phase == "backward" and not operand.requires_grad):
            return
        whole = float(max(operand.bytes, result.bytes))
        if action == "all_to_all":
            whole = float(operand.bytes if phase == "forward" else result.bytes)
        name = f"{action} {instruction.result}"
        if action in LOCAL:
            seconds = self._pass_seconds(action, operand.bytes + result.bytes)
            yield Task(name, COMPUTE, seconds, phase, whole, instruction.module, instruction.reason, index)
        else:
            call = (self.mesh.index(instruction.axis), action, whole)
            yield self._call(call, name, phase, instruction.module, instruction.reason, index)

    def _pass_seconds(self, action: str, size_bytes: float) -> float:
        """A slice is a view; padding and masking write."""
        if action == "slice":
            return 0.0
        bandwidth = self.hardware.memory_bandwidth * self.hardware.constant("memory.elementwise")
        return self.hardware.launch_seconds + size_bytes / bandwidth

    def _call(self, call: Call, name: str, phase: Phase, module: str, reason: str, index: int | None) -> Task:
        axis, _, size = call
        seconds = collective_seconds(self.hardware, self.mesh, *call)
        return Task(name, axis_stream(self.mesh.names[axis]), seconds, phase, size, module, reason, index)

    def bucket(self, bucket: GradientBucket, number: int) -> list[Task]:
        """The all-reduces of one bucket, one axis after the other, innermost (fastest) first."""
        layouts = {p.path: p for p in self.program.parameters}
        numel = sum(self._local(layouts[path].value).numel for path in bucket.parameters)
        size = float(numel * DTYPE_BYTES[bucket.dtype])
        reason = f"the gradients of {len(bucket.parameters)} parameters are summands over {', '.join(bucket.axes)}"
        axes = sorted((self.mesh.index(axis) for axis in bucket.axes), reverse=True)
        name = f"all_reduce gradient bucket {number}"
        return [self._call((axis, "all_reduce", size), name, "backward", "", reason, None) for axis in axes]

    def optimizer(self) -> Iterator[Task]:
        """One fused update of all parameters."""
        by_tensor = {p.tensor: p for p in self.graph.parameters}
        seconds = math.fsum(
            optimizer_seconds(
                self.hardware, self.graph, by_tensor[self.program.value(p.value).tensor], p.layout, self.mesh
            )
            for p in self.program.parameters
        )
        size = float(sum(self._local(p.value).bytes for p in self.program.parameters if p.trainable))
        if seconds:
            seconds += self.hardware.launch_seconds
            yield Task(self.graph.optimizer, COMPUTE, seconds, "optimizer", size, "", "updates the parameters")


def _timeline(program: Program, graph: Graph, schedule: Schedule, starts: list[float]) -> Timeline:
    memory = plan_memory(program, graph)
    events = tuple(schedule.events)
    step_seconds = max((event.end_seconds for event in events), default=0.0)
    streams = (COMPUTE, *(axis_stream(name) for name, size in program.mesh.axes if size > 1))
    busy = tuple((s, math.fsum(event.duration_seconds for event in events if event.stream == s)) for s in streams)
    peak = memory.peak_step
    return Timeline(
        events,
        step_seconds,
        busy,
        _curve(starts, memory.bytes, step_seconds),
        memory.bytes[peak],
        starts[peak],
        memory.largest(peak),
        memory.static_bytes,
    )


def _curve(starts: list[float], sizes: tuple[float, ...], end: float) -> tuple[tuple[float, float], ...]:
    """Steps that take no time are folded into the largest at that moment."""
    curve: dict[float, float] = {}
    for start, size in zip(starts, sizes, strict=True):
        curve[start] = max(curve.get(start, 0.0), size)
    curve.setdefault(end, sizes[-1])
    return tuple(curve.items())
