"""A package with what its plan needs and nothing else.

Conditions that the plan decides are decided; functions, methods, classes, constants, imports and files that nothing
reaches from the programs are left out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from autoshard.code_text import WIDTH
from autoshard.emit.pruning.call_sites import call_sites
from autoshard.emit.pruning.constant_arguments import Outside, constant_edits
from autoshard.emit.pruning.constant_folding import (
    GIVEN,
    NO_CONTEXT,
    UNKNOWN,
    Known,
    constant_attributes,
    constant_functions,
    folded,
    value_of,
)
from autoshard.emit.pruning.module_table import (
    ModuleTable,
    Name,
    defined,
    flat,
    is_type_checking,
    module_name,
    module_table,
)
from autoshard.emit.pruning.reachable import Reached, reached_from, resolved
from autoshard.emit.pruning.source_edits import Edit, blocks, parsed, walk

PROGRAMS = ("train", "convert", "train_servers")
# What README.md shows, and verification and programs of one's own call.
ROOTS: dict[Name, int | None] = {
    ("runtime", "ParallelMesh"): 4, ("runtime", "leave"): 0, ("runtime", "local"): 1, ("runtime", "sharding"): 1,
    ("runtime", "assign"): 2, ("runtime", "full_value"): 4, ("runtime", "full_tensor"): 1,
    ("runtime", "full_state_dict"): 1, ("runtime", "load_full_state_dict"): 3,
    ("runtime", "init_parameters"): 3, ("train", "train_step"): 5, ("train", "make_optimizer"): None,
    ("train", "compute_gradients"): 3, ("train", "parse_arguments"): None, ("train", "take_options"): 1,
    ("train", "run"): None, ("batches", "checked"): 2, ("batches", "synthetic_batches"): None,
    ("batches", "local_part"): None, ("start_state", "start_from"): 3,
    **{
        ("runtime.servers.server_run", name): None
        for name in ("InProcess", "Dealer", "share_works", "apply_update", "labels_of_step", "update_norm")
    },
}  # fmt: skip
# Functions without effect where nothing reaches these: only they make what is looked for.
_GATHERS = (("runtime.redistribution", "regather"), ("runtime.redistribution", "gather_once"))
MADE_BY: dict[Name, tuple[Any, tuple[Name, ...]]] = {
    ("runtime.weights", "gathered_of"): (None, _GATHERS),
    ("runtime.weights", "regather_before"): (GIVEN, _GATHERS),
    ("runtime.weights", "regathering"): (NO_CONTEXT, _GATHERS),
    ("runtime.weights", "cast_of"): (None, (("runtime.redistribution", "cast_weight"),)),
}
PASSED_ON = (("runtime", "Stages"),)  # where there is such a thing
USED = frozenset({"groups", "joint", "global_rank"})  # methods of the mesh that verification calls
SET = frozenset({"exact", "seed", "step", "training", "grad"})  # attributes that others set
OUTSIDE = {
    ("runtime.mesh", "ParallelMesh.__init__"): 4, ("runtime.mesh", "ParallelMesh.from_environment"): 2,
    ("train", "make_scaler"): 2,
}  # fmt: skip
VARIED = frozenset({"PLAN", "DEVICES_PER_NODE"})  # constants that decide nothing, of another value in each package
# Constants of model_parallel.py that other programs, or people, read.
READ = frozenset({"PLAN", "MESH", "INPUTS", "LABEL_COUNTS", "FREE_SIZES", "FIXED_SIZES"})


def pruned(files: Mapping[str, str], models: Mapping[str, str]) -> dict[str, str]:
    """`files`: those that are equal in every package, by name, `models` those of this model."""
    methods = _methods(tuple(text for name, text in sorted(files.items()) if name.endswith(".py")))
    interface = tuple(
        _Interface(name, _constants(text), _imported(name, text), _calls(text, methods))
        for name, text in sorted(models.items())
    )
    kept, read = _pruned(tuple(sorted(files.items())), interface)
    read = read.union(*map(_read_of_models, models.values()))
    return dict(kept) | {name: _without_constants(text, read) for name, text in models.items()}


@dataclass(frozen=True)
class _Interface:
    """What a file of the model means for others: its constants, what it imports, and its calls, as code."""

    name: str
    constants: tuple[tuple[str, Any], ...]
    imported: tuple[Name, ...]
    calls: str


_Value = bool | int | str | None | tuple[Any, ...]


@lru_cache(maxsize=256)
def _constants(text: str) -> tuple[tuple[str, _Value], ...]:
    """Module-level constants: short ones with their value, others as UNKNOWN."""
    found: list[tuple[str, Any]] = []
    for node in parsed(text).tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = [name for name in defined(node) if name.isupper() and name not in VARIED]
            value = value_of(node.value, Known())
            pairs = zip(
                names, value if len(names) > 1 and isinstance(value, tuple) else [value] * len(names), strict=True
            )
            found += pairs
    return tuple(found)


@lru_cache(maxsize=256)
def _imported(name: str, text: str) -> tuple[Name, ...]:
    """What a file of the model needs of others."""
    table = module_table(name, text)
    inner = {
        own
        for references in (*(d.references for d in table.definitions), *table.effects)
        for own in references.imported
    }
    return tuple(sorted({*table.imports.values(), *inner}))


@lru_cache(maxsize=256)
def _calls(text: str, methods: frozenset[str]) -> str:
    """The calls of a file that may be of the package's functions or methods, each once, with no more of their arguments
    than whether these are constants."""
    source = parsed(text)
    table = module_table("", text)
    lines = set()
    called = {node.func for node in walk(source.tree) if isinstance(node, ast.Call)}
    for node in walk(source.tree):
        if isinstance(node, ast.Call) and (name := _called(node.func, table, methods)):
            given = ["*_" if isinstance(own, ast.Starred) else _word(own) for own in node.args]
            given += [f"{own.arg}={_word(own.value)}" for own in node.keywords]
            lines.add(f"{name}({', '.join(given)})")
        elif isinstance(node, ast.Attribute) and node.attr in methods and node not in called:
            lines.add(f"_.{node.attr}")
    imports = [source.segment(own) for own in source.tree.body if isinstance(own, ast.ImportFrom)]
    return "\n".join([*imports, *sorted(lines)]) + "\n"


@lru_cache(maxsize=4)
def _methods(texts: tuple[str, ...]) -> frozenset[str]:
    """The names of all methods."""
    return frozenset(own.name.partition(".")[2] for text in texts for own in call_sites(text).functions)


def _called(node: ast.expr, table: ModuleTable, methods: frozenset[str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"_.{node.attr}" if node.attr in methods else ""
    return node.id if isinstance(node, ast.Name) and node.id in table.imports else ""


def _word(node: ast.expr) -> str:
    return repr(node.value) if isinstance(node, ast.Constant) and node.value in (None, True, False) else "_"


@lru_cache(maxsize=128)
def _pruned(
    files: tuple[tuple[str, str], ...], interface: tuple[_Interface, ...]
) -> tuple[tuple[tuple[str, str], ...], frozenset[str]]:
    """The files that stay, and the constants of the model's files that they read."""
    texts = {name: text for name, text in files if name.endswith(".py")}
    whole, reached = texts, None
    while True:
        before = texts
        texts, known = _folded(texts, interface, whole, reached)
        texts, tables, reached = _reachable(texts, interface)
        models = {module_name(own.name): module_table(own.name, own.calls) for own in interface}
        edits = constant_edits(tables, known, _outside(tables), models)
        texts = {
            name: tables[module_name(name)].source.applied(edits.get(module_name(name), []))
            for name, text in texts.items()
        }
        if texts == before:
            break
    requested = _requested(tables, reached, interface)
    texts = {name: _with_imports(name, text, requested.get(module_name(name), set())) for name, text in texts.items()}
    kept = {name: text for name, text in files if not name.endswith(".py")}
    read = {own for module in reached.modules for own in _read(tables[module], reached, module)}
    return tuple((kept | {name: _tidied(text) for name, text in texts.items()}).items()), frozenset(read | READ)


