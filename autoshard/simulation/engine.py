"""Discrete-event simulation of one step of a Program on one device (SPMD: all devices do the same).

One compute stream, one communication stream per mesh axis, and the host that issues them (see stream_schedule.py). As
in the emitted code, the forward and backward run in program order and wait for their collectives (those of a ring run
during its computation); the all-reduce of a gradient bucket starts where the program says, during the rest of backward,
and the optimizer waits for all; an early reduction runs during the weight product of its linear; weights that go
together are gathered a block ahead and scattered during backward (see weight_streams.py). Look-ups on the host hold it
up, and the device waits for them. Nothing else overlaps. Not modelled: gradient clipping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.cluster.hardware import Hardware, check_mesh
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.program.early_reductions import early_linears
from autoshard.simulation.instruction_tasks import TaskPricer
from autoshard.simulation.memory_curve import MemoryPlan, plan_memory
from autoshard.simulation.stream_schedule import Schedule
from autoshard.simulation.timeline import COMPUTE, HOST_LINK, HOST_MEMORY, Timeline, Timing, axis_stream
from autoshard.simulation.weight_streams import WeightStreams


def simulate(program: Program, graph: Graph, hardware: Hardware, compiled: bool = False) -> Timeline:
    """The predicted step of `program`; `compiled`: its blocks by `torch.compile` (fused_kernels.py; in time, not in
    memory). Raises UsageError for a mesh or dtype that the hardware does not have."""
    timing = timed(program, graph, hardware, compiled=compiled)
    return _timeline(program, plan_memory(program, graph, block_bytes=hardware.constant("allocator.block")), timing)


def timed(
    program: Program, graph: Graph, hardware: Hardware, free: frozenset[str] = frozenset(), among: bool = False,
    compiled: bool = False,
) -> Timing:  # fmt: skip
    """Timing as by `simulate`, without memory. A collective over axes of which one is `free` takes almost no time.
    `among`: a micro-batch between others, without what a step does once."""
    check_mesh(hardware, program.mesh)
    schedule = Schedule(hardware.constant("host.dispatch"), hardware.constant("overlap.slowdown"))
    pricer = TaskPricer(program, graph, hardware, free, compiled)
    weights = WeightStreams(program, schedule, pricer, among)
    early = early_linears(program.instructions)
    reduced = frozenset(early.values())
    starts: list[float] = []
    for index, instruction in enumerate(program.instructions):
        starts.append(schedule.now)
        if not weights.gather(index):
            schedule.run_in_order(pricer.tasks(index, instruction, "forward"))
    if program.has_backward:
        sent: list[int] = []
        for index, instruction in reversed(list(enumerate(program.instructions))):
            starts.append(schedule.now)
            weights.regather(index)
            if index in early:
                _reduce_early(schedule, pricer, index, early[index])
            elif index not in reduced and not weights.scatter(index):
                schedule.run_in_order(pricer.tasks(index, instruction, "backward"))
            for bucket in () if among else pricer.buckets(index):
                schedule.run_in_order([bucket.copy])
                sent += schedule.start(bucket.all_reduce)
        starts.append(schedule.now)  # waits for the buckets
        sent += weights.scattering
        starts.append(max([schedule.now, *(schedule.events[position].end_seconds for position in sent)]))
        schedule.run_in_order(pricer.optimizer(), tuple(sent))
    return Timing(tuple(schedule.events), tuple(starts or [0.0]))


def _reduce_early(schedule: Schedule, pricer: TaskPricer, linear: int, collective: int) -> None:
    """Schedule a linear's backward: its input's gradient, then its reduction during those of weight and bias."""
    tasks, weight = pricer.linear_backward(linear)
    schedule.run_in_order(tasks)
    *packing, reduction = pricer.tasks(collective, pricer.program.instructions[collective], "backward")
    schedule.run_in_order(packing)
    sent = schedule.start(reduction)
    schedule.run_in_order([weight])
    schedule.wait_for(sent)


def _timeline(program: Program, memory: MemoryPlan, timing: Timing) -> Timeline:
    events, starts, step_seconds = timing.events, timing.starts, timing.step_seconds
    used = {event.stream for event in events}
    streams = (COMPUTE, *(axis_stream(name) for name, size in program.mesh.axes if size > 1))
    streams += tuple(stream for stream in (HOST_MEMORY, HOST_LINK) if stream in used)
    busy = tuple((s, math.fsum(event.duration_seconds for event in events if s in event.streams)) for s in streams)
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
        starts,
    )


def _curve(starts: Sequence[float], sizes: tuple[float, ...], end: float) -> tuple[tuple[float, float], ...]:
    """Steps that take no time are folded into the largest at that moment."""
    curve: dict[float, float] = {}
    for start, size in zip(starts, sizes, strict=True):
        curve[start] = max(curve.get(start, 0.0), size)
    curve.setdefault(end, sizes[-1])
    return tuple(curve.items())
