"""Which consecutive instructions are a `ModuleVisit`, one of one module, and which visits run the same code (`key`).

A module whose visits run different code is dissolved into its parent, so that every module left has one body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.ir.program import Collective, Compute, Instruction, Program, ProgramParameter
from autoshard.rules.operators import VARIANTS

CONTAINERS = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
# variants whose `index` counts random operators over the whole model
RANDOM = frozenset(name for name in VARIANTS if name.startswith("random_"))


@dataclass(frozen=True)
class ModuleVisit:
    """Instructions [start, stop), all of module `path` or of modules inside it; `children` are the visits inside."""

    path: str
    start: int
    stop: int
    children: tuple[ModuleVisit, ...] = field(compare=False)

    def walk(self) -> Iterator[ModuleVisit]:
        """Itself and all runs inside, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Key:
    """Equal for runs of equal code: the class, the parameters held, and the instructions with values numbered."""

    original_class: str
    parameters: tuple[tuple[str, int], ...]
    code: tuple[Hashable, ...]
    updates: tuple[tuple[int, str], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.original_class, self.parameters, self.code, self.updates))


def operands_of(instruction: Instruction) -> tuple[str | None, ...]:
    return instruction.operands if isinstance(instruction, Compute) else (instruction.operand,)


def reads_of(instruction: Instruction) -> tuple[str | None, ...]:
    """The operands, and the weights that backward makes again."""
    operands = operands_of(instruction)
    remade = instruction.regathered if isinstance(instruction, Compute) else ()
    return (*operands, *(name for name in remade if name not in operands))


def _recomputed_modules(instruction: Instruction) -> tuple[str, ...]:
    return instruction.regathered if isinstance(instruction, Compute) else ()


def results_of(instruction: Instruction) -> tuple[str, ...]:
    return instruction.results if isinstance(instruction, Compute) else (instruction.result,)


def random_index(instruction: Instruction) -> int | None:
    """The number of a random operator in the model, None for the others."""
    if isinstance(instruction, Compute) and instruction.variant in RANDOM:
        index = dict(instruction.attributes)["index"]
        assert isinstance(index, int)
        return index
    return None


def relative(path: str, scope: str) -> str:
    """`path` as seen from module `scope` that holds it: h.0.attn, h.0 -> attn."""
    if not scope:
        return path
    assert path.startswith(scope + "."), (path, scope)
    return path[len(scope) + 1 :]


def inside(path: str, scope: str) -> bool:
    """True where `path` is something that module `scope` holds, at any depth."""
    return not scope or path.startswith(scope + ".")


