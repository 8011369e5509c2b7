"""Reachability in a package's modules from what starts it, definition by definition and method by method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autoshard.emit.pruning.module_table import ModuleDefinition, ModuleTable, Name, References


@dataclass
class Reached:
    """Reached code. `names`: definitions, and constants of the model's files; `methods`: by class."""

    names: set[Name] = field(default_factory=set)
    methods: set[tuple[str, str, str]] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


def resolved(tables: Mapping[str, ModuleTable], module: str, name: str) -> Name | None:
    """The module and name that define a name of a module; None outside the package."""
    while module in tables:
        table = tables[module]
        if name in table.defined:
            return module, name
        if name not in table.imports:
            return None
        module, name = table.imports[name]
        if not name:
            return (module, "") if module in tables else None
        src = tables.get(module)
        if src is None or (name not in src.defined and name not in src.imports):  # a function may have its file's name
            return (f"{module}.{name}", "") if f"{module}.{name}" in tables else None
    return None


def reached_from(
    tables: Mapping[str, ModuleTable], roots: Mapping[Name, int | None], programs: Iterable[str], read: Iterable[str]
) -> Reached:
    """Code reached from `roots`: names that others use; a class with None is used by any of its methods. `read`:
    attributes that others read. `programs`: modules that are started; in other modules, statements with effects count
    once something of the module is reached."""
    search = _ReachSearch(tables)
    for module in programs:
        search.enter(module)
    for root, count in roots.items():
        search.add_root(resolved(tables, *root), whole=count is None)
    none = frozenset[str]()
    search.todo.append(("", References(none, frozenset(read), none, frozenset(), frozenset())))
    search.run()
    return search.reached


class _ReachSearch:
    def __init__(self, tables: Mapping[str, ModuleTable]) -> None:
        self.tables, self.reached, self.todo = tables, Reached(), list[tuple[str, References]]()
        self.waiting: dict[str, list[tuple[str, str, References]]] = {}  # method -> of which classes
        self.by_name = {(m, n): item for m, table in tables.items() for item in table.definitions for n in item.names}

    def enter(self, module: str) -> None:
        if module not in self.reached.modules:
            self.reached.modules.add(module)
            self.todo += [(module, references) for references in self.tables[module].effects]

    def add(self, name: Name | None) -> None:
        if name is None or name in self.reached.names or name[0] not in self.tables:
            return
        self.reached.names.add(name)
        self.enter(name[0])
        definition = self.by_name.get(name)
        if definition is not None:
            self.todo.append((name[0], definition.references))
            self._methods(name, definition)

    def add_root(self, name: Name | None, whole: bool) -> None:
        self.add(name)
        definition = self.by_name.get(name) if name is not None else None
        for method, _, references in definition.methods if whole and definition is not None else ():
            self._method(name, method, references)  # type: ignore[arg-type]

    def _methods(self, name: Name, definition: ModuleDefinition) -> None:
        for method, _, references in definition.methods:
            if method in self.reached.attributes:
                self._method(name, method, references)
            else:
                self.waiting.setdefault(method, []).append((*name, references))

    def _method(self, name: Name, method: str, references: References) -> None:
        if (*name, method) not in self.reached.methods:
            self.reached.methods.add((*name, method))
            self.todo.append((name[0], references))

    def run(self) -> None:
        while self.todo:
            module, references = self.todo.pop()
            for name in references.names:
                self.add(resolved(self.tables, module, name))
            for owner, attribute in references.pairs:
                target = resolved(self.tables, module, owner)
                if target is not None and target[1] == "":
                    self.add(resolved(self.tables, target[0], attribute))
            for imported, name in references.imported:
                if imported in self.tables:
                    self.enter(imported)
                    self.add(resolved(self.tables, imported, name) if name else None)
            for attribute in (references.attributes | references.strings) - self.reached.attributes:
                self.reached.attributes.add(attribute)
                for owner, class_name, method_refs in self.waiting.pop(attribute, []):
                    self._method((owner, class_name), attribute, method_refs)
