"""The program of a micro-batch split into the parts of a pipeline, each a program of its own on the mesh of its stage.

What one part makes goes straight to each later one that reads it. What takes only the model's inputs, constants and
stored weights (masks, tables of positions, a weight that is gathered) is recomputed where it is read: every stage has
the inputs of the micro-batch. A part outputs only what is handed on, and the loss if it makes it. Where places have
meshes of their own, each part is of the program on its place's mesh, and what travels between two meshes is what an
operator made: each redistributes it for its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from autoshard.errors import UsageError
from autoshard.ir.plan import Plan, StagePart, StepPlan
from autoshard.ir.program import Collective, Compute, Instruction, Program
from autoshard.program.gradient_buckets import gradient_buckets
from autoshard.program.module_scopes import random_index, reads_of, results_of
from autoshard.program.weight_buckets import gradient_ready_at, weight_buckets
from autoshard.program.weights import weight_ways


def stage_programs(program: Program, plan: Plan | None = None) -> tuple[Program, ...]:
    """Part after part, in the order of the data, as its step (that of `plan`) says; itself where there is one stage.

    A part's inputs are what is handed to it, then those of the model's that it reads. Parameters stand in each part
    that reads them. UsageError for an impossible split: see `_check_buffers`, `_check_weights`.
    """
    step = program.step if plan is None else plan.step
    if not step.parts:
        return (program,)
    assert program.loss is not None, "check_step"
    cut = _Cut(program, step)
    parts = tuple(cut.part(number) for number in range(len(step.parts)))
    _check_buffers(program, parts, step)
    _check_weights(parts, step)
    _check_meshes(parts, step)
    counting_program(program, parts)
    return parts


def handed_to(part: Program, whole: Program) -> tuple[str, ...]:
    """The values that a part gets from earlier ones."""
    return tuple(name for name in part.inputs if name not in whole.inputs)


def handed_from(parts: Sequence[Program], whole: Program) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Sources of each part's `handed_to`: (the part that gives the value, its position among that part's outputs)."""
    makers: dict[str, tuple[int, int]] = {}
    handed = []
    for number, part in enumerate(parts):
        handed.append(tuple(makers[name] for name in handed_to(part, whole)))
        makers |= {name: (number, position) for position, name in enumerate(part.outputs)}
    return tuple(handed)


def shared_parameters(parts: Sequence[Program], step: StepPlan) -> dict[str, tuple[int, ...]]:
    """Path -> its stages, of each parameter that several stages hold: their gradients are summed."""
    held: dict[str, dict[int, None]] = {}
    for stage, part in zip(step.part_stages, parts, strict=True):
        for parameter in part.parameters:
            held.setdefault(parameter.path, {})[stage] = None
    return {path: tuple(sorted(stages)) for path, stages in held.items() if len(stages) > 1}


def counting_program(program: Program, parts: Sequence[Program]) -> Program:
    """The whole program on the mesh where losses that are means over labels are made. UsageError where these are
    several: each device of one mesh counts its labels for all of them."""
    stages = [stage for stage, part in zip(program.step.part_stages, parts, strict=True) if part.label_counts]
    programs = {id(whole): whole for whole in map(program.of_stage, stages)}
    if len(programs) > 1:
        reason = " and ".join(f"place {stage} on {program.meshes[stage]}" for stage in dict.fromkeys(stages))
        message = f"losses that are means over labels are on places of different meshes: {reason}"
        raise UsageError(message, "all losses on one place, or one micro-batch a step")
    return next(iter(programs.values()), program)


