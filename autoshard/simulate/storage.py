"""Which values share storage, what autograd keeps, and which gathered weights are gathered again in backward."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.costs.compute import VIEWS
from autoshard.graph.model import Graph, Saved
from autoshard.program.model import Collective, Instruction, Program
from autoshard.simulate.transfers import is_weight_gather, shares_storage


@dataclass(frozen=True)
class Facts:
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


def facts(instruction: Instruction, graph: Graph) -> Facts:
    if isinstance(instruction, Collective):
        aliases = {0: 0} if shares_storage(instruction) else {}
        return Facts((instruction.operand,), (instruction.result,), aliases, Saved())
    op = graph.by_op[instruction.op]
    aliases = dict(op.saved.aliases)
    if op.target in VIEWS and not aliases:
        aliases = dict.fromkeys(range(len(op.results)), 0)
    return Facts(instruction.operands, instruction.results, aliases, op.saved)


@dataclass(frozen=True)
class Storage:
    """`root[value]`: the value that first held its storage. `fixed`: parameters, buffers and inputs.

    `gathers[root]`: the instructions that make a gathered weight from its shard; `again[i]`: the gathers that the
    backward of instruction i runs again, because it kept such a weight.
    """

    root: dict[str, str]
    fixed: frozenset[str]
    gathers: dict[str, tuple[int, ...]]
    again: dict[int, tuple[int, ...]]


def storage(program: Program, graph: Graph) -> Storage:
    parameters = {p.value for p in program.parameters}
    fixed = frozenset(parameters | {b.value for b in program.buffers} | set(program.inputs))
    root = {name: name for name in fixed}
    stored = set(parameters)  # parameters, and what collectives alone made of them
    gathers: dict[str, tuple[int, ...]] = {}
    again: dict[int, tuple[int, ...]] = {}
    for index, instruction in enumerate(program.instructions):
        known = facts(instruction, graph)
        for position, name in enumerate(known.results):
            source = known.operands[known.aliases[position]] if position in known.aliases else None
            root[name] = root[source] if source is not None else name
        if isinstance(instruction, Collective) and instruction.operand in stored:
            stored.add(instruction.result)
            if is_weight_gather(instruction):
                gathers[instruction.result] = (*gathers.get(root[instruction.operand], ()), index)
        weights = dict.fromkeys(root[name] for name in known.kept if root[name] in gathers)
        if weights:
            again[index] = tuple(step for weight in weights for step in gathers[weight])
    return Storage(root, fixed, gathers, again)