def _outside(tables: Mapping[str, ModuleTable]) -> Outside:
    """`ROOTS` where they are defined."""
    passed = {own: count for root, count in ROOTS.items() if (own := resolved(tables, *root)) is not None}
    return Outside(passed | OUTSIDE)


def _reachable(
    texts: Mapping[str, str], interface: tuple[_Interface, ...]
) -> tuple[dict[str, str], dict[str, ModuleTable], Reached]:
    """What can be reached, as texts and as tables."""
    tables = {module_name(name): module_table(name, text) for name, text in texts.items()}
    roots = dict.fromkeys([own for model in interface for own in model.imported], 0) | ROOTS
    read = {line.partition("(")[0].removeprefix("_.") for model in interface for line in model.calls.splitlines()}
    reached = reached_from(tables, roots, [own for own in PROGRAMS if own in tables], read | USED)
    idle = constant_attributes(texts.values()).keys() - reached.attributes - SET
    kept = {}
    for name in texts:
        if module_name(name) in reached.modules or name == "runtime/__init__.py":
            kept[name] = _without(name, tables[module_name(name)], reached, idle)
    return kept, {module_name(name): module_table(name, text) for name, text in kept.items()}, reached


def _read(table: ModuleTable, reached: Reached, module: str) -> Iterator[str]:
    """Every name, attribute and string of what stays: more than the constants that it reads."""
    for own in table.effects:
        yield from own.names | own.attributes | own.strings
    for definition in table.definitions:
        if any((module, name) in reached.names for name in definition.names):
            own = definition.references
            yield from own.names | own.attributes | own.strings
            for method, _, of_method in definition.methods:
                if any((module, name, method) in reached.methods for name in definition.names):
                    yield from of_method.names | of_method.attributes | of_method.strings


