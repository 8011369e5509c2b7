"""The module structure of a program: one `Definition` per distinct block of code, calls of them, and loops over calls.

A module gets a class of its own where it repeats in a row, holds modules with parameters, or is long; the small rest (a
linear, a layer norm) is written out in its parent, as a user would. `flatten` (next to this file) undoes all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.code_text import fresh, identifier
from autoshard.errors import UsageError
from autoshard.ir.plan import KEEP_ALL
from autoshard.ir.program import Compute, Instruction, Program
from autoshard.program.module_scopes import ModuleVisit, Scopes, reads_of, relative, without_call

HANDFUL = 4  # computations: a module with more gets a class of its own, a series of equal small ones a loop
UNNAMED = "Sequential"  # a class that says nothing: gets a class of its own only to be looped over


@dataclass(frozen=True)
class Child:
    """A module held at `path` (as seen from its holder). Its random operators are numbered from `random_index`,
    counted from the holder's own first number."""

    path: str
    definition: str
    random_index: int = 0


@dataclass(frozen=True)
class ModuleCall:
    """One call of the child at `path`. `results` has a value, or None where it is not used, per output. `keep`: what
    backward finds of it, as in `BlockPolicy`."""

    path: str
    definition: str
    arguments: tuple[str, ...]
    results: tuple[str | None, ...]
    keep: str = KEEP_ALL


@dataclass(frozen=True)
class Loop:
    """Calls of the children at `paths`, one after another. `arguments` are those of the first call; each `carried`
    (argument, result) hands a result to the next call, the other arguments stay; `results` are those of the last."""

    paths: tuple[str, ...]
    definition: str
    arguments: tuple[str, ...]
    carried: tuple[tuple[int, int], ...]
    results: tuple[str | None, ...]
    keep: str = KEEP_ALL  # of each


Item = Instruction | ModuleCall | Loop


@dataclass(frozen=True)
class Definition:
    """One class. Value names are those of its first visit; `parameters` are (path inside, value name) pairs.

    `outputs` are all values that any visit's surroundings need. `updates` are (buffer value, new value) pairs to write
    back at the end. `random_base` is the model-wide number of the first random operator inside, -1 without one.
    `path` is the module of the first visit, `instances` the number of different modules of this class.
    """

    name: str
    original_class: str
    path: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    children: tuple[Child, ...]
    body: tuple[Item, ...]
    updates: tuple[tuple[str, str], ...]
    random_base: int
    instances: int


@dataclass(frozen=True)
class ModuleTree:
    """Definitions, inner ones first; the last is the whole model."""

    definitions: tuple[Definition, ...]

    @property
    def root(self) -> Definition:
        return self.definitions[-1]

    def definition(self, name: str) -> Definition:
        return next(d for d in self.definitions if d.name == name)


def module_tree(program: Program, reserved: frozenset[str] = frozenset(), others: Sequence[Program] = ()) -> ModuleTree:
    """The structure of `program`. Class names avoid `reserved`; `others`: as of `Scopes`. Deterministic."""
    return _Builder(Scopes(program, others) if others else program.once(Scopes), reserved).build()


