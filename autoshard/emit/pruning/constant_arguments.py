"""Parameters that have one value in every call of a package: None, False, True or nothing, as the plan has it.

Interprocedural constant propagation (Callahan, Cooper, Kennedy and Torczon, 1986), over all calls at once: a parameter
that is only passed on is as constant as what is passed. Such a parameter goes, with its arguments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.emit.pruning.call_sites import Call, CallSites, Function, annotated_class, bound_arguments, call_sites
from autoshard.emit.pruning.constant_folding import UNKNOWN, Empty, Known, value_of
from autoshard.emit.pruning.module_table import ModuleTable
from autoshard.emit.pruning.reachable import resolved
from autoshard.emit.pruning.source_edits import Edit, Source, walk

Parameter = tuple[str, str, str]  # module, qualified name of the function, parameter


@dataclass(frozen=True)
class Outside:
    """Who else calls the package: functions by module and qualified name, with how many arguments by place at most,
    or None: in any way."""

    passed: Mapping[tuple[str, str], int | None]


def constant_edits(
    tables: Mapping[str, ModuleTable], known: Mapping[str, Known], outside: Outside, models: Mapping[str, ModuleTable]
) -> dict[str, list[Edit]]:
    """Module -> edits that take constant parameters away. `models`: the model's files, which stay as they are."""
    world = _World(tables, known, models)
    values = _propagated(world, outside)
    gone = {key: value for key, value in values.items() if value is not UNKNOWN and _is_replaceable(world, key)}
    gone = {key: value for key, value in gone.items() if not _is_passed_by_models(world, key)}
    edits: dict[str, list[Edit]] = {}
    removed: dict[tuple[str, str], set[str]] = {}
    for (module, name, parameter), value in gone.items():
        removed.setdefault((module, name), set()).add(parameter)
        function = world.functions[module, name].node
        edits.setdefault(module, []).extend(_in_place_of(tables[module].source, function, parameter, value))
    for (module, name), names in removed.items():
        edits[module] += _without_parameters(tables[module].source, world.functions[module, name].node, names)
    for module, call, targets in world.calls:
        for target in targets if module in tables else ():
            if target in removed:
                removal = _without_arguments(tables[module].source, call.node, world.functions[target], removed[target])
                edits.setdefault(module, []).extend(removal)
    return {module: changes for module, changes in edits.items() if changes}


