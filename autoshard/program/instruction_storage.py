"""What an instruction reads, makes and shares, and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoshard.ir.graph import Graph, Op, Saved
from autoshard.ir.program import Collective, Compute, Instruction
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.operators import record


@dataclass(frozen=True)
class InstructionStorage:
    """What an instruction reads and makes; `aliases`: result position -> operand position whose storage it shares."""

    operands: tuple[str | None, ...]
    results: tuple[str, ...]
    aliases: dict[int, int]
    saved: Saved

    @property
    def kept(self) -> list[str]:
        """The values that autograd keeps."""
        return self.kept_without(())

    def kept_without(self, positions: tuple[int, ...]) -> list[str]:
        """The same without the operands at these positions."""
        kept = [self.operands[i] for i in self.saved.operands if i not in positions]
        return [name for name in (*kept, *(self.results[i] for i in self.saved.results)) if name is not None]


def facts(instruction: Instruction, graph: Graph) -> InstructionStorage:
    if isinstance(instruction, Collective):
        aliases = {0: 0} if instruction.forward == "" else {}
        return InstructionStorage((instruction.operand,), (instruction.result,), aliases, Saved())
    op = graph.by_op[instruction.op]
    return InstructionStorage(instruction.operands, instruction.results, aliases_of(op), op.saved)


def aliases_of(op: Op) -> dict[int, int]:
    """Result position -> the operand whose storage it shares."""
    aliases = dict(op.saved.aliases)
    if record(op.target).work is Work.VIEW and not aliases:
        aliases = dict.fromkeys(range(len(op.results)), 0)
    return aliases


def storage_roots(instructions: Sequence[Instruction], graph: Graph, fixed: Iterable[str]) -> dict[str, str]:
    """Value -> the one that first held its storage. `fixed`: what nothing makes, each its own."""
    root = {name: name for name in fixed}
    for instruction in instructions:
        known = facts(instruction, graph)
        for position, name in enumerate(known.results):
            source = known.operands[known.aliases[position]] if position in known.aliases else None
            root[name] = root[source] if source is not None else name
    return root


def run_again(instructions: Sequence[Instruction], own: Iterable[int], graph: Graph) -> list[int]:
    """Of the instructions `own` of a block that backward computes again those that run: torch's checkpoint stops at the
    last of which autograd keeps something. That one is not run where it keeps its operands alone: they are kept before
    it computes."""
    order = sorted(own)
    ends = [i for i in order if _keeps(instructions[i], graph)]
    if not ends:
        return []
    last = ends[-1] if _keeps_before(instructions[ends[-1]], graph) else ends[-1] + 1
    return [i for i in order if i < last]


def _keeps(step: Instruction, graph: Graph) -> bool:
    if not isinstance(step, Compute):
        return False
    saved = graph.by_op[step.op].saved
    return bool(saved.operands or saved.results or saved.extra_bytes)


def _keeps_before(step: Instruction, graph: Graph) -> bool:
    assert isinstance(step, Compute)
    saved = graph.by_op[step.op].saved
    return not (saved.results or saved.extra_bytes or step.variant)
