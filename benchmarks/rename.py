"""Applies the recorded renames to a checkout of an older tree: files move, imports, dotted names and paths follow.

    python benchmarks/rename.py TREE [--classes | --folders]

`renames.toml` maps modules to modules, and classes (`module:Class`) to names. What an import binds is renamed with it;
a name that is already taken in that file is told and left. `--classes` is for a tree whose files have moved already;
`--folders` gives the folders of a later tree the names of today, and does nothing else: after a rebase over such a
change, run it once more. Texts that the package writes don't change.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

MAP = Path(__file__).with_name("renames.toml")
TEXTS = (".py", ".md", ".toml", ".cfg", ".txt", ".run")
KEEP = ("CHANGELOG.md", "benchmarks/renames.toml", "benchmarks/rename.py")
DONE = "\0"  # before a name that is new already
Edit = tuple[int, int, int, str]  # line, first column, last column (characters), new text


def main() -> int:
    root = Path(sys.argv[1]).resolve()
    table = tomllib.loads(MAP.read_text(encoding="utf-8"))
    if "--folders" in sys.argv:
        return rename_folders(root, table["folders"])
    modules: dict[str, str] = table["modules"]
    classes = {tuple(key.split(":")): new for key, new in table["classes"].items()}
    names = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    modules = {} if "--classes" in sys.argv else {old: new for old, new in modules.items() if old != new}
    handed = exported(root, modules)  # `from autoshard.rules import instance` is the function that the folder hands out
    shadowed = {f"{folder}.{name}" for folder, name in handed}
    classes |= {key: classes[home, key[1]] for key, home in handed.items() if (home, key[1]) in classes}
    files = [root / name for name in names if name.endswith(TEXTS) or name == ".ci/run"]
    for path in files:
        if path.relative_to(root).as_posix() in KEEP or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        new = renamed_python(text, dotted(root, path), modules, classes, shadowed) if path.suffix == ".py" else text
        new = renamed_text(new, modules).replace(DONE, "")
        if new != text:
            path.write_text(new, encoding="utf-8")
    for old, new in modules.items():
        move(root, old, new)
    return 0


def rename_folders(root: Path, folders: dict[str, str]) -> int:
    """Folders of the package by name: in imports, dotted names and paths; files that still lie in an old one move."""
    old = "|".join(folders)
    names = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    for path in (root / name for name in names if name.endswith(TEXTS) and name not in KEEP):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        new = re.sub(rf"\bautoshard\.({old})(?=\.[a-z_]| import )", lambda m: f"autoshard.{folders[m[1]]}", text)
        new = re.sub(rf"(?<![\w./-])(autoshard/)?({old})/", lambda m: f"{m[1] or ''}{folders[m[2]]}/", new)
        if new != text:
            path.write_text(new, encoding="utf-8")
    for name in names:
        parts = name.split("/")
        if parts[0] == "autoshard" and len(parts) > 2 and parts[1] in folders and (root / name).is_file():
            target = root / "autoshard" / folders[parts[1]] / "/".join(parts[2:])
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", name, str(target)], cwd=root, check=True)
    return 0


def dotted(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def exported(root: Path, modules: dict[str, str]) -> dict[tuple[str, str], str]:
    """(folder, name) that a folder's `__init__` hands out -> the module, by its new name, that it is from."""
    found = {}
    for path in root.glob("autoshard/**/__init__.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module != dotted(root, path):
                home = modules.get(node.module, node.module)
                found |= {(dotted(root, path), alias.name): home for alias in node.names}
    return found


def move(root: Path, old: str, new: str) -> None:
    source, target = (root / (name.replace(".", "/") + ".py") for name in (old, new))
    if source != target and source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", str(source), str(target)], cwd=root, check=True)


def renamed_text(text: str, modules: dict[str, str]) -> str:
    """Dotted names and paths, wherever they stand; a quoted "autoshard.plan" is a word of a file format."""
    kinds = {'"autoshard.plan"', '"autoshard.package"', '"autoshard.graph"'}

    def name(match: re.Match[str]) -> str:
        around = text[max(match.start() - 1, 0) : match.end() + 1]
        return match.group() if around in kinds else modules[match.group()]

    if not modules:
        return text
    longest = sorted((old for old, new in modules.items() if old != new), key=len, reverse=True)
    text = re.sub(r"(?<![\w.\0])(" + "|".join(map(re.escape, longest)) + r")(?![\w(])", name, text)
    paths = {in_package(old): in_package(new) for old, new in modules.items()}
    inner = [path for path in sorted(paths, key=len, reverse=True) if "/" in path]
    text = re.sub(r"(?<![\w/])(" + "|".join(inner) + r")\.py\b", lambda m: paths[m[1]] + ".py", text)
    loose = sorted(paths, key=len, reverse=True)
    return re.sub(r"\bautoshard/(" + "|".join(loose) + r")\.py\b", lambda m: f"autoshard/{paths[m[1]]}.py", text)


def in_package(module: str) -> str:
    return module.partition(".")[2].replace(".", "/")


def renamed_python(
    text: str, module: str, modules: dict[str, str], classes: dict[tuple[str, ...], str], shadowed: set[str]
) -> str:
    tree = ast.parse(text)
    edits: list[Edit] = []
    names = {old: new for old, new in modules.items() if old not in shadowed}
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module | ast.FunctionDef):
            home = modules.get(module, module)
            bound = {old: new for (owner, old), new in classes.items() if owner == home and scope is tree}
            for node in own(scope):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    edits += import_edits(node, names, classes, bound)
            edits += scope_edits(scope, bound, module)
    edits += attribute_edits(tree, modules, classes)
    return applied(text, edits)


