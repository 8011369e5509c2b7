"""A package pruned to what its plan needs.

Conditions that the plan decides are resolved; functions, methods, classes, constants, imports and files that the
programs do not reach are removed."""

from __future__ import annotations

import ast
import contextlib
import gc
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import lru_cache
from typing import Any

from autoshard.emit.pruning.constant_arguments import Outside, constant_edits
from autoshard.emit.pruning.constant_definitions import constant_attributes, constant_functions
from autoshard.emit.pruning.constant_folding import UNKNOWN, Known, folded, value_of
from autoshard.emit.pruning.kept_names import MADE_BY, OUTSIDE, PASSED_ON, PROGRAMS, READ, ROOTS, SET, USED
from autoshard.emit.pruning.model_interface import ModelInterface, model_interfaces, read_of_model
from autoshard.emit.pruning.module_table import ModuleTable, Name, defined, module_name, module_table
from autoshard.emit.pruning.reachable import Reached, reached_from, resolved
from autoshard.emit.pruning.source_edits import blocks, parsed, walk
from autoshard.emit.pruning.tidied_text import tidied, with_needed_imports


def pruned(files: Mapping[str, str], models: Mapping[str, str]) -> dict[str, str]:
    """Pruned files by name. `files`: those that are equal in every package; `models`: those of this model."""
    with _without_collection():
        interface = model_interfaces(files, models)
        remaining, read = _pruned(tuple(sorted(files.items())), interface)
        read = read.union(*map(read_of_model, models.values()))
        return dict(remaining) | {name: _without_constants(text, read) for name, text in models.items()}


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Switches cyclic garbage collection off, which would traverse all trees repeatedly: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@lru_cache(maxsize=128)
def _pruned(
    files: tuple[tuple[str, str], ...], interface: tuple[ModelInterface, ...]
) -> tuple[tuple[tuple[str, str], ...], frozenset[str]]:
    """The files that stay, and the constants that they read of the model's files."""
    texts = {name: text for name, text in files if name.endswith(".py")}
    whole, reached = texts, None
    while True:
        before = texts
        texts, known = _folded(texts, interface, whole, reached)
        texts, tables, reached = _reachable(texts, interface)
        models = {module_name(model.name): module_table(model.name, model.calls) for model in interface}
        edits = constant_edits(tables, known, _outside(tables), models)
        texts = {
            name: tables[module_name(name)].source.applied(edits.get(module_name(name), []))
            for name, text in texts.items()
        }
        if texts == before:
            break
    requested = _requested(tables, reached, interface)
    texts = {
        name: with_needed_imports(name, text, requested.get(module_name(name), set())) for name, text in texts.items()
    }
    others = {name: text for name, text in files if not name.endswith(".py")}
    read = {word for module in reached.modules for word in _read(tables[module], reached, module)}
    return tuple((others | {name: tidied(text) for name, text in texts.items()}).items()), frozenset(read | READ)


def _outside(tables: Mapping[str, ModuleTable]) -> Outside:
    """Definitions that code outside the package uses: `ROOTS`, resolved to where they are defined."""
    passed = {target: count for root, count in ROOTS.items() if (target := resolved(tables, *root)) is not None}
    return Outside(passed | OUTSIDE)


def _reachable(
    texts: Mapping[str, str], interface: tuple[ModelInterface, ...]
) -> tuple[dict[str, str], dict[str, ModuleTable], Reached]:
    """Reachable code, as texts and as module tables."""
    tables = {module_name(name): module_table(name, text) for name, text in texts.items()}
    roots = dict.fromkeys([root for model in interface for root in model.imported], 0) | ROOTS
    read = {line.partition("(")[0].removeprefix("_.") for model in interface for line in model.calls.splitlines()}
    reached = reached_from(tables, roots, [program for program in PROGRAMS if program in tables], read | USED)
    idle = constant_attributes(texts.values()).keys() - reached.attributes - SET
    remaining = {}
    for name in texts:
        if module_name(name) in reached.modules or name == "runtime/__init__.py":
            remaining[name] = _without(name, tables[module_name(name)], reached, idle)
    return remaining, {module_name(name): module_table(name, text) for name, text in remaining.items()}, reached