class _World:
    """All functions of the package, and all calls with the functions that each may reach."""

    def __init__(
        self, tables: Mapping[str, ModuleTable], known: Mapping[str, Known], models: Mapping[str, ModuleTable]
    ) -> None:
        self.tables, self.known, self.models = {**models, **tables}, known, models
        self.sites: dict[str, CallSites] = {m: call_sites(t.source.text) for m, t in self.tables.items()}
        self.functions = {(m, function.name): function for m in tables for function in self.sites[m].functions}
        self.methods: dict[str, list[tuple[str, str]]] = {}
        for module, name in self.functions:
            if "." in name:
                self.methods.setdefault(name.partition(".")[2], []).append((module, name))
        self.passed_on = frozenset().union(*(sites.passed_on for sites in self.sites.values()))
        dynamic = any(_calls_by_name(call.node, t) for m, t in self.tables.items() for call in self.sites[m].calls)
        self.strings = frozenset().union(*(r for t in self.tables.values() for r in _strings(t) if dynamic))
        self.calls = [(m, call, [*self._targets(m, call)]) for m, sites in self.sites.items() for call in sites.calls]

    def _targets(self, module: str, call: Call) -> Iterator[tuple[str, str]]:
        match call.node.func:
            case ast.Name("cls"):
                yield from self._known((module, call.inside.partition(".")[0] + ".__init__"))
            case ast.Name(name):
                yield from self._of_name(module, name)
            case ast.Attribute(ast.Name(owner), name):
                target = resolved(self.tables, module, owner)
                if target is not None and target[1] == "":
                    yield from self._of_name(target[0], name)
                elif target is not None:
                    yield from self._known((target[0], f"{target[1]}.{name}"))
                elif kind := self._kind(module, call, owner):
                    yield from self._known((kind[0], f"{kind[1]}.{name}"))
                elif owner not in self.tables[module].imports:
                    yield from self._guessed(name)
            case ast.Attribute(owner, name) if not (isinstance(owner, ast.Call) and ast.unparse(owner) == "super()"):
                yield from self._guessed(name)

    def _guessed(self, method: str) -> Iterator[tuple[str, str]]:
        """Methods of that name, of whatever class has one."""
        if not method.startswith("__"):
            yield from self.methods.get(method, [])

    def _kind(self, module: str, call: Call, owner: str) -> tuple[str, str] | None:
        """Class of the object that a method is called on, where an annotation states it."""
        if owner == "self" and "." in call.inside:
            return module, call.inside.partition(".")[0]
        function = self.functions.get((module, call.inside))
        named = annotated_class(function, owner) if function is not None else ""
        return resolved(self.tables, module, named) if named else None

    def is_certain(self, module: str, call: Call) -> bool:
        """True if it names the function that it calls, or the class of the method."""
        match call.node.func:
            case ast.Name():
                return True
            case ast.Attribute(ast.Name(owner)):
                return owner[:1].isupper() or self._kind(module, call, owner) is not None
        return False

    def _of_name(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        target = resolved(self.tables, module, name)
        if target is not None:
            yield from self._known(target)
            yield from self._known((target[0], f"{target[1]}.__init__"))

    def _known(self, key: tuple[str, str]) -> Iterator[tuple[str, str]]:
        if key in self.functions:
            yield key


def _calls_by_name(node: ast.Call, table: ModuleTable) -> bool:
    """True for `getattr` of something that may be a method: not of the options, a user's module or a library."""
    match node:
        case ast.Call(ast.Name("getattr"), [ast.Name(owner), name, *_]):
            return not isinstance(name, ast.Constant) and owner not in {"options", "module", *table.imports}
        case ast.Call(ast.Name("getattr"), [owner, name, *_]):
            return not isinstance(name, ast.Constant) and not ast.unparse(owner).startswith("torch.")
    return False


def _strings(table: ModuleTable) -> Iterator[frozenset[str]]:
    for references in (*(d.references for d in table.definitions), *table.effects):
        yield references.strings


def _propagated(world: _World, outside: Outside) -> dict[Parameter, Any]:
    """The value of each parameter in all calls, UNKNOWN where they differ. One that no call has is not among them."""
    values: dict[Parameter, Any] = {}

    def join(key: Parameter, value: Any) -> bool:
        """True if it changes what is known."""
        value = value if _is_plain(value) else UNKNOWN
        if key in values and (values[key] is UNKNOWN or (type(value), value) == (type(values[key]), values[key])):
            return False
        values[key] = UNKNOWN if key in values else value
        return True

    for (module, name), function in world.functions.items():
        for parameter in _unknown_from_outside(world, outside, module, name, function):
            values[module, name, parameter] = UNKNOWN
        if (module, name) in outside.passed:
            for parameter, default in function.defaults.items():
                join((module, name, parameter), UNKNOWN if default is None else value_of(default, Known()))
    changed = True
    while changed:
        changed = False
        for module, call, targets in world.calls:
            for target in targets:
                function = world.functions[target]
                bound = bound_arguments(function, call.node) or {}
                for parameter in function.defaults:
                    key = (*target, parameter)
                    if values.get(key) is UNKNOWN and key in values:
                        continue
                    argument = bound.get(parameter)
                    value = UNKNOWN if argument is None else _argument(world, module, call, argument, values)
                    changed |= value is not _LATER and join(key, value)
    return values


class _Later:
    pass


_LATER = _Later()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | Empty)


def _argument(world: _World, module: str, call: Call, argument: ast.expr, values: Mapping[Parameter, Any]) -> Any:
    """The value of an argument; _LATER where it is a parameter of which no call is seen yet."""
    if isinstance(argument, ast.Name) and call.inside:
        key = (module, call.inside, argument.id)
        function = world.functions.get((module, call.inside))
        if function is not None and argument.id in function.defaults:
            return values.get(key, _LATER) if argument.id not in function.changed else UNKNOWN
    if isinstance(argument, ast.List | ast.Dict):
        return UNKNOWN  # a new one in each call, to which the function may add
    return value_of(argument, world.known.get(module, Known()))


