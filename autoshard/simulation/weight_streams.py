"""Weights that go together, on the streams of a simulated step: gathered a block ahead, scattered during backward.

As the runtime: what a bucket gathers is waited for at its first use, and the rest of its block and the next block start
then; the reduce-scatters of one block are on their way at most, and waited for as those of the next one start. What is
gathered once a step is there in a micro-batch among others; under ZeRO 1 that one adds up whole gradients.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.program import Collective, Program, WeightBucket
from autoshard.redistribute import messages, step_of
from autoshard.simulation.instruction_tasks import TaskPricer
from autoshard.simulation.stream_schedule import Schedule, StreamTask
from autoshard.simulation.timeline import COMPUTE, Phase


class WeightStreams:
    """Buckets in flight, in the order of the program."""

    def __init__(self, program: Program, schedule: Schedule, pricer: TaskPricer, among: bool = False) -> None:
        self.program, self.schedule, self.pricer, self.among = program, schedule, pricer, among
        self.adds = program.step.zero == 1 and (among or program.step.micro_batches > 1)
        self.bucket_of = {position: bucket for bucket in program.weight_buckets for position in bucket.gathers}
        self.regathers = {step for steps in pricer.regathers.values() for step in steps}
        self.sent: dict[tuple[WeightBucket, Phase], tuple[int, ...]] = {}
        self.used: set[tuple[WeightBucket, Phase]] = set()
        self.scattering: tuple[int, ...] = ()
        self.scattering_block = -1
        self.moved: dict[tuple[int, Phase], float] = {}

    def gather(self, index: int) -> bool:
        """The forward of a collective that goes with others; False for any other instruction."""
        if index not in self.bucket_of:
            return False
        if not (self.among and self.bucket_of[index].once):
            self._take(index, "forward")
        return True

    def regather(self, index: int) -> None:
        """Gather the bucketed weights that the backward of an instruction needs; nothing for those that stay whole."""
        for step in self.pricer.regathers.get(index, ()):
            if step in self.bucket_of and not self.bucket_of[step].retained:
                self._take(step, "backward")

    def scatter(self, index: int) -> bool:
        """Run the backward of a bucketed collective; False for any other instruction."""
        if index not in self.bucket_of:
            return False
        bucket = self.bucket_of[index]
        adds = self.adds and bucket.once
        passes = 3 if adds else 2  # over the gradient: one more to add it to those before
        name = f"{'add' if adds else 'flatten'} gradient {self._step(index).result}"
        self._copy(name, passes * self._whole(index, "backward"), index, "backward")
        if index == min(bucket.gathers) and not (adds and self.among):
            whole = sum(self._whole(position, "backward") for position in bucket.gathers)
            sent = self._send(bucket, "reduce_scatter", whole, "backward", "their gradients are summed")
            if bucket.block != self.scattering_block:
                self.schedule.wait_for(self.scattering)
                self.scattering, self.scattering_block = (), bucket.block
            self.scattering = (*self.scattering, *sent)
        return True

    def _take(self, index: int, phase: Phase) -> None:
        bucket = self.bucket_of[index]
        if (bucket, phase) not in self.used:
            self._start(bucket, phase)
            self.used.add((bucket, phase))
            self.schedule.wait_for(self.sent[bucket, phase])
            for other in self._near(bucket, phase):
                self._start(other, phase)
        self._copy(f"assemble {self._step(index).result}", 2 * self._whole(index, "forward"), index, phase)

    def _near(self, used: WeightBucket, phase: Phase) -> list[WeightBucket]:
        """The rest of its block, and the next block of which anything is gathered."""
        step = 1 if phase == "forward" else -1
        near = [
            bucket
            for bucket in self.program.weight_buckets[::step]
            if (bucket.block - used.block) * step >= 0 and self._wanted(bucket, phase)
        ]
        following = next((bucket.block for bucket in near if bucket.block != used.block), used.block)
        return [bucket for bucket in near if bucket.block in (used.block, following)]

    def _wanted(self, bucket: WeightBucket, phase: Phase) -> list[int]:
        if phase == "forward":
            return [*bucket.gathers]
        return [] if bucket.retained else [position for position in bucket.gathers if position in self.regathers]

    def _start(self, bucket: WeightBucket, phase: Phase) -> None:
        if (bucket, phase) in self.sent:
            return
        wanted = self._wanted(bucket, phase)
        shards = sum(self.pricer.local(self._step(position).operand).bytes for position in wanted)
        self._copy(f"flatten {len(wanted)} weights", 2 * shards, wanted[0], phase)
        whole = sum(self._whole(position, "forward") for position in wanted)
        self.sent[bucket, phase] = self._send(bucket, "all_gather", whole, phase, "they are used together")

    def _step(self, position: int) -> Collective:
        step = self.program.instructions[position]
        assert isinstance(step, Collective)
        return step

    def _whole(self, position: int, phase: Phase) -> float:
        """Bytes that the collective alone would move, of a gradient in its own precision."""
        if (position, phase) not in self.moved:
            self.moved[position, phase] = self._moved(position, phase)
        return self.moved[position, phase]

    def _moved(self, position: int, phase: Phase) -> float:
        step = self._step(position)
        operand, result = self.pricer.local(step.operand), self.pricer.local(step.result)
        if phase == "backward" and step.gradient_dtype:
            operand, result = (replace(x, dtype=step.gradient_dtype) for x in (operand, result))
        message = messages(step_of(step, self.program.mesh), self.program.mesh)[phase == "backward"]
        return float(message.full_bytes(float(operand.bytes), float(result.bytes)))

    def _copy(self, name: str, size: float, position: int, phase: Phase) -> None:
        step = self._step(position)
        seconds = self.pricer.pass_seconds(size)
        task = StreamTask(name, (COMPUTE,), seconds, phase, size / 2, step.module, step.reason, position)
        self.schedule.run_in_order([task])

    def _send(self, bucket: WeightBucket, primitive: str, size: float, phase: Phase, why: str) -> tuple[int, ...]:
        first = self._step(bucket.gathers[0])
        name = f"{primitive} block {bucket.block}: {len(bucket.gathers)} weights"
        return self.schedule.start(
            self.pricer.talk(name, bucket.axes, primitive, size, phase, first.module, why, bucket.gathers[0])
        )