def _read(table: ModuleTable, reached: Reached, module: str) -> Iterator[str]:
    """Every name, attribute and string of the code that stays: more than the constants that it reads."""
    for references in table.effects:
        yield from references.names | references.attributes | references.strings
    for definition in table.definitions:
        if any((module, name) in reached.names for name in definition.names):
            references = definition.references
            yield from references.names | references.attributes | references.strings
            for method, _, of_method in definition.methods:
                if any((module, name, method) in reached.methods for name in definition.names):
                    yield from of_method.names | of_method.attributes | of_method.strings


def _folded(
    texts: Mapping[str, str], interface: tuple[ModelInterface, ...], whole: Mapping[str, str], reached: Reached | None
) -> tuple[dict[str, str], dict[str, Known]]:
    """Resolves all conditions on the plan. A constant computed from others counts where it is imported, too."""
    models = {module_name(model.name): dict(model.constants) for model in interface}
    every = [constant for constants in models.values() for constant in constants.items() if constant[1] is not UNKNOWN]
    values: dict[str, set[Any]] = {}
    for constants in models.values():
        for name, value in constants.items():
            values.setdefault(name, set()).add(repr(value))
    attributes = {name: value for name, value in every if len(values[name]) == 1}
    derived: dict[Name, Any] = {}
    result = dict(texts)
    for _ in range(3):
        before = len(derived)
        for name in texts:
            module = module_name(name)
            table = module_table(name, result[name])
            known = _known(table, models, derived, attributes)
            for definition in table.definitions:
                node = definition.node
                if isinstance(node, ast.Assign | ast.AnnAssign) and _depends(node.value, known):
                    value = value_of(node.value, known)
                    if value is not UNKNOWN and len(definition.names) == 1:
                        derived[module, definition.names[0]] = value
        if len(derived) == before:
            break
    calls = _constant_functions(texts)
    if reached is not None:
        calls |= {name: value for name, (value, makers) in MADE_BY.items() if reached.names.isdisjoint(makers)}
    vals = constant_attributes(texts.values())
    attributes |= {name: value for name, value in vals.items() if name not in SET}
    tables = {module_name(name): module_table(name, text) for name, text in texts.items()}
    facts = {}
    for name in texts:
        module = module_name(name)
        known = _known(tables[module], models, derived, attributes, module)
        vals = {here: calls[key] for here in _names(tables[module]) if (key := resolved(tables, module, here)) in calls}
        facts[module] = replace(known, calls=vals)
        relevant = _relevant(facts[module], tables[module])
        if texts[name] is not whole[name] or any(relevant):
            result[name] = _folded_text(result[name], relevant)
    return result, facts


_Facts = tuple[tuple[tuple[str, Any], ...], ...]


def _relevant(known: Known, table: ModuleTable) -> _Facts:
    """Known facts about what the module reads: names, attributes, modules and functions."""
    every = [*(definition.references for definition in table.definitions), *table.effects]
    every += [references for definition in table.definitions for *_, references in definition.methods]
    read = frozenset().union(*(references.attributes for references in every))
    strings = frozenset().union(*(references.strings for references in every))
    modules = {
        here: tuple((name, value) for name, value in constants.items() if name in read | strings or value is UNKNOWN)
        for here, constants in known.modules.items()
    }
    attributes = {name: value for name, value in known.attributes.items() if name in read}
    return tuple(tuple(mapping.items()) for mapping in (known.names, attributes, modules, known.calls))


@lru_cache(maxsize=4096)
def _folded_text(text: str, facts: _Facts) -> str:
    names, attributes, modules, calls = map(dict, facts)
    return folded(text, Known(names, attributes, {here: dict(constants) for here, constants in modules.items()}, calls))