def _folded(
    texts: Mapping[str, str], interface: tuple[_Interface, ...], whole: Mapping[str, str], reached: Reached | None
) -> tuple[dict[str, str], dict[str, Known]]:
    """All conditions on the plan decided. A constant that is made of others counts where it is imported, too."""
    models = {module_name(own.name): dict(own.constants) for own in interface}
    every = [own for constants in models.values() for own in constants.items() if own[1] is not UNKNOWN]
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
    own = constant_attributes(texts.values())
    attributes |= {name: value for name, value in own.items() if name not in SET}
    tables = {module_name(name): module_table(name, text) for name, text in texts.items()}
    facts = {}
    for name in texts:
        module = module_name(name)
        known = _known(tables[module], models, derived, attributes, module)
        own = {here: calls[key] for here in _names(tables[module]) if (key := resolved(tables, module, here)) in calls}
        facts[module] = replace(known, calls=own)
        relevant = _relevant(facts[module], tables[module])
        if texts[name] is not whole[name] or any(relevant):
            result[name] = _folded_text(result[name], relevant)
    return result, facts


_Facts = tuple[tuple[tuple[str, Any], ...], ...]


def _relevant(known: Known, table: ModuleTable) -> _Facts:
    """What is known of what the module reads: names, attributes, modules and functions."""
    every = [*(own.references for own in table.definitions), *table.effects]
    every += [own for definition in table.definitions for *_, own in definition.methods]
    read = frozenset().union(*(own.attributes for own in every))
    strings = frozenset().union(*(own.strings for own in every))
    modules = {
        here: tuple((name, value) for name, value in constants.items() if name in read | strings or value is UNKNOWN)
        for here, constants in known.modules.items()
    }
    attributes = {name: value for name, value in known.attributes.items() if name in read}
    return tuple(tuple(own.items()) for own in (known.names, attributes, modules, known.calls))


@lru_cache(maxsize=4096)
def _folded_text(text: str, facts: _Facts) -> str:
    names, attributes, modules, calls = map(dict, facts)
    return folded(text, Known(names, attributes, {here: dict(own) for here, own in modules.items()}, calls))


def _names(table: ModuleTable) -> Iterator[str]:
    yield from table.imports
    for own in table.definitions:
        yield from own.names


def _constant_functions(texts: Mapping[str, str]) -> dict[Name | None, Any]:
    """Those that return one constant and do nothing else."""
    found: dict[Name | None, Any] = {}
    for name, text in texts.items():
        found |= {(module_name(name), own): value for own, value in constant_functions(text)}
    return found


