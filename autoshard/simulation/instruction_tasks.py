"""The tasks of each instruction of a Program on the streams of one device, with their seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.costs.device_bytes import optimizer_seconds
from autoshard.costs.host_memory import LOOK_UP, TO_DEVICE, host_tasks
from autoshard.costs.links import joint_link
from autoshard.costs.memory_traffic import local_pass
from autoshard.costs.operator import compute_seconds, weight_seconds
from autoshard.costs.variants import variant_collectives
from autoshard.ir.graph import Graph, Op
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.program import Collective, Compute, GradientBucket, Instruction, Program, ProgramParameter
from autoshard.redistribute import LOCAL, Message, messages, step_of
from autoshard.rules.algebra.variant_record import Call, LocalTensors
from autoshard.simulation.compiled.fused_kernels import fused_seconds
from autoshard.simulation.memory_curve import bucket_bytes
from autoshard.simulation.shared_storage import storage
from autoshard.simulation.stream_schedule import StreamTask
from autoshard.simulation.timeline import COMPUTE, HOST_LINK, HOST_MEMORY, Phase, axis_stream
from autoshard.units import EXACT


@dataclass(frozen=True)
class Bucket:
    """`copy` makes the gradients one flat tensor, as they come; they are views of it from then on."""

    copy: StreamTask
    all_reduce: StreamTask


class _Operator(NamedTuple):
    """An operator on one device; `size_bytes`: of its results."""

    op: Op
    operands: LocalTensors
    results: tuple[LocalTensor, ...]
    size_bytes: float
    strategy: str


class TaskPricer:
    """The tasks of each instruction, with their seconds; collectives over a `free` axis take none to speak of.
    `compiled`: the blocks' kernels are those of `fused_kernels`, each a task at the last of its instructions."""

    def __init__(
        self, program: Program, graph: Graph, hardware: Hardware, free: frozenset[str] = frozenset(),
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self.program, self.graph, self.hardware, self.mesh = program, graph, hardware, program.mesh
        self.free = free
        self.together = frozenset(p for bucket in program.weight_buckets for p in bucket.gathers)
        self.regathers = storage(program, graph).regathers
        # Seconds of instructions, forward and backward
        self.computed = fused_seconds(program, graph, hardware) if compiled else {}
        self.fused = frozenset(self.computed)
        self._messages: dict[int, tuple[Message, Message]] = {}  # of collectives, forward and backward
        self._operators: dict[int, _Operator] = {}
        self._talks: dict[tuple[tuple[str, ...], str, float], tuple[tuple[str, ...], float, str]] = {}

    def local(self, name: str) -> LocalTensor:
        return self.program.largest[name]

    def tasks(self, index: int, instruction: Instruction, phase: Phase) -> Iterator[StreamTask]:
        if isinstance(instruction, Collective):
            yield from self._collective(index, instruction, phase)
            return
        if phase == "backward":
            yield from self._regather_tasks(index)
        yield from self._compute(index, instruction, phase)

    def linear_backward(self, index: int) -> tuple[list[StreamTask], StreamTask]:
        """Tasks of a linear's backward: all up to the gradient of its input, and that of its weight and bias."""
        instruction = self.program.instructions[index]
        assert isinstance(instruction, Compute)
        *before, whole = self.tasks(index, instruction, "backward")
        operands = tuple(None if name is None else self.local(name) for name in instruction.operands)
        results = tuple(self.local(name) for name in instruction.results)
        op = self.graph.by_op[instruction.op]
        seconds = weight_seconds(self.hardware, self.graph, op, operands, results)
        size = float(sum(x.bytes for x in operands[1:] if x is not None and x.requires_grad))
        weight = whole._replace(name=f"{whole.name}: weight", seconds=seconds, bytes=size, continues=True)
        return [*before, whole._replace(seconds=max(0.0, whole.seconds - seconds))], weight

    def _regather_tasks(self, index: int) -> Iterator[StreamTask]:
        """The gathers of weights that the backward of this instruction needs whole, and their casts; but for those that
        are gathered with others."""
        for step in (step for step in self.regathers.get(index, ()) if step not in self.together):
            gather = self.program.instructions[step]
            for task in self.tasks(step, gather, "forward"):
                yield task._replace(phase="backward", reason=f"gathered again: {task.reason}", instruction=index)

    def _compute(self, index: int, instruction: Compute, phase: Phase) -> Iterator[StreamTask]:
        op, operands, results, size, strategy = self._operator(index, instruction)
        if instruction.host:
            yield from self._on_host(index, instruction, phase, op, operands, results)
            return
        if index not in self.computed:
            variant = instruction.variant
            self.computed[index] = compute_seconds(self.hardware, self.graph, op, operands, results, variant)
        seconds = self.computed[index][phase == "backward"]
        if index in self.fused and not seconds:
            return
        yield StreamTask(op.name, (COMPUTE,), seconds, phase, size, instruction.module, strategy, index)
        if not instruction.variant or seconds == 0:
            return
        layouts = tuple(None if n is None else self.program.value(n).layout for n in instruction.operands)
        inside = variant_collectives(self.mesh, op, instruction.variant, operands, layouts)
        for call in inside.forward if phase == "forward" else inside.backward:
            reason = f"inside {instruction.variant}"
            task = self._call(call, f"{op.name}: {call[1]}", phase, instruction.module, reason, index)
            yield task._replace(beside=call[1] in inside.beside)

    def _operator(self, index: int, instruction: Compute) -> _Operator:
        """Operator of an instruction with its local operands and results, the same in both phases."""
        if index not in self._operators:
            results = tuple(map(self.local, instruction.results))
            self._operators[index] = _Operator(
                self.graph.by_op[instruction.op],
                tuple(None if name is None else self.local(name) for name in instruction.operands),
                results,
                float(sum(result.bytes for result in results)),
                f"{instruction.target} {instruction.strategy}",
            )
        return self._operators[index]

    def _on_host(
        self, index: int, instruction: Compute, phase: Phase, op: Op, operands: LocalTensors,
        results: tuple[LocalTensor, ...],
    ) -> Iterator[StreamTask]:  # fmt: skip
        why = f"{instruction.target} {instruction.strategy}"
        both = host_tasks(self.hardware, self.graph, op, operands, results, instruction.variant)
        for work in both[phase == "backward"]:
            stream, name = HOST_MEMORY if work.what == LOOK_UP else HOST_LINK, f"{op.name}: {work.what}"
            task = StreamTask(name, (stream,), work.seconds, phase, work.bytes, instruction.module, why, index)
            yield task._replace(held_up=work.what != TO_DEVICE)

    def _collective(self, index: int, instruction: Collective, phase: Phase) -> Iterator[StreamTask]:
        operand, result = self.local(instruction.operand), self.local(instruction.result)
        action = instruction.forward if phase == "forward" else instruction.backward
        if phase == "backward" and instruction.gradient_dtype:
            operand, result = (replace(x, dtype=instruction.gradient_dtype) for x in (operand, result))
        if not action or (phase == "backward" and not operand.requires_grad):
            return
        name = f"{action} {instruction.result}"
        about = (instruction.module, instruction.reason, index)
        if action in LOCAL:
            cuts = action in ("slice", "pick")
            moved = 2 * min(operand.bytes, result.bytes) if cuts else operand.bytes + result.bytes
            size = float(max(operand.bytes, result.bytes))
            yield StreamTask(name, (COMPUTE,), self.pass_seconds(moved), phase, size, *about)
        else:
            if index not in self._messages:
                self._messages[index] = messages(step_of(instruction, self.mesh), self.mesh)
            message = self._messages[index][phase == "backward"]
            if message.packed:
                both = float(operand.bytes + result.bytes)
                yield StreamTask(f"pack {instruction.result}", (COMPUTE,), self.pass_seconds(both), phase, both, *about)
            full_bytes = message.full_bytes(float(operand.bytes), float(result.bytes))
            yield self.talk(name, instruction.axes, message.primitive, full_bytes, phase, *about)

    def pass_seconds(self, size_bytes: float) -> float:
        """A local pass over memory."""
        return float(local_pass(self.hardware).seconds(size_bytes))

    def _call(self, call: Call, name: str, phase: Phase, module: str, reason: str, index: int | None) -> StreamTask:
        axis, primitive, size = call
        return self.talk(name, (self.mesh.names[axis],), primitive, size, phase, module, reason, index)

    def talk(
        self, name: str, axes: tuple[str, ...], primitive: str, size: float, phase: Phase, module: str, reason: str,
        index: int | None = None,
    ) -> StreamTask:  # fmt: skip
        """A collective over the axes joined: it occupies their streams, and the link that limits it."""
        key = axes, primitive, size
        if key not in self._talks:
            self._talks[key] = self._joint(*key)
        streams, seconds, link = self._talks[key]
        return StreamTask(
            name, streams, seconds, phase, size, module, reason, index, collective=primitive, axes=axes, link=link
        )

    def _joint(self, axes: tuple[str, ...], primitive: str, size: float) -> tuple[tuple[str, ...], float, str]:
        """(streams, seconds, link)"""
        over = tuple(self.mesh.index(axis) for axis in axes)
        seconds = (
            joint_seconds(self.hardware, self.mesh, over, primitive, size) if self.free.isdisjoint(axes) else EXACT
        )
        return tuple(map(axis_stream, axes)), seconds, joint_link(self.hardware, self.mesh, over).name

    def buckets(self, after: int) -> list[Bucket]:
        """Gradient buckets that the backward of the instruction `after` completes."""
        numbered = enumerate(self.program.gradient_buckets)
        return [self._bucket(bucket, number) for number, bucket in numbered if bucket.after == after]

    def _bucket(self, bucket: GradientBucket, number: int) -> Bucket:
        """One flat all-reduce over all axes of the bucket joined."""
        size = bucket_bytes(self.program, bucket)
        reason = f"the gradients of {len(bucket.parameters)} parameters are partial sums over {', '.join(bucket.axes)}"
        name = f"gradient bucket {number}"
        return Bucket(
            StreamTask(f"copy {name}", (COMPUTE,), self.pass_seconds(2 * size), "backward", size, "", reason),
            self.talk(f"all_reduce {name}", bucket.axes, "all_reduce", size, "backward", "", reason),
        )

    def optimizer(self) -> Iterator[StreamTask]:
        """One fused update of all parameters of the device, and the host's of those on the host."""
        device = [p for p in self.program.parameters if not p.layout.host]
        seconds, size = self._update(device)
        if seconds:
            seconds += self.hardware.launch_seconds
            yield StreamTask(self.graph.optimizer, (COMPUTE,), seconds, "optimizer", size, "", "updates the parameters")
        seconds, size = self._update([p for p in self.program.parameters if p.layout.host])
        if seconds:
            name, why = f"{self.graph.optimizer} on the host", "updates the tables in host memory"
            yield StreamTask(name, (HOST_MEMORY,), seconds, "optimizer", size, "", why, held_up=True)

    def _update(self, parameters: Sequence[ProgramParameter]) -> tuple[float, float]:
        """Seconds of an update of these, and their bytes."""
        by_tensor = {p.tensor: p for p in self.graph.parameters}
        pairs = [(by_tensor[self.program.value(p.value).tensor], p.layout) for p in parameters]
        seconds = math.fsum(optimizer_seconds(self.hardware, self.graph, p, layout, self.mesh) for p, layout in pairs)
        return seconds, float(sum(self.local(p.value).bytes for p in parameters if p.trainable))
