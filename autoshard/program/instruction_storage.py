"""Storage of instructions: what each reads, makes and shares, what autograd keeps of it, and what the backward of a
recomputed block finds: expensive results, and those of collectives."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from autoshard.ir.graph import Graph, Op, Saved
from autoshard.ir.plan import ATTENTION, KEEPS, PLAIN, policy_results
from autoshard.ir.program import Collective, Compute, Instruction
from autoshard.redistribute import LOCAL
from autoshard.rules.algebra.operator_record import Product, Work
from autoshard.rules.operators import record, recurrent

LINEAR = ("aten.linear", "autoshard.linear_in_out")  # one product of torch's each
BY_PRODUCTS = frozenset((  # made by a product or convolution of torch's, though the table counts their loops
    "aten.einsum", "aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d",
))  # fmt: skip
WITH_PRODUCTS = frozenset(("autoshard.experts", *recurrent.OPERATORS))  # several inside, which no result is


class InstructionStorage(NamedTuple):
    """Values that an instruction reads and makes; `aliases`: result position -> operand position, storage shared."""

    operands: tuple[str | None, ...]
    results: tuple[str, ...]
    aliases: dict[int, int]
    saved: Saved

    @property
    def retained(self) -> list[str]:
        """The values that autograd keeps."""
        return self.retained_without(())

    def retained_without(self, positions: tuple[int, ...]) -> list[str]:
        """Values that autograd keeps, without the operands at these positions."""
        operands = [self.operands[i] for i in self.saved.operands if i not in positions]
        return [name for name in (*operands, *(self.results[i] for i in self.saved.results)) if name is not None]


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


def rerun_ids(instructions: Sequence[Instruction], ids: Iterable[int], graph: Graph) -> list[int]:
    """Instructions that run again, among the instructions `ids` of a recomputed block: torch's checkpoint stops at the
    last of which autograd keeps something. That one is not run if autograd keeps its operands alone: they are kept
    before it computes."""
    order = sorted(ids)
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


def is_expensive(target: str) -> bool:
    """Is its result expensive to recompute: a product, a convolution, attention?"""
    work = record(target).work
    return isinstance(work, Product) or work is Work.ATTENTION or target in BY_PRODUCTS


def reused_results(
    instructions: Sequence[Instruction], ids: Iterable[int], keep: str, graph: Graph, ways: Container[str]
) -> set[int]:
    """Instructions among `ids`, those of a block, whose results its backward finds under a policy. `ways`: values that
    are weights on their way to their use."""
    ids = sorted(ids)
    dear = [i for i in ids if isinstance(step := instructions[i], Compute) and is_expensive(step.target)]
    if keep in KEEPS:
        rerun = rerun_ids(instructions, ids, graph) if keep in PLAIN else ()
        return {*communicated(instructions, rerun, ways), *(dear if PLAIN.get(keep, keep) == "expensive" else ())}
    places = {place for place, _ in policy_results(keep)}
    return {i for i, place in zip(dear, _places(instructions, dear), strict=True) if place in places}


def communicated(instructions: Sequence[Instruction], rerun: Iterable[int], ways: Container[str]) -> set[int]:
    """Collectives of activations among `rerun`, the instructions that backward would run again. Weights are gathered
    again, and what an operator communicates inside belongs to it."""
    return {i for i in rerun if isinstance(step := instructions[i], Collective) and _talks(step, ways)}


def _talks(step: Collective, ways: Container[str]) -> bool:
    return step.forward != "" and step.forward not in LOCAL and step.operand not in ways


def some_results(
    instructions: Sequence[Instruction], ids: Iterable[int], graph: Graph, block: str
) -> dict[str, list[int]]:
    """`0 attn.c_attn`, as in a policy -> the instructions of a block at path `block` that make it, among the expensive
    ones that run again. None if torch runs other products than those of linear layers, one each, and of attention: the
    code counts them."""
    ids = sorted(ids)
    dear = [i for i in ids if isinstance(step := instructions[i], Compute) and is_expensive(step.target)]
    inside = any(isinstance(step := instructions[i], Compute) and step.target in WITH_PRODUCTS for i in ids)
    if inside or not all(_is_counted(instructions[i], graph) for i in dear):
        return {}
    rerun, by_name = {*rerun_ids(instructions, ids, graph)}, dict[str, list[int]]()
    modules = {i: instructions[i].module.removeprefix(block).removeprefix(".") or "." for i in dear}
    attention = "+".join(dict.fromkeys(modules[i] for i in dear if _is_attention(instructions[i])))
    for i, place in zip(dear, _places(instructions, dear), strict=True):
        if i in rerun:
            by_name.setdefault(f"{place} {attention if place == ATTENTION else modules[i]}", []).append(i)
    return by_name


def _places(instructions: Sequence[Instruction], dear: Sequence[int]) -> list[str]:
    """Place of each expensive instruction among the linear layers of its block; ATTENTION for all others."""
    linear = [i for i in dear if _is_linear(instructions[i])]
    return [str(linear.index(i)) if _is_linear(instructions[i]) else ATTENTION for i in dear]


def _is_linear(step: Instruction) -> bool:
    return isinstance(step, Compute) and step.target in LINEAR


def _is_counted(step: Instruction, graph: Graph) -> bool:
    """True if torch runs it as what the code counts: a linear layer as `mm` or `addmm`, which a frozen weight may make
    a `bmm`; attention as neither, which matrices without a batch make `mm`."""
    assert isinstance(step, Compute)
    first, second = (graph.tensor(str(name)) for name in graph.by_op[step.op].operands[:2])
    return second.requires_grad if _is_linear(step) else _is_attention(step) and len(first.shape) > 2


def _is_attention(step: Instruction) -> bool:
    return isinstance(step, Compute) and record(step.target).work is Work.ATTENTION