def _depends(node: ast.expr | None, known: Known) -> bool:
    """On a constant of the model: other literals may be changed by the program."""
    return node is not None and any(
        isinstance(own, ast.Name) and (own.id in known.names or own.id in known.modules) for own in walk(node)
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
    names |= {name: value for (own, name), value in derived.items() if own == module}
    return Known(names, attributes, modules)


def _requested(
    tables: Mapping[str, ModuleTable],
    reached: Reached,
    interface: tuple[_Interface, ...],
) -> dict[str, set[str]]:
    """Module -> names that others import of it though they are defined elsewhere: what `runtime` passes on."""
    found: dict[str, set[str]] = {}
    for module, name in [own for model in interface for own in model.imported] + list(ROOTS):
        found.setdefault(module, set()).add(name)
    for module, name in PASSED_ON:
        if resolved(tables, module, name) in reached.names:
            found.setdefault(module, set()).add(name)
    for module in reached.modules:
        used = {*_read(tables[module], reached, module)}
        for here, (source, name) in tables[module].imports.items():
            if here in used:
                found.setdefault(source, set()).add(name)
    return found


def _without(name: str, table: ModuleTable, reached: Reached, idle: Set[str]) -> str:
    """A file without what nothing reaches. `idle`: attributes that hold a constant and that nothing reads."""
    module, source = module_name(name), table.source
    edits = [
        source.removed(node)
        for _, block in blocks(source.nodes)
        if not all(_is_idle(node, idle) for node in block)
        for node in block
        if _is_idle(node, idle)
    ]
    for definition in table.definitions:
        if definition.names == ("__all__",):
            continue
        if not any((module, own) in reached.names for own in definition.names):
            edits.append(source.removed(definition.node))
            continue
        for method, node, _ in definition.methods:
            if not any((module, own, method) in reached.methods for own in definition.names):
                edits.append(source.removed(node))
    return source.applied(edits)


def _is_idle(node: ast.stmt, idle: Set[str]) -> bool:
    match node:
        case ast.Assign([ast.Attribute(_, name)], ast.Constant()):
            return name in idle
    return False


def _with_imports(name: str, text: str, requested: set[str]) -> str:
    """Only the imports that the rest of the file uses, or that others take from it."""
    source, edits = parsed(text), []
    table = module_table(name, text)
    used = {*requested, "TYPE_CHECKING"}
    for own in (*(d.references for d in table.definitions if d.names != ("__all__",)), *table.effects):
        used |= own.names
    for definition in table.definitions:
        for *_, references in definition.methods:
            used |= references.names
    for holder in source.tree.body:
        if is_type_checking(holder):
            inner = [own for own in flat([holder]) if isinstance(own, ast.ImportFrom)]
            if not any((own.asname or own.name) in used for node in inner for own in node.names):
                edits.append(source.removed(holder))
                used.discard("TYPE_CHECKING")
    for node in flat(source.tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            edits += _import_edit(source, node, used)
        elif defined(node) == ("__all__",):
            names = [own for own in ast.literal_eval(node.value) if own in requested]  # type: ignore[attr-defined]
            listed = "".join(f'    "{own}",\n' for own in names)
            edits.append(source.replaced(node, f"__all__ = [\n{listed}]"))
    return source.applied(edits)


def _import_edit(source: Any, node: ast.Import | ast.ImportFrom, used: set[str]) -> list[Edit]:
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return []
    kept = [own for own in node.names if (own.asname or own.name).partition(".")[0] in used]
    if kept == node.names:
        return []
    if not kept:
        return [source.removed(node)]
    pad = " " * node.col_offset
    words = [own.name + (f" as {own.asname}" if own.asname else "") for own in kept]
    head = f"from {'.' * node.level}{node.module or ''} import " if isinstance(node, ast.ImportFrom) else "import "
    one = head + ", ".join(words)
    if len(pad + one) > WIDTH:
        one = f"{head}(\n" + "".join(f"{pad}    {word},\n" for word in words) + f"{pad})"
    return [source.replaced(node, one)]


_HUGGED = re.compile(r"^( *)(\S.*[(\[{])\n +([^\n#]*[^,\n#])\n *([)\]}](?!.*# fmt).*)$", re.MULTILINE)


def _tidied(text: str) -> str:
    """Blank lines and short brackets as a formatter leaves them."""
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    text = re.sub(r"\n{3,}(?=[ \t]+\S|from |import )", "\n\n", text)
    text = re.sub(r"^((?:from|import) .*|\))\n{3,}(?!def |class |@|#)", r"\1\n\n", text, flags=re.MULTILINE)
    return _HUGGED.sub(_joined_lines, text).rstrip("\n") + "\n"


def _joined_lines(found: re.Match[str]) -> str:
    pad, head, inner, end = found.groups()
    if end == ")" and head.endswith(("= (", "return (")):
        tuple_ = isinstance(ast.parse(f"({inner})", mode="eval").body, ast.Tuple)
        head, end = (head, end) if tuple_ else (head[:-1], "")
    line = "".join((pad, head, inner, end))
    return line if len(line) <= WIDTH else found.group()


@lru_cache(maxsize=256)
def _read_of_models(text: str) -> frozenset[str]:
    """Names and attributes that a file of the model reads, its own or another's."""
    nodes = [own for own in walk(parsed(text).tree) if isinstance(own, ast.Name | ast.Attribute)]
    return frozenset(
        own.id if isinstance(own, ast.Name) else own.attr for own in nodes if isinstance(own.ctx, ast.Load)
    )


def _without_constants(text: str, read: frozenset[str]) -> str:
    """A file of the model without the constants that nothing reads."""
    source, edits = parsed(text), []
    for node in source.tree.body:
        names = defined(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ()
        if names and all(name.isupper() and name not in read for name in names):
            edits.append(source.removed(node))
    return _tidied(_with_imports("", source.applied(edits), set())) if edits else text
