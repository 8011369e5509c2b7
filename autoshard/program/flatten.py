"""`flatten(program, tree)`: what calling the module tree runs, as a flat sequence; the check of `module_tree`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.ir.program import Collective, Instruction, Program
from autoshard.program.module_scopes import RANDOM, inside, operands_of, random_index, relative, results_of
from autoshard.program.module_tree import Definition, Loop, ModuleCall, ModuleTree


@dataclass(frozen=True)
class Flat:
    """Instructions in order, the model's outputs, and (buffer, new value) updates, all in canonical names.

    An input is named by its name, a parameter or buffer by `self.` and its path, any other value %0, %1, ... in order.
    """

    instructions: tuple[Instruction, ...]
    outputs: tuple[str, ...]
    updates: tuple[tuple[str, str], ...]


def canonical(program: Program) -> Flat:
    """The program itself in canonical names, without what has no effect (module, reason, source)."""
    names = {name: name for name in program.inputs}
    names |= {p.value: f"self.{p.path}" for p in (*program.parameters, *program.buffers)}
    instructions = []
    count = 0
    for instruction in program.instructions:
        for name in results_of(instruction):
            names[name] = f"%{count}"
            count += 1
        instructions.append(_renamed(instruction, names, 0))
    updates = {(names[buffer], names[new]) for buffer, new in program.buffer_updates}
    return Flat(tuple(instructions), tuple(names[v] for v in program.outputs), tuple(sorted(updates)))


def flatten(program: Program, tree: ModuleTree) -> Flat:
    """Flat sequence that calling the root of `tree` runs; equals `canonical(program)`."""
    caller = _Caller(program, tree)
    outputs = caller.run(tree.root, tree.root.inputs, "", tree.root.random_base)
    return Flat(tuple(caller.instructions), outputs, tuple(sorted(caller.updates)))


def _renamed(instruction: Instruction, names: dict[str, str], shift: int) -> Instruction:
    """Instruction in canonical names, its random number moved by `shift`."""
    operands = tuple(None if v is None else names[v] for v in operands_of(instruction))
    results = tuple(names[v] for v in results_of(instruction))
    if isinstance(instruction, Collective):
        assert operands[0] is not None
        return replace(instruction, operand=operands[0], result=results[0], module="", reason="")
    attributes = instruction.attributes
    number = random_index(instruction)
    if number is not None and instruction.variant in RANDOM:
        attributes = tuple((k, number + shift if k == "index" else v) for k, v in attributes)
    plain = replace(instruction, op="", module="", source="", strategy="")
    remade = tuple(names[v] for v in instruction.regathered)
    return replace(plain, operands=operands, results=results, attributes=attributes, regathered=remade)


class _Caller:
    def __init__(self, program: Program, tree: ModuleTree) -> None:
        self.program, self.tree = program, tree
        self.instructions: list[Instruction] = []
        self.updates: set[tuple[str, str]] = set()
        self.count = 0

    def run(self, definition: Definition, arguments: tuple[str, ...], path: str, base: int) -> tuple[str, ...]:
        """Call the object of class `definition` at `path`, whose first random operator has number `base`."""
        names = dict(zip(definition.inputs, arguments, strict=True))
        for p in (*self.program.parameters, *self.program.buffers):
            if inside(p.path, definition.path) and p.value not in names:
                names[p.value] = f"self.{_join(path, relative(p.path, definition.path))}"
        children = {child.path: child for child in definition.children}
        for item in definition.body:
            if isinstance(item, ModuleCall):
                taken = tuple(names[v] for v in item.arguments)
                child = children[item.path]
                results = self._child(child.path, child.definition, taken, path, base + child.random_index)
                names |= {v: value for v, value in zip(item.results, results, strict=True) if v is not None}
            elif isinstance(item, Loop):
                taken = tuple(names[v] for v in item.arguments)
                for inner in item.paths:
                    child = children[inner]
                    results = self._child(inner, item.definition, taken, path, base + child.random_index)
                    carried = dict(item.carried)
                    taken = tuple(results[carried[a]] if a in carried else v for a, v in enumerate(taken))
                names |= {v: value for v, value in zip(item.results, results, strict=True) if v is not None}
            else:
                for v in results_of(item):
                    names[v] = f"%{self.count}"
                    self.count += 1
                self.instructions.append(_renamed(item, names, base - definition.random_base))
        self.updates |= {(names[buffer], names[new]) for buffer, new in definition.updates}
        return tuple(names[v] for v in definition.outputs)

    def _child(self, path: str, name: str, arguments: tuple[str, ...], around: str, base: int) -> tuple[str, ...]:
        return self.run(self.tree.definition(name), arguments, _join(around, path), base)


def _join(around: str, path: str) -> str:
    return f"{around}.{path}" if around else path
