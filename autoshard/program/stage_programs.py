"""The program of a micro-batch cut into the parts of a pipeline, each a program of its own on the mesh of its stage.

What one part makes and a later one reads is handed on from part to part. What takes only the model's inputs, constants
and stored weights (masks, tables of positions, a weight that is gathered) is made again where it is read: every stage
has the inputs of the micro-batch. A part gives nothing but what is handed on, the last one the loss.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from autoshard.errors import UsageError
from autoshard.ir.plan import Plan
from autoshard.ir.program import Collective, Compute, Instruction, Program
from autoshard.program.gradient_buckets import gradient_buckets
from autoshard.program.module_scopes import random_index, reads_of, results_of
from autoshard.program.weight_buckets import given_at, weight_buckets
from autoshard.program.weights import weight_ways


def stage_programs(program: Program, plan: Plan | None = None) -> tuple[Program, ...]:
    """Part after part, in the order of the data, as its step (that of `plan`) says; itself where there is one stage.

    A part's inputs are what is handed to it, then those of the model's that it reads. Parameters stand in each part
    that reads them. UsageError for a cut that can't be: see `_check_buffers`, `_check_weights`.
    """
    step = program.step if plan is None else plan.step
    if not step.parts:
        return (program,)
    assert program.loss is not None, "check_step"
    cut = _Cut(program, [part.first_op for part in step.parts])
    parts = tuple(cut.part(number) for number in range(len(step.parts)))
    _check_buffers(program, parts)
    _check_weights(parts, step.stages)
    return parts


def handed_to(part: Program, whole: Program) -> tuple[str, ...]:
    """The values that a part gets from the one before it."""
    return tuple(name for name in part.inputs if name not in whole.inputs)


def shared_parameters(parts: Sequence[Program], stages: int) -> dict[str, tuple[int, ...]]:
    """Path -> its stages, of each parameter that several stages hold: their gradients are summed."""
    held: dict[str, dict[int, None]] = {}
    for number, part in enumerate(parts):
        for parameter in part.parameters:
            held.setdefault(parameter.path, {})[number % stages] = None
    return {path: tuple(sorted(own)) for path, own in held.items() if len(own) > 1}


class _Cut:
    def __init__(self, program: Program, first_ops: Sequence[str]) -> None:
        self.program, self.values = program, program.by_name
        self.starts = [*_starts(program.instructions, first_ops), len(program.instructions)]
        self.part_of = _parts_of(program.instructions, self.starts)
        self.maker = {name: i for i, step in enumerate(program.instructions) for name in results_of(step)}
        self.stored = {p.value for p in (*program.parameters, *program.buffers)}
        self.again = _made_again(program)
        self.steps = [self._instructions(number) for number in range(len(first_ops))]
        self.handed = self._handed()

    def part(self, number: int) -> Program:
        program, steps = self.program, self.steps[number]
        instructions = tuple(program.instructions[i] for i in steps)
        read = {name for step in instructions for name in filter(None, reads_of(step))}
        made = {name for step in instructions for name in results_of(step)}
        updates = tuple((buffer, new) for buffer, new in program.buffer_updates if new in made)
        read |= {buffer for buffer, _ in updates}
        if number == 0:  # what nobody reads is kept for checkpoints
            read |= self.stored - {name for step in program.instructions for name in filter(None, reads_of(step))}
        parameters = tuple(p for p in program.parameters if p.value in read)
        last = number == len(self.steps) - 1
        inputs = (*self.handed[number], *(name for name in program.inputs if name in read))
        known = made | {*inputs} | {name for name in self.stored if name in read}
        values = tuple(value for value in program.values if value.name in known)
        named = {value.name: value for value in values}
        ops = {step.op for step in instructions if isinstance(step, Compute)}
        once = program.step.zero < 3
        together = weight_buckets(parameters, instructions, named, program.mesh, program.fusion) if once else ()
        return replace(
            program,
            values=values,
            inputs=inputs,
            parameters=parameters,
            buffers=tuple(b for b in program.buffers if b.value in read),
            instructions=instructions,
            outputs=(program.loss or "",) if last else self.handed[number + 1],
            loss=program.loss if last else None,
            buffer_updates=updates,
            gradient_buckets=gradient_buckets(
                parameters, instructions, named, program.mesh, given_at(together), program.fusion
            ),
            weight_buckets=together,
            label_counts=tuple(count for count in program.label_counts if count.op in ops),
        )

    def _instructions(self, number: int) -> list[int]:
        """Its own, and those that make again what it reads of an earlier part."""
        own = [i for i, part in enumerate(self.part_of) if part == number]
        wanted = [name for i in own for name in filter(None, reads_of(self.program.instructions[i]))]
        needed: set[int] = set()
        while wanted:
            made = self.maker.get(wanted.pop())
            earlier = made is not None and self.part_of[made] < number and made in self.again
            if made is not None and earlier and made not in needed:
                needed.add(made)
                wanted += filter(None, reads_of(self.program.instructions[made]))
        return [*sorted(needed), *own]

    def _handed(self) -> list[tuple[str, ...]]:
        """To each part: what an earlier one made, and it or a later one reads. What nobody reads is dropped."""
        handed: list[tuple[str, ...]] = [()] * len(self.steps)
        wanted = dict.fromkeys([self.program.loss or ""])
        for number in reversed(range(len(self.steps))):
            kept = []
            here = {name for i in self.steps[number] for name in results_of(self.program.instructions[i])}
            ends = {new for _, new in self.program.buffer_updates if new in here and not self._remade(new, number)}
            live = {**wanted, **dict.fromkeys(ends)}
            for i in reversed(self.steps[number]):
                step = self.program.instructions[i]
                if not live.keys().isdisjoint(results_of(step)):
                    kept.append(i)
                    live |= dict.fromkeys(filter(None, reads_of(step)))
            self.steps[number] = kept[::-1]
            outside = {*here, *self.stored, *self.program.inputs}
            wanted = dict.fromkeys(sorted((n for n in live if n not in outside), key=lambda n: self.maker[n]))
            handed[number] = tuple(wanted)
        assert not handed[0], handed[0]
        return handed

    def _remade(self, name: str, number: int) -> bool:
        """Made in an earlier part, too, which is the one that writes it back."""
        return self.part_of[self.maker[name]] < number


def _starts(instructions: Sequence[Instruction], first_ops: Sequence[str]) -> list[int]:
    """Where parts begin: with the redistributions made for their first operator."""
    at = {step.op: i for i, step in enumerate(instructions) if isinstance(step, Compute)}
    starts = []
    for op in first_ops:
        start = at[op]
        while start > 0 and isinstance(instructions[start - 1], Collective):
            start -= 1
        starts.append(start)
    return [0, *starts[1:]]


def _parts_of(instructions: Sequence[Instruction], starts: Sequence[int]) -> list[int]:
    """Of each instruction. Redistributions after the last operator, for outputs and buffers, go with what they move."""
    last = max(i for i, step in enumerate(instructions) if isinstance(step, Compute))
    parts: list[int] = []
    made: dict[str, int] = {}
    for i, step in enumerate(instructions):
        number = bisect_right(starts, i) - 1
        if i > last and isinstance(step, Collective):
            number = made.get(step.operand, number)
        parts.append(number)
        made |= dict.fromkeys(results_of(step), number)
    return parts


def _made_again(program: Program) -> set[int]:
    """Instructions that take inputs, constants and buffers that stay as they are, and weights on their way to a use."""
    updated = {buffer for buffer, _ in program.buffer_updates}
    ways = program.once(weight_ways)
    on_the_way = {i for steps in ways.values() for i in steps}
    known = {*program.inputs, *(b.value for b in program.buffers if b.value not in updated)}
    found = set(on_the_way)
    for i, step in enumerate(program.instructions):
        plain = known.issuperset(filter(None, reads_of(step))) and random_index(step) is None
        if plain and not any(program.value(name).requires_grad for name in results_of(step)):
            found.add(i)
            known |= {*results_of(step)}
    return found


def _check_buffers(program: Program, parts: Sequence[Program]) -> None:
    """A buffer that changes must be where it changes alone."""
    paths = {b.value: b.path for b in program.buffers}
    for buffer, _ in program.buffer_updates:
        holders = [number for number, part in enumerate(parts) if buffer in {b.value for b in part.buffers}]
        if len(holders) > 1:
            raise UsageError(
                f"{paths[buffer]} changes in part {holders[0]} of the pipeline and is read in part {holders[-1]}",
                f"--pin stage:{_module(paths[buffer])}=0, which keeps the module that holds it on one stage",
            )


def _check_weights(parts: Sequence[Program], stages: int) -> None:
    """Two parts of one stage would hold a weight twice."""
    for number, part in enumerate(parts):
        later = {p.path for other in parts[number + stages :: stages] for p in other.parameters}
        for parameter in part.parameters:
            if parameter.path in later and parameter.trainable:
                raise UsageError(
                    f"two parts of stage {number % stages} read {parameter.path}",
                    "another --virtual-stages or --stages",
                )


def _module(path: str) -> str:
    return path.rpartition(".")[0]