class _Builder:
    def __init__(self, scopes: Scopes, reserved: frozenset[str]) -> None:
        self.scopes = scopes
        self.program = scopes.program
        self.taken = set(reserved)
        looped = {scopes.key(run) for outer in scopes.root.walk() for run in self._looped(outer.children)}
        self.groups: dict[object, list[ModuleVisit]] = {}
        for run in _inner_first(scopes.root):
            wanted = run.path in scopes.keeps or scopes.key(run) in looped
            if run is scopes.root or wanted or self._deserves_class(run):
                self.groups.setdefault(scopes.key(run), []).append(run)
        self.positions: dict[object, list[int]] = {}
        self.names: dict[object, str] = {}
        self._check_policies()

    def build(self) -> ModuleTree:
        self._name_all()
        return ModuleTree(tuple(self._definition(key, runs) for key, runs in self.groups.items()))

    def _check_policies(self) -> None:
        """UsageError for a module to be recomputed that is no block of the code."""
        for path in without_call(self.scopes, self.scopes.keeps):
            message = f"{path} can't be recomputed by itself: its operators don't stand together"
            raise UsageError(message, "a module that holds it, or one that it holds")

    # --- which modules get a class ---

    def _looped(self, runs: tuple[ModuleVisit, ...]) -> list[ModuleVisit]:
        """The runs of small modules that stand in a row long enough for a loop."""
        visits: list[ModuleVisit] = []
        for series in _series(runs, lambda a, b: self.scopes.key(a) == self.scopes.key(b)):
            if len(series) > 1 and sum(run.stop - run.start for run in series) > HANDFUL and self._chains(series):
                visits += series
        return visits

    def _chains(self, series: list[ModuleVisit]) -> bool:
        """True where each visit reads what the one before made."""
        values = [set(self.scopes.values(run)) for run in series]
        return all(values[i] & set(self.scopes.inputs(run)) for i, run in enumerate(series[1:]))

    def _deserves_class(self, run: ModuleVisit) -> bool:
        if self.scopes.classes.get(run.path) == UNNAMED:
            return False
        instructions = self.program.instructions[run.start : run.stop]
        computations = sum(isinstance(ins, Compute) for ins in instructions)
        holds_modules = any("." in relative(p.path, run.path) for p in self.scopes.held(run.path))
        return computations > HANDFUL or (holds_modules and computations > 1)

    # --- names ---

    def _name_all(self) -> None:
        """Name all classes in order of execution, so that the first block is GPT2Block and another one GPT2Block2."""
        order = sorted(self.groups.items(), key=lambda item: (item[1][0].start, -item[1][0].stop, item[1][0].path))
        for key, runs in order:
            path = runs[0].path
            original = self.scopes.classes.get(path) or (_camel(path) if path else self.program.name)
            self.names[key] = fresh(_class_name("Block" if original == UNNAMED and path else original), self.taken)
            self.taken.add(self.names[key])

    # --- definitions ---

    def _definition(self, key: object, runs: list[ModuleVisit]) -> Definition:
        first = runs[0]
        positions = self._output_positions(key)
        values = self.scopes.values(first)
        is_root = first is self.scopes.root
        body: list[Item] = []
        children: dict[str, Child] = {}
        needed = self._needed(first, positions, values)
        self._fill(first, first, needed, body, children)
        parameters = [
            (relative(p.path, first.path), p.value)
            for p in self.scopes.held(first.path)
            if not any(relative(p.path, first.path).startswith(child + ".") for child in children)
        ]
        return Definition(
            name=self.names[key],
            original_class=self.scopes.classes.get(first.path, ""),
            path=first.path,
            inputs=tuple(self.scopes.inputs(first)),
            outputs=self.program.outputs if is_root else tuple(values[i] for i in positions),
            parameters=tuple(parameters),
            children=tuple(children.values()),
            body=tuple(_with_loops(body, needed)),
            updates=tuple(self._updates_here(first)),
            random_base=self.scopes.random_base(first),
            instances=len({run.path for run in runs}),
        )

    def _updates_here(self, run: ModuleVisit) -> list[tuple[str, str]]:
        """Updates that no inner class writes back already."""
        classes = [child for child in run.walk() if child != run and self._is_class(child)]
        inner = {buffer for child in classes for buffer in self.scopes.updates(child)}
        return [(buffer, new) for buffer, new in self.scopes.updates(run).items() if buffer not in inner]

    def _is_class(self, run: ModuleVisit) -> bool:
        return self.scopes.key(run) in self.groups

    def _output_positions(self, key: object) -> list[int]:
        """Positions, among the values that the runs of a key define, of those that are needed after some visit."""
        if key not in self.positions:
            needed: set[int] = set()
            for run in self.groups[key]:
                needed |= {i for i, name in enumerate(self.scopes.values(run)) if self.scopes.escapes(name, run)}
            self.positions[key] = sorted(needed)
        return self.positions[key]

    def _needed(self, run: ModuleVisit, positions: list[int], values: list[str]) -> set[str]:
        """Values that must be there when the body ends."""
        outputs = set(self.program.outputs) if run is self.scopes.root else {values[i] for i in positions}
        return outputs | {new for _, new in self._updates_here(run)}

    def _fill(
        self, run: ModuleVisit, scope: ModuleVisit, needed: set[str], body: list[Item], children: dict[str, Child]
    ) -> None:
        """Append the items of `run` to the body of `scope`, the run or one around it."""
        position = run.start
        for child in run.children:
            body += self.program.instructions[position : child.start]
            if self._is_class(child):
                body.append(self._call(child, scope, needed, children))
            else:
                self._fill(child, scope, needed, body, children)
            position = child.stop
        body += self.program.instructions[position : run.stop]

    def _call(self, run: ModuleVisit, scope: ModuleVisit, needed: set[str], children: dict[str, Child]) -> ModuleCall:
        key = self.scopes.key(run)
        path = relative(run.path, scope.path)
        base = self.scopes.random_base(run)
        offset = base - self.scopes.random_base(scope) if base >= 0 else 0
        children.setdefault(path, Child(path, self.names[key], offset))
        values = self.scopes.values(run)
        results = [values[i] for i in self._output_positions(key)]
        used = tuple(v if v in needed or self.scopes.escapes(v, run) else None for v in results)
        keep = self.scopes.keeps.get(run.path, KEEP_ALL)
        return ModuleCall(path, self.names[key], tuple(self.scopes.inputs(run)), used, keep)