def own(scope: ast.AST) -> list[ast.AST]:
    """The nodes of a scope without those of the functions in it."""
    found: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)
    return found


def scope_edits(scope: ast.AST, bound: dict[str, str], module: str) -> list[Edit]:
    """The uses of bound names in a scope, but for functions in it that bind a name anew."""
    nodes = list(ast.walk(scope))
    taken = {node.id for node in nodes if isinstance(node, ast.Name)}
    taken |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for old, new in bound.items():
        if new in taken and new != old:
            print(f"{module}: {old} is {new} now, and {new} is taken")
    hidden: set[tuple[int, str]] = set()
    for inner in nodes:
        if isinstance(inner, ast.FunctionDef | ast.Lambda) and inner is not scope:
            names = {node.arg for node in ast.walk(inner.args) if isinstance(node, ast.arg)}
            names |= {n.id for n in ast.walk(inner) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            hidden |= {(id(node), name) for node in ast.walk(inner) for name in names}
    kept = [node for node in nodes if (id(node), getattr(node, "id", "")) not in hidden]
    return [edit for node in kept for edit in use_edits(node, bound)]


def import_edits(
    node: ast.ImportFrom, modules: dict[str, str], classes: dict[tuple[str, ...], str], bound: dict[str, str]
) -> list[Edit]:
    """`from autoshard.a import b`, where b is a module that moved, or a class with another name."""
    edits: list[Edit] = []
    moved: list[tuple[str, str]] = []
    for alias in node.names:
        new = modules.get(f"{node.module}.{alias.name}")
        if new is not None:
            folder, _, last = new.rpartition(".")
            moved.append((folder, last if alias.asname is None else f"{last} as {alias.asname}"))
            if alias.asname is None and last != alias.name:
                bound[alias.name] = last
        elif name := classes.get((modules.get(node.module or "", node.module or ""), alias.name)):
            end = alias.col_offset + len(alias.name)
            edits.append((alias.lineno, alias.col_offset, end, name))
            if alias.asname is None:
                bound[alias.name] = name
    if not moved:
        return edits
    stay = [alias for alias in node.names if f"{node.module}.{alias.name}" not in modules]
    rest = [ast.unparse(alias) for alias in stay]
    lines = [f"from {DONE}{folder} import {name}" for folder, name in moved]
    lines += [f"from {node.module} import {', '.join(rest)}"] if rest else []
    assert node.end_lineno is not None and node.end_col_offset is not None
    whole = ("\n" + " " * node.col_offset).join(lines)
    if node.lineno == node.end_lineno:
        return [(node.lineno, node.col_offset, node.end_col_offset, whole)]
    cut = [(line, 0, -1, "") for line in range(node.lineno + 1, node.end_lineno)]
    return [(node.lineno, node.col_offset, -1, whole), *cut, (node.end_lineno, 0, node.end_col_offset, "")]


def attribute_edits(tree: ast.AST, modules: dict[str, str], classes: dict[tuple[str, ...], str]) -> list[Edit]:
    """`module.Class`, where the module was imported by name."""
    home: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            home |= {name: modules.get(path, path) for name, path in full.items()}
    edits: list[Edit] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in home:
            new = classes.get((home[node.value.id], node.attr))
            if new is not None and node.end_col_offset is not None:
                edits.append(
                    (node.end_lineno or node.lineno, node.end_col_offset - len(node.attr), node.end_col_offset, new)
                )
    return edits


def use_edits(node: ast.AST, bound: dict[str, str]) -> list[Edit]:
    if isinstance(node, ast.Name) and node.id in bound:
        return [(node.lineno, node.col_offset, node.col_offset + len(node.id), bound[node.id])]
    if isinstance(node, ast.ClassDef) and node.name in bound:
        return [(node.lineno, node.col_offset + 6, node.col_offset + 6 + len(node.name), bound[node.name])]
    return []


def applied(text: str, edits: list[Edit]) -> str:
    lines = text.splitlines(keepends=True)
    for line, start, end, new in sorted(set(edits), reverse=True):
        raw = lines[line - 1].encode()  # ast counts bytes
        lines[line - 1] = (raw[:start] + new.encode() + (b"" if end < 0 else raw[end:])).decode()
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