def _names(table: ModuleTable) -> Iterator[str]:
    yield from table.imports
    for definition in table.definitions:
        yield from definition.names


def _constant_functions(texts: Mapping[str, str]) -> dict[Name | None, Any]:
    """Functions that return one constant and do nothing else, with the constant."""
    constants: dict[Name | None, Any] = {}
    for name, text in texts.items():
        constants |= {(module_name(name), function): value for function, value in constant_functions(text)}
    return constants


def _depends(node: ast.expr | None, known: Known) -> bool:
    """Does `node` depend on a constant of the model? Other literals may be changed by the program."""
    return node is not None and any(
        isinstance(child, ast.Name) and (child.id in known.names or child.id in known.modules) for child in walk(node)
    )


def _known(
    table: ModuleTable,
    models: Mapping[str, Mapping[str, Any]],
    derived: Mapping[Name, Any],
    attributes: Mapping[str, Any],
    module: str = "",
) -> Known:
    names, modules = {}, {}
    for here, (source, name) in table.imports.items():
        if name == "" and source in models:
            modules[here] = models[source]
        value = models[source].get(name, UNKNOWN) if source in models else derived.get((source, name), UNKNOWN)
        if value is not UNKNOWN:
            names[here] = value
    names |= {name: value for (owner, name), value in derived.items() if owner == module}
    return Known(names, attributes, modules)


def _requested(
    tables: Mapping[str, ModuleTable],
    reached: Reached,
    interface: tuple[ModelInterface, ...],
) -> dict[str, set[str]]:
    """Module -> names that others import from it though they are defined elsewhere: what `runtime` re-exports."""
    requested: dict[str, set[str]] = {}
    for module, name in [root for model in interface for root in model.imported] + list(ROOTS):
        requested.setdefault(module, set()).add(name)
    for module, name in PASSED_ON:
        if resolved(tables, module, name) in reached.names:
            requested.setdefault(module, set()).add(name)
    for module in reached.modules:
        used = {*_read(tables[module], reached, module)}
        for here, (source, name) in tables[module].imports.items():
            if here in used:
                requested.setdefault(source, set()).add(name)
    return requested


def _without(name: str, table: ModuleTable, reached: Reached, idle: Set[str]) -> str:
    """A file without its unreached code. `idle`: attributes that hold a constant and that nothing reads."""
    module, source = module_name(name), table.source
    edits = [
        source.removed(node)
        for _, block in blocks(source.nodes)
        if not all(_is_idle(node, idle) for node in block)
        for node in block
        if _is_idle(node, idle)
    ]
    for definition in table.definitions:
        if not any((module, entry) in reached.names for entry in definition.names):
            edits.append(source.removed(definition.node))
            continue
        for method, node, _ in definition.methods:
            if not any((module, entry, method) in reached.methods for entry in definition.names):
                edits.append(source.removed(node))
    return source.applied(edits)


def _is_idle(node: ast.stmt, idle: Set[str]) -> bool:
    match node:
        case ast.Assign([ast.Attribute(_, name)], ast.Constant()):
            return name in idle
    return False


def _without_constants(text: str, read: frozenset[str]) -> str:
    """A file of the model without the constants and functions that nothing reads."""
    source, edits = parsed(text), []
    for node in source.tree.body:
        names = () if isinstance(node, ast.ClassDef) else defined(node)
        shown = isinstance(node, ast.FunctionDef) or all(map(str.isupper, names))
        if names and shown and read.isdisjoint(names):
            edits.append(source.removed(node))
    if not edits:
        return text
    left = with_needed_imports("", source.applied(edits), set())
    tidy = tidied(left)  # but for texts of a user's model that look like code
    return tidy if ast.dump(ast.parse(tidy)) == ast.dump(ast.parse(left)) else left
