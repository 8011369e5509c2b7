"""Which parameters of a program travel: to be used, or their whole gradients to be summed."""

from __future__ import annotations

from autoshard.ir.program import Collective, Program
from autoshard.program.weights import weight_steps
from autoshard.redistribute.collective_table import LOCAL

_STAYS = {"", "identity", *LOCAL}  # what needs no other device


def moved_parameters(program: Program) -> set[str]:
    """Paths of those that a collective moves on the way from where they are stored to where they are used, forward or
    backward, and of those whose gradients are all-reduced in buckets."""
    paths = {parameter.value: parameter.path for parameter in program.parameters}
    steps = weight_steps(program.instructions, paths, program.by_name)
    moved = {path for bucket in program.gradient_buckets for path in bucket.parameters}
    for indices in steps.values():
        for index in indices:
            step = program.instructions[index]
            if isinstance(step, Collective) and not {step.forward, step.backward} <= _STAYS:
                source = program.instructions[indices[0]]
                moved.add(paths[source.operand if isinstance(source, Collective) else source.operands[0] or ""])
    return moved
