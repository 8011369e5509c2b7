"""Operators of a block that `torch.compile` joins to one kernel: a fixed rule, on the Program alone.

Inductor leaves products, attention and collectives to their libraries and writes kernels for the rest. Here an operator
joins the kernel of an operator that it reads from if both stand in one block (compiled each by itself), as many
products, attentions and collectives lie before both (so that none lies between), and it goes over no more elements.
What goes by an index, sorts, pools or steps, experts, and all that has a separate form over several devices stay alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.ir.graph import Graph
from autoshard.ir.program import Compute, Instruction, Program
from autoshard.program.instruction_storage import facts, storage_roots
from autoshard.program.weight_buckets import block_of
from autoshard.rules.operators import elementwise, normalisation, record, views

ONE_BY_ONE = frozenset({"aten.add", "aten.sub", "autoshard.rotate_half"})  # though their records count bytes themselves
REDUCTIONS = ("all", "amax", "amin", "any", "argmax", "argmin", "linalg_vector_norm", "logsumexp", "max", "mean", "min",
              "norm", "prod", "std", "std_mean", "sum", "var", "var_mean")  # fmt: skip
DRAWS = ("aten.bernoulli", "aten.dropout", "autoshard.random")
WRITTEN = frozenset({  # by the compiler: element by element, copies, along rows
    *elementwise.OPERATORS, *normalisation.OPERATORS, *views.OPERATORS, *ONE_BY_ONE, *DRAWS,
    *(f"aten.{name}" for name in REDUCTIONS),
})  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """`groups`: positions of the instructions of each kernel, in order. `readers`: of what a value's storage holds the
    kernels that read it, in order of the program; an instruction that is none's has the number -1 - its position."""

    groups: tuple[tuple[int, ...], ...]
    readers: dict[str, tuple[int, ...]]


def kernel_groups(program: Program, graph: Graph) -> Kernels:
    """The kernels of all blocks, of one operator or more."""
    grouping = _Grouping(roots(program, graph))
    for index, instruction in enumerate(program.instructions):
        if not is_view(instruction, graph):
            grouping.place(index, instruction, graph, _joined_elements(program, instruction, graph))
    groups = tuple(tuple(sorted(group.members)) for group in grouping.groups if group.members)
    numbers = {index: number for number, members in enumerate(groups) for index in members}
    return Kernels(groups, _readers(program, graph, numbers))


@dataclass
class _JoinedGroup:
    """`place`: block and depth; `elements` that its largest operator goes over."""

    place: tuple[str, int]
    elements: int
    members: list[int] = field(default_factory=list)


@dataclass
class _Grouping:
    """`depth`: products, attentions and collectives before a value; `maker`: its group. Values by their storage."""

    root: dict[str, str]
    depth: dict[str, int] = field(default_factory=dict)
    maker: dict[str, int] = field(default_factory=dict)
    groups: list[_JoinedGroup] = field(default_factory=list)

    def place(self, index: int, instruction: Instruction, graph: Graph, size: int | None) -> None:
        """`size`: elements that it goes over, None where it is a kernel by itself."""
        known = facts(instruction, graph)
        read = [self.root[name] for name in known.operands if name]
        results = [self.root[name] for name in known.results]
        depth = max((self.depth.get(name, 0) for name in read), default=0)
        self.depth |= dict.fromkeys(results, depth + (size is None))
        if size is not None:
            number = self._group((block_of(instruction.module), depth), size, read)
            self.groups[number].members.append(index)
            self.maker |= dict.fromkeys(results, number)

    def _group(self, place: tuple[str, int], size: int, read: list[str]) -> int:
        """The first of those that it reads from, which takes in the others; a new one where there is none."""
        near = sorted({self.maker[name] for name in read if name in self.maker})
        fitting = [n for n in near if self.groups[n].place == place and size <= self.groups[n].elements]
        if not fitting:
            self.groups.append(_JoinedGroup(place, size))
            return len(self.groups) - 1
        first, *others = fitting
        for number in others:
            self.groups[first].members += self.groups[number].members
            self.groups[first].elements = max(self.groups[first].elements, self.groups[number].elements)
            self.groups[number].members = []
        self.maker = {name: first if number in others else number for name, number in self.maker.items()}
        return first


def roots(program: Program, graph: Graph) -> dict[str, str]:
    """Value -> the one that first held its storage."""
    values = [stored.value for stored in (*program.parameters, *program.buffers)]
    return storage_roots(program.instructions, graph, (*values, *program.inputs))


def is_view(instruction: Instruction, graph: Graph) -> bool:
    """True if the instruction makes only another description (a view) of what it reads."""
    known = facts(instruction, graph)
    return bool(known.results) and len(known.aliases) == len(known.results)


def is_joined(instruction: Compute, graph: Graph) -> bool:
    """True if a compiler writes the kernel of the instruction."""
    op_record = record(instruction.target)
    plain = instruction.target in WRITTEN and op_record.work is None and not op_record.chooses
    counted = op_record.traffic is None or instruction.target in ONE_BY_ONE
    alone = not instruction.variant and not instruction.host and bool(block_of(instruction.module))
    return plain and counted and alone and any(instruction.operands)


def _joined_elements(program: Program, instruction: Instruction, graph: Graph) -> int | None:
    if isinstance(instruction, Compute) and is_joined(instruction, graph):
        return elements(program, instruction)
    return None


def elements(program: Program, instruction: Compute) -> int:
    """Number of elements that the instruction goes over: those of its largest operand or result."""
    return max(program.largest[name].numel for name in (*instruction.operands, *instruction.results) if name)


def _readers(program: Program, graph: Graph, numbers: dict[int, int]) -> dict[str, tuple[int, ...]]:
    root = roots(program, graph)
    readers: dict[str, dict[int, None]] = {}
    for index, instruction in enumerate(program.instructions):
        if is_view(instruction, graph):
            continue
        number = numbers.get(index, -1 - index)
        for name in facts(instruction, graph).operands:
            if name is not None:
                readers.setdefault(root[name], {})[number] = None
    return {name: tuple(kernels) for name, kernels in readers.items()}
