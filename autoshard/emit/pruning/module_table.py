"""The modules of a package as a table: what each defines, what it imports, and what every definition refers to."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autoshard.emit.pruning.source_edits import Source, parsed, walk

Name = tuple[str, str]  # module, name in it; "" stands for the module


@dataclass(frozen=True)
class References:
    """The names, attributes and strings of a piece of code, and names that it imports itself."""

    names: frozenset[str]
    attributes: frozenset[str]
    strings: frozenset[str]
    pairs: frozenset[tuple[str, str]]  # name.attribute
    imported: frozenset[Name]


@dataclass(frozen=True)
class ModuleDefinition:
    """A function, class or variable of a module. `methods` of a class without bases, removable one by one."""

    node: ast.stmt
    names: tuple[str, ...]
    references: References
    methods: tuple[tuple[str, ast.FunctionDef, References], ...] = ()


@dataclass(frozen=True)
class ModuleTable:
    """Definitions and imports of a module. `effects`: statements that do something when the module is imported."""

    source: Source
    definitions: tuple[ModuleDefinition, ...]
    imports: Mapping[str, Name]
    effects: tuple[References, ...]

    @cached_property
    def defined(self) -> frozenset[str]:
        return frozenset(name for definition in self.definitions for name in definition.names)


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@lru_cache(maxsize=2048)
def module_table(file: str, text: str) -> ModuleTable:
    source = parsed(text)
    definitions, effects = [], []
    imports: dict[str, Name] = {}
    for node in flat(source.tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= dict(bindings(file, node))
        elif names := defined(node):
            definitions.append(_definition(file, node, names))
        elif not _is_docstring(node):
            effects.append(references(file, [node]))
    return ModuleTable(source, tuple(definitions), imports, tuple(effects))


def flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, with those under `if TYPE_CHECKING`."""
    for node in body:
        if is_type_checking(node):
            assert isinstance(node, ast.If)
            yield from node.body
        else:
            yield node


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def defined(node: ast.stmt) -> tuple[str, ...]:
    match node:
        case ast.FunctionDef(name) | ast.ClassDef(name):
            return (name,)
        case ast.Assign(targets):
            names = tuple(part.id for target in targets for part in walk(target) if isinstance(part, ast.Name))
            return names if all(isinstance(target, ast.Name | ast.Tuple) for target in targets) else ()
        case ast.AnnAssign(ast.Name(name)):
            return (name,)
    return ()


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def bindings(file: str, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Name]]:
    """Yields local name -> (module, name there); the name is "" for an import of a whole module."""
    if isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name, (alias.name, "")) for alias in node.names)
        return
    module = imported_module(file, node)
    yield from ((alias.asname or alias.name, (module, alias.name)) for alias in node.names)


def imported_module(file: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    folder = file.rpartition("/")[0].split("/")
    base = folder[: len(folder) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def references(file: str, nodes: Sequence[ast.AST]) -> References:
    names, attributes, strings = set[str](), set[str](), set[str]()
    pairs, imported = set[tuple[str, str]](), set[Name]()
    for node in [part for root in nodes for part in walk(root)]:
        match node:
            case ast.Name(name):
                names.add(name)
            case ast.Attribute(value, attribute, ast.Load()):
                attributes.add(attribute)
                if isinstance(value, ast.Name):
                    pairs.add((value.id, attribute))
            case ast.Constant(str(text)):
                strings.add(text)
            case ast.ImportFrom() | ast.Import():
                imported.update(origin for _, origin in bindings(file, node))
            case ast.Call(ast.Name("cast"), [ast.Constant(str(text)), *_]):
                names.update(part.id for part in ast.walk(ast.parse(text, mode="eval")) if isinstance(part, ast.Name))
    simple = frozenset(names), frozenset(attributes), frozenset(strings)
    return References(*simple, frozenset(pairs), frozenset(imported))


def _definition(file: str, node: ast.stmt, names: tuple[str, ...]) -> ModuleDefinition:
    if (
        not isinstance(node, ast.ClassDef)
        or node.keywords
        or any(ast.unparse(base) != "Protocol" for base in node.bases)
    ):
        return ModuleDefinition(node, names, references(file, [node]))
    methods = [func for func in node.body if isinstance(func, ast.FunctionDef) and not func.name.startswith("__")]
    others = [statement for statement in node.body if statement not in methods]
    entries = tuple((method.name, method, references(file, [method])) for method in methods)
    return ModuleDefinition(node, names, references(file, [*node.decorator_list, *node.bases, *others]), entries)
