"""Check of emitted classes, read again: each call with an effect stands where the program says, once.

Passes make code readable (nested expressions, loops, variables, deletions), and none may change what it means. So the
text itself is held against the program, statement by statement: losses that count, casts and gathers of weights, what
is gathered again, moves to and from the host, collectives, random numbers, recomputation, deletions, buffers written.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.emit.markers.effects import Effect, Written, axes_of, instruction_effects
from autoshard.ir.plan import ATTENTION, KEEP_ALL, KEEP_SOME, PLAIN, policy_results
from autoshard.ir.program import Collective, Compute, Instruction
from autoshard.program.early_reductions import ColumnParallel
from autoshard.program.module_scopes import inside, reads_of, results_of
from autoshard.program.module_tree import Item, Loop, ModuleCall
from autoshard.program.weights import gathered_weights
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.operators import record

if TYPE_CHECKING:
    from autoshard.emit.classes import ClassContext, ClassWriter


def check_markers(text: str, packages: Sequence[ClassContext | None]) -> None:
    """Raises AssertionError where a class of `text`, an emitted file, does something else than the program says."""
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    for package in packages:
        if package is not None:
            _check_calls(package)
            for writer, _ in package.written:
                _ClassReader(writer, classes[writer.definition.name]).check()


def _check_calls(package: ClassContext) -> None:
    """Checks that the bodies of the classes, each as often as called, have what the program has."""
    times = Counter({package.tree.root.name: 1})
    actual: Counter[Effect] = Counter()
    for definition in reversed(package.tree.definitions):  # callers first
        for item in definition.body:
            if isinstance(item, ModuleCall | Loop):
                times[item.definition] += times[definition.name] * (len(item.paths) if isinstance(item, Loop) else 1)
                continue
            for effect in _kinds(item):
                actual[effect] += times[definition.name]
    wanted = Counter(effect for step in package.program.instructions for effect in _kinds(step))
    assert actual == wanted, f"the classes run {actual - wanted} too much and {wanted - actual} too little"


def _kinds(item: Instruction) -> Iterator[Effect]:
    if isinstance(item, Collective):
        yield item.forward, item.backward, item.axes, item.regathered, item.once, item.reused
        return
    if isinstance(item, ColumnParallel) and item.moves is not None:
        yield from _kinds(item.moves)
    elif item.variant:
        yield item.variant, item.axes
    yield from [("again", item.target)] * len(item.regathered)
    if item.host:
        yield "host", item.target


class _ClassReader:
    """Reader of one class, of whose statements each stands for the next items of its definition."""

    def __init__(self, writer: ClassWriter, node: ast.ClassDef) -> None:
        self.writer, self.definition, self.program = writer, writer.definition, writer.package.program
        methods = {inner.name: inner for inner in node.body if isinstance(inner, ast.FunctionDef)}
        self.statements: list[Any] = list(methods["forward"].body)
        self.state = {_plain(writer.reference_to_state(value)): value for value in self._stored()}
        self.ends = self._ends()
        self.held: dict[str, str] = {}  # variable -> value
        self.brief: dict[str, int] = {}  # variable -> where what it holds is read last, if it may not stay
        self.gone: set[str] = set()
        names = [argument.arg for argument in methods["forward"].args.args[1:]]
        self._hold(names, self.definition.inputs)
        axes = dict(axes_of(methods.get("__init__")))
        self.written = Written(self._value, axes, self.definition.random_base)

    def _stored(self) -> set[str]:
        """Parameters and buffers that the class or one inside holds, and its statements name."""
        values = {value for item in self.definition.body for value in _reads(item)}
        values |= {value for pair in self.definition.updates for value in pair} | {*self.definition.outputs}
        state, scope = self.writer.package.state, self.definition.path
        inputs = set(self.definition.inputs)
        return {v for v in values - inputs if v in state and inside(state[v].path, scope)}

    def check(self) -> None:
        sizes = set(self.writer.by_input.names.values())
        while self.statements and _targets(self.statements[0]) and sizes.issuperset(_targets(self.statements[0])):
            self.statements.pop(0)
        waiting: list[Instruction] = []
        for i, item in enumerate(self.definition.body):
            for new, old in self.writer.naming.copies.get(i, []):
                node = self._next(ast.Assign)
                self._equal(node, (_targets(node), self._value(node.value)), ([new], old))
                self._hold([new], [old])
            late = [name for name, end in self.brief.items() if end < i and self._makes(item)]
            self._equal(self.statements[:1], late, [])
            if isinstance(item, ModuleCall | Loop):
                self._call(item)
            elif i in self.writer.nested:
                waiting.append(item)
            else:
                self._operators([*waiting, item])
                waiting = []
            while self.statements and isinstance(self.statements[0], ast.Delete):
                self._delete(self.statements.pop(0), i)
        self._end()

    # --- statements ---

    def _operators(self, items: list[Instruction]) -> None:
        """Checks a statement that runs these; all but the last are nested."""
        node, last = self._next(ast.Assign), items[-1]
        within = frozenset(value for item in items[:-1] for value in results_of(item))
        reads = {value for item in items for value in reads_of(item)} - within
        values = [self._value(inner) for inner in ast.walk(node.value)]
        self._equal(node, {value for value in values if value is not None} - reads, set())
        wanted = [effect for item in items for effect in instruction_effects(self.writer, item, within)]
        self._equal(node, list(self.written.effects(node.value)), wanted)
        self._hold(_targets(node), self._read_later(node, results_of(last)))
        if isinstance(last, Compute) and last.regathered:
            self._check_regather(last)

    def _check_regather(self, item: Compute) -> None:
        results = results_of(item)[-1:] if isinstance(item, ColumnParallel) else results_of(item)
        held = {value for name, value in self.held.items() if name != "_"}
        outputs = [value for value in results if self.program.value(value).requires_grad and value in held]
        if not outputs:
            return
        node = self._next(ast.Expr if len(outputs) == 1 else ast.Assign)
        first, *weights = node.value.args
        message = first.elts if isinstance(first, ast.Tuple) else [first]
        actual = _plain(node.value.func), [*map(self._value, message)], [*map(self._value, weights)]
        self._equal(node, actual, ("regather_before", outputs, [*item.regathered]))

    def _call(self, item: ModuleCall | Loop) -> None:
        node = self._next(ast.For if isinstance(item, Loop) else ast.Assign if item.results else ast.Expr)
        if isinstance(item, Loop):
            callee, count = _plain(node.target), len(node.body)
            node = node.body[0]
            self._equal(node, count, 1)
        else:
            callee = _plain(self.writer.access(item.path))
        called, arguments, keep = node.value.func, node.value.args, KEEP_ALL
        if _plain(called) == "recomputed":
            called, _, *arguments = arguments
            keep = next((ast.literal_eval(keyword.value) for keyword in node.value.keywords), "input")
        actual = _plain(called), keep, tuple(map(self._value, arguments))
        self._equal(node, actual, (callee, _policy_argument(item.keep), item.arguments))
        targets = _targets(node)
        if isinstance(item, Loop):  # a variable that a turn hands to the next is there, whoever reads the last
            self._equal(node, len(targets), len(item.results))
            self._hold(targets, [value or "" for value in item.results])
        else:
            self._hold(targets, self._read_later(node, item.results))

    def _read_later(self, node: Any, results: Sequence[str | None]) -> list[str]:
        """Value that each target gets; `_` holds the last of those that nothing reads."""
        named = [value for value in results if value is not None and self.writer.naming.names[value] != "_"]
        targets = _targets(node)
        self._equal(node, sum(name != "_" for name in targets), len(named))
        values = iter(named)
        unread = [value for value in results if value is not None and self.writer.naming.names[value] == "_"]
        last = unread[-1] if unread else self.held.get("_", "")
        return [last if name == "_" else next(values) for name in targets]

    def _end(self) -> None:
        """Checks that buffers are written, and that what the caller needs is returned."""
        if self.definition.updates:
            node = self._next(ast.With)
            calls = [stmt.value for stmt in node.body]
            actual = [(self._value(call.func.value), self._value(_viewed(call.args[0]))) for call in calls]
            self._equal(node, actual, list(self.definition.updates))
        if outputs := self.writer.outputs():
            node = self._next(ast.Return)
            returned = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            self._equal(node, [self._value(element) for element in returned], outputs)
        self._equal(self.statements[:1], [stmt for stmt in self.statements if not isinstance(stmt, ast.Pass)], [])

    # --- deletions ---

    def _ends(self) -> dict[str, int]:
        """Value -> where its storage is read last, of what is short-lived and stays within the class."""
        last: dict[str, int] = {}
        for i, item in enumerate(self.definition.body):
            results = item.results if isinstance(item, ModuleCall | Loop) else results_of(item)
            last |= dict.fromkeys((v for v in (*_reads(item), *results) if v), self.writer.nested.get(i, i))
        stay = {*self.definition.outputs, *(new for _, new in self.definition.updates), *self.definition.inputs}
        ends: dict[str, int] = {}
        for storage in (*self.program.short_lived, *((value,) for value in gathered_weights(self.program))):
            values = [value for value in storage if value in last]
            if values and stay.isdisjoint(values):
                end = max(last[value] for value in values)
                ends |= {value: min(end, ends.get(value, end)) for value in values}
        return ends

    def _makes(self, item: Item) -> bool:
        if isinstance(item, Compute):
            views = record(item.target).work is Work.VIEW
            return not views and any(self.program.value(value).shape for value in item.results)
        return not isinstance(item, Collective) or item.forward != ""

    def _delete(self, node: ast.Delete, i: int) -> None:
        for name in map(_plain, node.targets):
            self._equal(node, self.brief.pop(name, i + 1) <= i, True)
            del self.held[name]
            self.gone.add(name)

    # --- variables ---

    def _hold(self, names: Sequence[str], values: Sequence[str]) -> None:
        for name, value in zip(names, values, strict=True):
            self.held[name] = value
            self.gone.discard(name)
            self.brief.pop(name, None)
            if value in self.ends:
                self.brief[name] = self.ends[value]

    def _value(self, node: ast.AST) -> str | None:
        """The value of a variable, or of a parameter or buffer; of anything else None."""
        if isinstance(node, ast.Call) and _plain(node.func) == "local":
            return self.state.get(_plain(node.args[0]))
        if isinstance(node, ast.Name):
            self._equal(node, node.id in self.gone, False)
            return self.held.get(node.id)
        return None

    def _next(self, kind: type[ast.stmt]) -> Any:
        self._equal(self.statements[:1], [type(node) for node in self.statements[:1]], [kind])
        return self.statements.pop(0)

    def _equal(self, node: ast.AST | list[Any], actual: object, wanted: object) -> None:
        if actual != wanted:
            nodes = node if isinstance(node, list) else [node]
            line = "".join(map(ast.unparse, nodes)) or "its end"
            raise AssertionError(f"class {self.definition.name}, as written: `{line}` has {actual}, expected {wanted}")


def _reads(item: Item) -> tuple[str, ...]:
    reads = item.arguments if isinstance(item, ModuleCall | Loop) else reads_of(item)
    return tuple(value for value in reads if value is not None)


def _plain(code: Any) -> str:
    """Code as Python itself would write it."""
    return ast.unparse(ast.parse(code, mode="eval") if isinstance(code, str) else code)


def _targets(node: Any) -> list[str]:
    """The variables of an assignment."""
    if not isinstance(node, ast.Assign):
        return []
    target: Any = node.targets[0]
    return [_plain(element) for element in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _policy_argument(keep: str) -> object:
    """Policy that `recomputed` is given."""
    if keep.startswith(KEEP_SOME):
        return tuple(place if place == ATTENTION else int(place) for place, _ in policy_results(keep))
    return PLAIN.get(keep, keep)


def _viewed(node: Any) -> Any:
    """`new` of `new.view_as(old)`."""
    viewed = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "view_as"
    return node.func.value if viewed else node
