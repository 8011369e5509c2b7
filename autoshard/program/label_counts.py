"""Losses that are means over labels, of which some may be ignored: in a step of several micro-batches their number is
that of the whole step, known before the first backward. So it is counted of the inputs alone, by a program of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.errors import UsageError
from autoshard.ir.layout import Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Compute, Instruction, LabelCount, LocalValue, Program
from autoshard.program.module_scopes import operands_of, random_index, results_of
from autoshard.program.step_check import LABEL_LOSSES

_MEAN = (1, "mean")
CLASS = "Labels"


def label_counts(
    instructions: Sequence[Instruction], values: Mapping[str, LocalValue], mesh: Mesh, stored: Mapping[str, str]
) -> tuple[LabelCount, ...]:
    """`stored`: the path of each stored tensor. UsageError where a loss has class weights that are none of these."""
    counts = []
    for step in instructions:
        if not isinstance(step, Compute) or step.target not in LABEL_LOSSES or not _is_mean(step, values):
            continue
        target = step.operands[1]
        assert target is not None
        weights = step.operands[2] if len(step.operands) > 2 else None
        if weights is not None and values[weights].tensor not in stored:
            raise UsageError(
                f"{step.op} weighs its classes by what the model computes: the weights of a step's labels are not "
                "known before its first micro-batch",
                "class weights as a buffer, or one micro-batch",
            )
        layout = values[target].layout
        axes = tuple(n for n, p in zip(mesh.names, layout.placements, strict=True) if isinstance(p, Shard))
        ignored = dict(step.attributes).get("ignore_index", -100)
        assert isinstance(ignored, int)
        path = "" if weights is None else stored[values[weights].tensor]
        counts.append(LabelCount(step.op, target, ignored, axes, path))
    return tuple(counts)


def _is_mean(step: Compute, values: Mapping[str, LocalValue]) -> bool:
    """Is the loss a mean over labels? Classes given as probabilities all count."""
    target = step.operands[1]
    whole = target is not None and values[target].dtype.startswith(("int", "uint"))
    return whole and dict(step.attributes).get("reduction", "mean") in _MEAN


def labels_program(program: Program) -> Program:
    """Makes the labels of the program's losses, in order, of its inputs. UsageError where it takes more than these."""
    needed, wanted = set(), {count.target for count in program.label_counts}
    for index in reversed(range(len(program.instructions))):
        step = program.instructions[index]
        if wanted.isdisjoint(results_of(step)):
            continue
        if random_index(step) is not None:
            raise _unknown(program)
        needed.add(index)
        wanted |= set(filter(None, operands_of(step)))
    stored = {p.value for p in (*program.parameters, *program.buffers)}
    if not wanted.isdisjoint(stored):
        raise _unknown(program)
    steps = [program.instructions[index] for index in sorted(needed)]
    names = {*program.inputs, *(name for step in steps for name in results_of(step))}
    return replace(
        program,
        values=tuple(value for value in program.values if value.name in names),
        parameters=(),
        buffers=(),
        instructions=tuple(_bare(step) for step in steps),
        outputs=tuple(count.target for count in program.label_counts),
        loss=None,
        buffer_updates=(),
        gradient_buckets=(),
        weight_buckets=(),
        modules=(("", CLASS),),
        label_counts=(),
    )


def _bare(step: Instruction) -> Instruction:
    """Instruction outside all modules."""
    if isinstance(step, Collective):
        return replace(step, module="")
    return replace(step, module="", regathered=())


def _unknown(program: Program) -> UsageError:
    return UsageError(
        f"the labels of {program.label_counts[0].op} are not made of the inputs alone: how many count is not known "
        "before the first backward of several micro-batches",
        "labels as an input, or one micro-batch",
    )