def _unknown_from_outside(world: _World, outside: Outside, module: str, name: str, function: Function) -> Iterator[str]:
    simple = name.partition(".")[2] or name
    class_name = name.partition(".")[0]
    hidden = not function.plain or simple in world.passed_on or simple in world.strings
    if name.endswith(".__init__"):
        hidden = not function.plain or class_name in world.passed_on
    elif "." in name:
        hidden |= len(world.methods[simple]) > 1 or simple.startswith("__")
    names = [arg.arg for arg in function.positional]
    if hidden or outside.passed.get((module, name), 0) is None:
        yield from function.defaults
    else:
        yield from names[: outside.passed.get((module, name), 0)]


def _is_replaceable(world: _World, parameter: Parameter) -> bool:
    module, name, param_name = parameter
    function = world.functions[module, name]
    return param_name not in function.shown | function.changed and module not in world.models


def _is_passed_by_models(world: _World, parameter: Parameter) -> bool:
    """The model's files stay as they are, so what they pass must stay a parameter; so must what formatted texts pass,
    and calls of a method that may be another's of its name."""
    module, name, param_name = parameter
    function = world.functions[module, name]
    for caller, call, targets in world.calls:
        if (module, name) in targets and (
            caller in world.models or not world.is_certain(caller, call) or len(targets) > 1
        ):
            bound = bound_arguments(function, call.node)
            if bound is None or param_name not in bound or bound[param_name] is not function.defaults[param_name]:
                return True
    return False


def _in_place_of(source: Source, function: ast.FunctionDef, parameter: str, value: Any) -> Iterator[Edit]:
    """Edits that write the value in place of the parameter, in the body."""
    for statement in function.body:
        for node in walk(statement):
            if isinstance(node, ast.Name) and node.id == parameter:
                yield source.replaced(node, value.text if isinstance(value, Empty) else repr(value))


def _without_parameters(source: Source, function: ast.FunctionDef, names: set[str]) -> Iterator[Edit]:
    args = function.args
    by_place, by_name = [*args.posonlyargs, *args.args], args.kwonlyargs
    defaults = [None] * (len(by_place) - len(args.defaults)) + [*args.defaults, *args.kw_defaults]
    every = [*by_place, *by_name]
    spans = [(source.start(arg), source.end(default or arg)) for arg, default in zip(every, defaults, strict=True)]
    gone = [arg.arg in names for arg in every]
    star = len(by_place) if by_name and args.vararg is None else 0
    yield from _removed(source, spans, gone, star)
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        text = said = source.segment(first)
        for name in names:  # its sentence goes, too
            text = re.sub(rf"\s*`{name}`: [^`]*?\.(?=\s|\"\"\")", "", text)
        if text != said:
            yield source.replaced(first, text)


def _without_arguments(source: Source, call: ast.Call, function: Function, names: set[str]) -> Iterator[Edit]:
    positional = [arg.arg for arg in function.positional]
    every: list[Any] = [*call.args, *call.keywords]
    passed = [
        *positional[: len(call.args)],
        *[""] * (len(call.args) - len(positional)),
        *(keyword.arg for keyword in call.keywords),
    ]
    gone = [name in names and not isinstance(node, ast.Starred) for name, node in zip(passed, every, strict=True)]
    yield from _removed(source, [(source.start(node), source.end(node)) for node in every], gone)


def _removed(source: Source, spans: Sequence[tuple[int, int]], gone: Sequence[bool], star: int = 0) -> Iterator[Edit]:
    """Edits that remove items of a list and their commas. A `*` stands before item `star` while items after it stay."""
    count, place = len(spans), 0
    while place < count:
        if not gone[place]:
            place += 1
            continue
        end = place
        while end + 1 < count and gone[end + 1] and not (star and end + 1 == star and not all(gone[star:])):
            end += 1
        stays_behind = star and place == star and end + 1 < count
        if place and not stays_behind:
            yield Edit(spans[place - 1][1], spans[end][1], "")
        elif end + 1 == star and end + 1 < count:
            yield Edit(spans[place][0], source.data.index(b"*", spans[end][1]), "")
        elif end + 1 < count:
            yield Edit(spans[place][0], spans[end + 1][0], "")
        else:
            yield Edit(spans[0][0], spans[end][1] + (source.data[spans[end][1] : spans[end][1] + 1] == b","), "")
        place = end + 1
