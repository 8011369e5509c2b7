"""Storage that values share, and gathered weights that backward makes again."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.graph import Graph
from autoshard.ir.program import Compute, Program
from autoshard.program.instruction_storage import storage_roots
from autoshard.program.weights import weight_ways


@dataclass(frozen=True)
class Storage:
    """`root[value]`: the value that first held its storage. `fixed`: parameters, buffers and inputs.

    `gathers[root]`: the instructions that make a gathered weight of what is stored; `regathers[i]`: those that the
    backward of instruction i runs again, because it needs such a weight.
    """

    root: dict[str, str]
    fixed: frozenset[str]
    gathers: dict[str, tuple[int, ...]]
    regathers: dict[int, tuple[int, ...]]


def storage(program: Program, graph: Graph) -> Storage:
    """Made once for a program and its graph."""
    known = program.once(_known)
    if not known or known[-1][0] is not graph:
        known[:] = [(graph, _storage(program, graph))]
    return known[-1][1]


def _known(program: Program) -> list[tuple[Graph, Storage]]:
    """Cache of the last answer of `storage`."""
    return []


def _storage(program: Program, graph: Graph) -> Storage:
    parameters = [p.value for p in program.parameters]
    fixed = frozenset({*parameters, *(b.value for b in program.buffers), *program.inputs})
    root = storage_roots(program.instructions, graph, fixed)
    steps = program.once(weight_ways)
    gathers: dict[str, tuple[int, ...]] = {}
    repeats: dict[int, tuple[int, ...]] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Compute) and instruction.regathered:
            gathers |= {root[name]: steps[name] for name in instruction.regathered}
            repeats[index] = tuple(step for name in instruction.regathered for step in steps[name])
    return Storage(root, fixed, gathers, repeats)