def _inner_first(run: ModuleVisit) -> Iterator[ModuleVisit]:
    for child in run.children:
        yield from _inner_first(child)
    yield run


def _series(runs: tuple[ModuleVisit, ...], same: Callable[[ModuleVisit, ModuleVisit], bool]) -> list[list[ModuleVisit]]:
    """Consecutive equal visits of list items (h.0, h.1, ...), grouped."""
    series: list[list[ModuleVisit]] = []
    for run in runs:
        last = series[-1][-1] if series else None
        if last is not None and last.stop == run.start and follows(last.path, run.path) and same(last, run):
            series[-1].append(run)
        else:
            series.append([run])
    return series


def follows(first: str, second: str) -> bool:
    """True for two neighbours of one list: h.3, h.4."""
    stem, _, number = first.rpartition(".")
    return number.isdecimal() and second == ".".join(filter(None, (stem, str(int(number) + 1))))


# --- loops ---


def _with_loops(body: list[Item], needed: set[str]) -> list[Item]:
    """Replace series of chained calls by loops. `needed` must be there at the end of the body."""
    last_use = {name: i for i, item in enumerate(body) for name in _reads(item)}
    last_use.update(dict.fromkeys(needed, len(body)))
    result: list[Item] = []
    i = 0
    while i < len(body):
        stop = i + 1
        while stop < len(body) and _chained(body, i, stop, last_use):
            stop += 1
        result.append(_loop([c for c in body[i:stop] if isinstance(c, ModuleCall)]) if stop - i > 1 else body[i])
        i = stop
    return result


def _chained(body: list[Item], first: int, this: int, last_use: dict[str, int]) -> bool:
    """True where call `this` continues the loop that begins at call `first`."""
    start, before, after = body[first], body[this - 1], body[this]
    if not (isinstance(start, ModuleCall) and isinstance(before, ModuleCall) and isinstance(after, ModuleCall)):
        return False
    same = (before.definition, before.keep) == (after.definition, after.keep)
    if not same or not follows(before.path, after.path):
        return False
    results = {name: r for r, name in enumerate(before.results) if name is not None}
    carried = _carried(before, after)
    if this - first > 1:
        previous = body[this - 2]
        assert isinstance(previous, ModuleCall)
        if _carried(previous, before) != carried:
            return False
    fixed = set(range(len(after.arguments))) - {a for a, _ in carried}
    if not carried or any(after.arguments[a] != before.arguments[a] for a in fixed):
        return False
    return all(last_use.get(name, -1) <= this for name in results)


def _carried(before: ModuleCall, after: ModuleCall) -> tuple[tuple[int, int], ...]:
    """(argument, result) positions of what `before` hands to `after`."""
    results = {name: r for r, name in enumerate(before.results) if name is not None}
    return tuple((a, results[name]) for a, name in enumerate(after.arguments) if name in results)


def _loop(calls: list[ModuleCall]) -> Loop:
    carried = _carried(calls[0], calls[1])
    first, last = calls[0], calls[-1]
    return Loop(tuple(c.path for c in calls), first.definition, first.arguments, carried, last.results, first.keep)


def _reads(item: Item) -> tuple[str, ...]:
    if isinstance(item, ModuleCall | Loop):
        return item.arguments
    return tuple(filter(None, reads_of(item)))


# --- class names ---


def _class_name(original: str) -> str:
    name = original.rpartition(".")[2]
    return identifier(name if name[:1].isidentifier() else f"Module{name}")


def _camel(path: str) -> str:
    words = re.split(r"[._]+", re.sub(r"\.?\d+(?=\.|$)", "", path))
    return "".join(word.capitalize() for word in words[-1:] if word) or "Block"