class _Cut:
    def __init__(self, program: Program, step: StepPlan) -> None:
        self.count = len(step.parts)
        known = {id(whole): _Whole(whole, step) for whole in (program, *(other for _, other in program.others))}
        self.of = [known[id(program.of_stage(stage))] for stage in step.part_stages]
        self.steps = [self._instructions(number) for number in range(self.count)]
        self.handed, self.outputs = self._handed()

    def part(self, number: int) -> Program:
        whole, steps = self.of[number], self.steps[number]
        program = whole.program
        instructions = tuple(_not_early_for_others([program.instructions[i] for i in steps], program))
        read = {name for step in instructions for name in filter(None, reads_of(step))}
        results = {name for step in instructions for name in results_of(step)}
        updates = tuple((buffer, new) for buffer, new in program.buffer_updates if new in results)
        read |= {buffer for buffer, _ in updates}
        if number == 0:  # what nobody reads is kept for checkpoints
            read |= whole.stored - {name for step in program.instructions for name in filter(None, reads_of(step))}
        parameters = tuple(p for p in program.parameters if p.value in read)
        inputs = (*self.handed[number], *(name for name in program.inputs if name in read))
        known = results | {*inputs} | {name for name in whole.stored if name in read}
        values = tuple(value for value in program.values if value.name in known)
        named = {value.name: value for value in values}
        ops = {step.op for step in instructions if isinstance(step, Compute)}
        once = program.step.zero < 3
        together = weight_buckets(parameters, instructions, named, program.mesh, program.fusion, once) if once else ()
        return replace(
            program,
            values=values,
            inputs=inputs,
            parameters=parameters,
            buffers=tuple(b for b in program.buffers if b.value in read),
            instructions=instructions,
            outputs=self.outputs[number],
            loss=program.loss if number == self.loss_part else None,
            buffer_updates=updates,
            gradient_buckets=gradient_buckets(
                parameters, instructions, named, program.mesh, gradient_ready_at(together), program.fusion
            ),
            weight_buckets=together,
            label_counts=tuple(count for count in program.label_counts if count.op in ops),
            others=(),
        )

    def _instructions(self, number: int) -> list[int]:
        """Instructions of the part, and those that recompute what it reads of an earlier part."""
        whole = self.of[number]
        indices = [i for i, part in enumerate(whole.part_of) if part == number]
        wanted = [name for i in indices for name in filter(None, reads_of(whole.program.instructions[i]))]
        needed: set[int] = set()
        while wanted:
            idx = whole.maker.get(wanted.pop())
            if idx is not None and whole.part_of[idx] < number and self._remakes(idx, number) and idx not in needed:
                needed.add(idx)
                wanted += filter(None, reads_of(whole.program.instructions[idx]))
        return [*sorted(needed), *indices]

    def _remakes(self, idx: int, number: int) -> bool:
        """Does a part recompute what the instruction `idx` of an earlier part makes, in the program of its mesh?"""
        whole = self.of[number]
        moves = isinstance(whole.program.instructions[idx], Collective)
        return idx in whole.recomputed or (moves and self.of[whole.part_of[idx]] is not whole)

    @cached_property
    def loss_part(self) -> int:
        whole = self.of[0]
        return whole.part_of[whole.maker[whole.program.loss or ""]]

    def _handed(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Values handed to and by each part: what an earlier one made and it reads. Unread values are dropped."""
        handed: list[tuple[str, ...]] = [()] * len(self.steps)
        outputs: list[tuple[str, ...]] = [()] * len(self.steps)
        loss = self.of[self.loss_part].program.loss or ""
        wanted = {(self.loss_part, loss): None}  # (the part that makes it, the value)
        for number in reversed(range(len(self.steps))):
            needed: list[int] = []
            whole = self.of[number]
            program = whole.program
            here = {name for i in self.steps[number] for name in results_of(program.instructions[i])}
            updated = {new for _, new in program.buffer_updates if new in here}
            ends = {
                new for new in updated if whole.part_of[whole.maker[new]] == number
            }  # else an earlier one writes it
            requested = {pair: None for pair in wanted if pair[0] == number}
            outputs[number] = tuple(name for _, name in requested)
            live = dict.fromkeys((*outputs[number], *ends))
            for i in reversed(self.steps[number]):
                step = program.instructions[i]
                if not live.keys().isdisjoint(results_of(step)):
                    needed.append(i)
                    live |= dict.fromkeys(filter(None, reads_of(step)))
            self.steps[number] = needed[::-1]
            outside = {*here, *whole.stored, *program.inputs}
            read = {(whole.part_of[whole.maker[name]], name) for name in live if name not in outside}
            ordered = self._in_order(read)
            handed[number] = tuple(name for _, name in ordered)
            wanted = dict.fromkeys(self._in_order({*wanted, *read} - {*requested}))
        assert not handed[0] and not wanted, (handed[0], wanted)
        return handed, outputs

    def _in_order(self, values: set[tuple[int, str]]) -> list[tuple[int, str]]:
        """Values in the order in which they are made; the loss first."""
        last = (self.loss_part, self.of[self.loss_part].program.loss)

        def turn(value: tuple[int, str]) -> tuple[int, int, int]:
            return value != last, self.of[value[0]].maker[value[1]], value[0]

        return sorted(values, key=turn)


def _not_early_for_others(steps: Sequence[Instruction], whole: Program) -> Iterator[Instruction]:
    """Make an early reduction (it overlaps the weight product of its first reader, a linear) plain if that linear is in
    another part."""
    here, every = _first_readers(steps), whole.once(_first_readers_of)
    for step in steps:
        if isinstance(step, Collective) and step.early and here.get(step.result) != every.get(step.result):
            step = replace(step, early=False)
        yield step


def _first_readers_of(program: Program) -> dict[str, str]:
    return _first_readers(program.instructions)


def _first_readers(steps: Sequence[Instruction]) -> dict[str, str]:
    """Value -> the operator that reads it first."""
    readers: dict[str, str] = {}
    for step in steps:
        if isinstance(step, Compute):
            for name in filter(None, reads_of(step)):
                readers.setdefault(name, step.op)
    return readers


class _Whole:
    """The whole program on one mesh, and the part of each of its instructions."""

    def __init__(self, program: Program, step: StepPlan) -> None:
        self.program = program
        if step.placed:
            self.part_of = _placed_parts_of(program, step.parts)
        else:
            self.part_of = _parts_of(program.instructions, _starts(program.instructions, step.parts))
        self.maker = {name: i for i, instruction in enumerate(program.instructions) for name in results_of(instruction)}
        self.stored = {p.value for p in (*program.parameters, *program.buffers)}
        self.recomputed = _rebuilt(program)


def _starts(instructions: Sequence[Instruction], parts: Sequence[StagePart]) -> list[int]:
    """Start of each part: with the redistributions made for its first operator."""
    at = {step.op: i for i, step in enumerate(instructions) if isinstance(step, Compute)}
    starts = []
    for part in parts:
        start = at[part.first_op]
        while start > 0 and isinstance(instructions[start - 1], Collective):
            start -= 1
        starts.append(start)
    return [0, *starts[1:]]


def _parts_of(instructions: Sequence[Instruction], starts: Sequence[int]) -> list[int]:
    """Part of each instruction. Redistributions after the last operator go with what they move: outputs, buffers."""
    last = max(i for i, step in enumerate(instructions) if isinstance(step, Compute))
    starts = [*starts, len(instructions)]
    parts: list[int] = []
    by_value: dict[str, int] = {}
    for i, step in enumerate(instructions):
        number = bisect_right(starts, i) - 1
        if i > last and isinstance(step, Collective):
            number = by_value.get(step.operand, number)
        parts.append(number)
        by_value |= dict.fromkeys(results_of(step), number)
    return parts


def _placed_parts_of(program: Program, parts: Sequence[StagePart]) -> list[int]:
    """Part of each instruction. A redistribution goes with the first part that reads its result, or with what it moves:
    always so for a buffer that is written back, as its place has the buffer."""
    part_of_op = {op: number for number, part in enumerate(parts) for op in part.ops}
    part_of = [part_of_op[step.op] if isinstance(step, Compute) else -1 for step in program.instructions]
    reader: dict[str, int] = {}
    written = {new for _, new in program.buffer_updates}
    for i in reversed(range(len(part_of))):
        step = program.instructions[i]
        if isinstance(step, Collective) and step.result in written:
            written.add(step.operand)
        elif isinstance(step, Collective):
            part_of[i] = reader.get(step.result, -1)
        for name in filter(None, reads_of(step)) if part_of[i] >= 0 else ():
            reader[name] = min(reader.get(name, part_of[i]), part_of[i])
    by_value: dict[str, int] = {}
    for i, step in enumerate(program.instructions):
        if part_of[i] < 0:
            assert isinstance(step, Collective)
            part_of[i] = by_value.get(step.operand, 0)
        by_value |= dict.fromkeys(results_of(step), part_of[i])
    return part_of


def _rebuilt(program: Program) -> set[int]:
    """Instructions that take inputs, constants and unchanged buffers, and weights on their way to a use."""
    updated = {buffer for buffer, _ in program.buffer_updates}
    ways = program.once(weight_ways)
    on_the_way = {i for steps in ways.values() for i in steps}
    known = {*program.inputs, *(b.value for b in program.buffers if b.value not in updated)}
    remade = set(on_the_way)
    for i, step in enumerate(program.instructions):
        plain = known.issuperset(filter(None, reads_of(step))) and random_index(step) is None
        if plain and not any(program.value(name).requires_grad for name in results_of(step)):
            remade.add(i)
            known |= {*results_of(step)}
    return remade


def _check_buffers(program: Program, parts: Sequence[Program], step: StepPlan) -> None:
    """UsageError for a buffer that changes in one part and is in another one, too."""
    paths = {b.value: b.path for b in program.buffers}
    for buffer, _ in program.buffer_updates:
        holders = [number for number, part in enumerate(parts) if buffer in {b.value for b in part.buffers}]
        if len(holders) > 1:
            word, whole = ("place", "model") if step.placed else ("stage", "pipeline")
            module = _module(paths[buffer])
            raise UsageError(
                f"{paths[buffer]} changes in part {holders[0]} of the {whole} and is read in part {holders[-1]}",
                f"--pin {word}:{module}=0, which keeps the module that holds it on one {word}"
                if module
                else f"all that reads it on one {word}",
            )


def _check_weights(parts: Sequence[Program], step: StepPlan) -> None:
    """UsageError if two parts of one stage read a trainable weight: they would hold it twice."""
    for number, (stage, part) in enumerate(zip(step.part_stages, parts, strict=True)):
        later = {p.path for other in step.parts_of(stage) if other > number for p in parts[other].parameters}
        for parameter in part.parameters:
            if parameter.path in later and parameter.trainable:
                raise UsageError(
                    f"two parts of {'place' if step.placed else 'stage'} {stage} read {parameter.path}",
                    "all modules that read it on one place, with nothing of another in between"
                    if step.placed
                    else "another --virtual-stages or --stages",
                )


def _check_meshes(parts: Sequence[Program], step: StepPlan) -> None:
    """UsageError if a weight's places have different meshes: its gradients are summed shard by shard."""
    meshes = {stage: part.mesh for stage, part in zip(step.part_stages, parts, strict=True)}
    for path, stages in shared_parameters(parts, step).items():
        mesh_set = {meshes[stage] for stage in stages}
        trainable = any(p.path == path and p.trainable for part in parts for p in part.parameters)
        if len(mesh_set) > 1 and trainable:
            message = " and ".join(f"place {stage} on {meshes[stage]}" for stage in stages)
            raise UsageError(
                f"{path} is read on places of different meshes: {message}",
                f"--pin place:MODULE={stages[0]} for all modules that read it, or one mesh for these places",
            )


def _module(path: str) -> str:
    return path.rpartition(".")[0]