class Scopes:
    """The runs of a program. `assigned[i]` is the module of instruction i after strays have moved to their parent.

    `others`: the same program at other sizes, where equal code must be equal, too.
    """

    def __init__(self, program: Program, others: Sequence[Program] = ()) -> None:
        self.program = program
        self._every = (program, *others)
        self.classes = dict(program.modules)
        self.keeps = program.step.keeps
        self.dissolved = {path for path, name in program.modules if name in CONTAINERS} | {""}
        self.assigned = [instruction.module for instruction in program.instructions]
        self.state = {p.value: p for p in (*program.parameters, *program.buffers)}
        self.buffers = {b.value for b in program.buffers}
        self.defined = {v: i for i, ins in enumerate(program.instructions) for v in results_of(ins)}
        self.uses: dict[str, list[int]] = {}
        self._named = [tuple(filter(None, reads_of(step))) for step in program.instructions]
        for i, names in enumerate(self._named):
            for name in names:
                self.uses.setdefault(name, []).append(i)
        self._ids: dict[Hashable, int] = {}
        self._read = [(*operands_of(step), *_recomputed_modules(step)) for step in program.instructions]
        self._results = [results_of(step) for step in program.instructions]
        self._random = [random_index(step) for step in program.instructions]
        self._inner: dict[tuple[str, str], tuple[Hashable, ...]] = {}
        self._of_state = {name: self._id(self._kind(p)) for name, p in self.state.items()}
        steps = zip(*(program.instructions for program in self._every), strict=True)
        self._static = [self._id(tuple(map(self._description, variants))) for variants in steps]
        self._chains: dict[str, tuple[str, ...]] = {}
        self._held: dict[str, list[ProgramParameter]] = {}
        for p in self.state.values():
            parts = p.path.split(".")
            for n in range(len(parts)):
                self._held.setdefault(".".join(parts[:n]), []).append(p)
        self._updates: dict[ModuleVisit, dict[str, str]] = {}
        self._keys: dict[ModuleVisit, Key] = {}
        self._equal: dict[Key, Key] = {}  # of equal keys one, so that their address identifies them
        self.root = self._settle()

    # --- what a run reads and leaves behind ---

    @cached_property
    def final_values(self) -> frozenset[str]:
        """Values that the root needs after the last instruction."""
        program = self.program
        updated = {new for _, new in program.buffer_updates}
        return frozenset({*program.outputs, *updated, *([program.loss] if program.loss else [])})

    def owned(self, name: str, run: ModuleVisit) -> bool:
        """True for a parameter or buffer that the run's module holds."""
        return name in self.state and inside(self.state[name].path, run.path)

    def values(self, run: ModuleVisit) -> list[str]:
        """The values a run defines, in order: their position is what equal runs have in common."""
        return [v for results in self._results[run.start : run.stop] for v in results]

    def inputs(self, run: ModuleVisit) -> list[str]:
        """The values a run reads and neither defines nor holds, in order of first use."""
        if run.path == "" and run.stop - run.start == len(self.program.instructions):
            return list(self.program.inputs)
        read = dict.fromkeys(v for names in self._named[run.start : run.stop] for v in names)
        return [v for v in read if not self._here(v, run) and not self.owned(v, run)]

    def escapes(self, name: str, run: ModuleVisit) -> bool:
        """True where a value that the run defines is needed after it."""
        if self._used_after(name, run) or self._is_output(name):
            return True
        return name in self.final_values and not self._written_back(name, run)

    def updates(self, run: ModuleVisit) -> dict[str, str]:
        """Buffer -> its new value, where the run's module holds the one, makes the other, and can write it back."""
        if run not in self._updates:
            self._updates[run] = {
                buffer: new
                for buffer, new in self.program.buffer_updates
                if self._here(new, run) and self.owned(buffer, run) and not self._used_after(buffer, run)
            }
        return self._updates[run]

    def _written_back(self, name: str, run: ModuleVisit) -> bool:
        """True where all the updates that a value is for happen inside the run."""
        buffers = [buffer for buffer, new in self.program.buffer_updates if new == name]
        return all(buffer in self.updates(run) for buffer in buffers)

    def random_base(self, run: ModuleVisit) -> int:
        """The smallest number of a random operator inside, -1 without one."""
        return min((index for index in self._random[run.start : run.stop] if index is not None), default=-1)

    def held(self, path: str) -> list[ProgramParameter]:
        """Parameters, then buffers, of a module and all inside it."""
        return self._held.get(path, [])

    def _here(self, name: str, run: ModuleVisit) -> bool:
        return run.start <= self.defined.get(name, -1) < run.stop

    def _used_after(self, name: str, run: ModuleVisit) -> bool:
        return bool(self.uses.get(name)) and self.uses[name][-1] >= run.stop

    def _is_output(self, name: str) -> bool:
        return name in self.program.outputs or name == self.program.loss

    # --- equality ---

    def key(self, run: ModuleVisit) -> Key:
        """Two runs with equal keys run the same code on values numbered in the order of their appearance."""
        if run not in self._keys:
            key = self._make_key(run)
            self._keys[run] = self._equal.setdefault(key, key)
        return self._keys[run]

    def _make_key(self, run: ModuleVisit) -> Key:
        held = tuple((relative(p.path, run.path), self._id(self._stored(p, run.path))) for p in self.held(run.path))
        numbers = {v: f"%{i}" for i, v in enumerate(self.values(run))}
        inputs = {v: f"@{i}:{self._type(v)}" for i, v in enumerate(self.inputs(run))}
        base = self.random_base(run)
        code: list[Hashable] = []
        for i in range(run.start, run.stop):
            operands = tuple(self._reference(v, run, numbers, inputs) for v in self._read[i])
            number = self._random[i]
            inner = self._below(self.assigned[i], run.path)
            code.append((self._static[i], inner, operands, None if number is None else number - base))
        pairs = self.updates(run).items()
        updates = tuple((int(numbers[new][1:]), relative(self.state[b].path, run.path)) for b, new in pairs)
        return Key(self.classes.get(run.path, ""), held, tuple(code), updates)

    def _below(self, module: str, scope: str) -> tuple[Hashable, ...]:
        """The known modules around what is of `module`, within `scope`."""
        if (module, scope) not in self._inner:
            within = [path for path in self._chain(module)[1:] if inside(path, scope)]
            modules = tuple((relative(path, scope), self.classes[path], self.keeps.get(path)) for path in within)
            self._inner[module, scope] = modules
        return self._inner[module, scope]

    def _reference(self, name: str | None, run: ModuleVisit, numbers: dict[str, str], inputs: dict[str, str]) -> str:
        if name is None:
            return "none"
        if name in numbers or name in inputs:
            return numbers.get(name) or inputs[name]
        return "self." + relative(self.state[name].path, run.path)

    def _type(self, name: str) -> int:
        values = [program.value(name) for program in self._every]
        shapes = tuple((value.shape, value.local_shape) for value in values)
        return self._id((shapes, values[0].dtype, str(values[0].layout)))

    def _stored(self, p: ProgramParameter, scope: str) -> Hashable:
        ties = tuple(f".{relative(tie, scope)}" if inside(tie, scope) else tie for tie in p.ties)
        return self._of_state[p.value], ties

    def _kind(self, p: ProgramParameter) -> Hashable:
        """Everything of a parameter or buffer except its names."""
        kind = (p.dtype, p.trainable, p.persistent, p.value in self.buffers)
        return (p.shape, p.split_shape, str(p.split_layout), kind, repr(p.init), self._type(p.value))

    def _description(self, ins: Instruction) -> Hashable:
        """Everything of an instruction except its names, its place, and the number of a random operator."""
        types = tuple(self._type(v) for v in results_of(ins))
        if isinstance(ins, Collective):
            placements = (" ".join(map(str, ins.before)), " ".join(map(str, ins.after)))
            does = (ins.forward, ins.backward, ins.joined, ins.cut, ins.regathered, ins.gradient_dtype, ins.once)
            return (ins.axes, *placements, *does, ins.early, ins.reused, types)
        attributes = [(k, v) for k, v in ins.attributes if not (k == "index" and ins.variant in RANDOM)]
        return (ins.target, repr(attributes), ins.variant, ins.axes, len(ins.operands), types)

    def _id(self, description: Hashable) -> int:
        return self._ids.setdefault(description, len(self._ids))

    # --- the tree ---

    def _chain(self, path: str) -> tuple[str, ...]:
        """The known modules around `path`, outermost first, itself included; dissolved ones left out."""
        if path not in self._chains:
            parts = path.split(".") if path else []
            prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
            self._chains[path] = ("", *(p for p in prefixes if p in self.classes and p not in self.dissolved))
        return self._chains[path]

    def _run(self, path: str, start: int, stop: int, depth: int) -> ModuleVisit:
        children: list[ModuleVisit] = []
        i = start
        while i < stop:
            chain = self._chain(self.assigned[i])
            if len(chain) <= depth + 1:
                i += 1
                continue
            end = i + 1
            while end < stop and self._chain(self.assigned[end])[: depth + 2] == chain[: depth + 2]:
                end += 1
            children.append(self._run(chain[depth + 1], i, end, depth + 1))
            i = end
        return ModuleVisit(path, start, stop, tuple(children))

    def _settle(self) -> ModuleVisit:
        """Move strays and dissolve modules until every module has one body; ends, as each pass shortens paths."""
        while True:
            self._chains.clear()
            self._inner.clear()
            self._keys.clear()
            root = self._run("", 0, len(self.assigned), 0)
            visits: dict[str, list[ModuleVisit]] = {}
            for child in root.walk():
                if child.path:
                    visits.setdefault(child.path, []).append(child)
            torn = {path: runs for path, runs in visits.items() if len(runs) > 1 and not self._same(runs)}
            if not torn and not self._strip(root):
                return root
            for path, runs in torn.items():
                if not any(path != other and inside(path, other) for other in torn):
                    self._mend(path, runs)

    def _strip(self, root: ModuleVisit) -> bool:
        """Give the collectives that a visit begins with to its parent where the rest then equals another visit.

        So the first block, which gets its input from elsewhere, has the code of the others. True where one was found.
        """
        known = Counter(self.key(run) for run in root.walk() if run.path)  # none is as long as the whole
        for run in root.walk():
            if not run.path or known[self.key(run)] > 1:
                continue
            start = run.start
            while start + 1 < run.stop and _may_leave(self.program.instructions[start]):
                start += 1
                if self.key(ModuleVisit(run.path, start, run.stop, ())) in known:
                    self.assigned[run.start : start] = [self._chain(run.path)[-2]] * (start - run.start)
                    return True
        return False

    def _same(self, runs: list[ModuleVisit]) -> bool:
        """True where one object can make all these visits."""
        if len({run.stop - run.start for run in runs}) > 1:
            return False
        return len({(self.key(run), self.random_base(run)) for run in runs}) == 1

    def _mend(self, path: str, runs: list[ModuleVisit]) -> None:
        """Give strays (short visits next to a long one) to the parent, or dissolve the module."""
        longest = max(run.stop - run.start for run in runs)
        strays = [run for run in runs if 2 * (run.stop - run.start) <= longest]
        others = [run for run in runs if run not in strays]
        if not strays or not self._same(others):
            self.dissolved.add(path)
            return
        parent = self._chain(path)[-2]
        for run in strays:
            for i in range(run.start, run.stop):
                self.assigned[i] = parent


def called_in(program: Program, path: str) -> list[int]:
    """The instructions of a call of the module at `path`, as the code has it."""
    modules = program.once(Scopes).assigned
    return [i for i, module in enumerate(modules) if module == path or inside(module, path)]


def without_call(scopes: Scopes, paths: Iterable[str]) -> list[str]:
    """Paths, among `paths`, that have instructions but are no module of the code."""
    called = {run.path for run in scopes.root.walk()}
    modules = dict.fromkeys(step.module for step in scopes.program.instructions)
    left = [path for path in paths if path not in called]
    return [path for path in left if any(module == path or inside(module, path) for module in modules)]


def _may_leave(first: Instruction) -> bool:
    """A collective, but none that is part of the call of the linear that reads it."""
    return isinstance(first, Collective) and not first.early
