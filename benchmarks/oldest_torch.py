"""Do packages use only what an older torch has? Names, imports and keyword arguments, read in its sources: none is run.

    pip download torch==2.6.0 --no-deps --only-binary=:all: --platform macosx_11_0_arm64 --python-version 3.11
    unzip torch-2.6.0-*.whl 'torch/*.py' 'torch/*.pyi' -d old
    python -m benchmarks.oldest_torch old

The wheel for macOS is the smallest; its Python sources are those of all. What sources can't tell: methods of tensors
and other objects, keywords of native functions, operators under `torch.ops`, and what a function of the same name does.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "autoshard" / "emit"
COPIED = ("runtime", "package")
NATIVE = {"torch": ("torch._C", "torch._C._VariableFunctions"), "torch.nn.functional": ("torch._C._nn",)}
OPAQUE = ("torch.ops", "torch._C")  # made when torch is loaded


@dataclass
class Module:
    """`names`: what it binds itself; `imported`: name -> (module, name there); `stars`: of which it takes all."""

    names: dict[str, list[ast.AST]] = field(default_factory=dict)
    imported: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


@dataclass
class Sources:
    """The Python sources of one torch."""

    root: Path
    known: dict[str, Module] = field(default_factory=dict)

    def files(self, module: str) -> list[Path]:
        stem = self.root.joinpath(*module.split("."))
        places = (stem / "__init__.py", stem / "__init__.pyi", stem.with_suffix(".py"), stem.with_suffix(".pyi"))
        return [path for path in places if path.is_file()]

    def module(self, name: str) -> Module:
        if name not in self.known:
            own = self.known[name] = Module(stars=[*NATIVE.get(name, ())])
            for path in self.files(name):
                for node in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
                    _bind(node, name, path.stem == "__init__", own)
        return self.known[name]

    def defined(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> list[ast.AST]:
        """What `name` is in `module`, through imports; empty where it is not there."""
        if (module, name) in seen:
            return []
        own, seen = self.module(module), seen | {(module, name)}
        found = [*own.names.get(name, [])]
        for source, other in own.imported.get(name, []):
            inside = self.defined(source, other, seen) if source.split(".")[0] == "torch" else []
            found += inside or [ast.Pass()]  # of another package, or a module
        for source in own.stars if not found else ():
            found += self.defined(source, name, seen)
        return found

    def find(self, dotted: str) -> tuple[str, list[ast.AST]]:
        """The part that is not there, or "", and what the whole name is defined as, where that is told."""
        module, parts = "torch", dotted.split(".")[1:]
        for i, part in enumerate(parts):
            if f"{module}.{part}" in OPAQUE:
                return "", []
            if self.files(f"{module}.{part}") and i + 1 < len(parts):
                module = f"{module}.{part}"
                continue
            if found := self.defined(module, part):
                return "", found if i + 1 == len(parts) else []
            if self.files(f"{module}.{part}"):
                return "", []
            return f"{module}.{part}", []
        return "", []


def _bind(node: ast.stmt, module: str, is_package: bool, own: Module) -> None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        own.names.setdefault(node.name, []).append(node)
    elif isinstance(node, ast.ImportFrom):
        source = _absolute(node, module, is_package)
        own.stars += [source for alias in node.names if alias.name == "*"]
        for alias in node.names:
            own.imported.setdefault(alias.asname or alias.name, []).append((source, alias.name))
    elif isinstance(node, ast.Import):
        for alias in node.names:
            own.names.setdefault(alias.asname or alias.name.partition(".")[0], []).append(node)
    else:
        for target in ast.walk(node):
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                own.names.setdefault(target.id, []).append(node)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, in branches too."""
    for node in body:
        inner = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in (*inner, *(handler.body for handler in getattr(node, "handlers", []))):
                yield from _statements(part)
        else:
            yield node


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    base = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def faults(path: Path, sources: Sources) -> Iterator[str]:
    """What a file uses and the sources lack."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname and a.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        where = f"{path.parent.name}/{path.name}:{getattr(node, 'lineno', 0)}"
        dotted = _dotted(node, aliases) if isinstance(node, ast.Attribute | ast.Name) else ""
        if dotted:
            missing, _ = sources.find(dotted)
            if missing:
                yield f"{where}: {missing}"
        if isinstance(node, ast.Call) and (called := _dotted(node.func, aliases)):
            _, found = sources.find(called)
            unknown = [k.arg for k in node.keywords if k.arg and found and not any(_takes(d, k.arg) for d in found)]
            yield from (f"{where}: {called}({name}=…)" for name in unknown)


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([aliases[node.id], *reversed(parts)]) if isinstance(node, ast.Name) and node.id in aliases else ""


def _takes(node: ast.AST, name: str) -> bool:
    """May it be called with this keyword? Of what is no function with its arguments written out: yes."""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        return not made or any(_takes(one, name) for one in made)
    if not isinstance(node, ast.FunctionDef):
        return True
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return node.args.kwarg is not None or name in {argument.arg for argument in given}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="a folder that holds torch/, of the older version")
    parser.add_argument("packages", type=Path, nargs="*", help="packages: their models are read, too")
    options = parser.parse_args()
    sources = Sources(options.sources)
    assert sources.files("torch"), "there is no torch/ in it"
    folders = [*(ROOT / folder for folder in COPIED), *options.packages]
    paths = sorted(path for folder in folders for path in folder.glob("*.py"))
    found = [fault for path in paths for fault in faults(path, sources)]
    print("\n".join(dict.fromkeys(found)))
    print(f"{len(paths)} files, {len(set(found))} names or keywords that are not there")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
