"""Docstrings and comments name files and functions that are there: where a formula is implemented, where to read on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autoshard"
OF_USERS = {"file.py", "model.py", "data.py"}  # examples of what a user names
OF_PACKAGES = {"initial.py", "model_parallel.py"}  # written by `plan`
OF_WHEELS = {"autoshard/_data/"}
MODULES = {path.stem: path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts and path.stem[0] != "_"}
WITH_FORMULAS = ("minimise", "limited_search", "rows", "memory_constraints", "reduced_costs", "collective")


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def defined(path: Path) -> set[str]:
    """`name` and `Class.method` of what a module defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef))
    return names


def pointers(text: str) -> list[tuple[str, str]]:
    """(module, name) of every `module.name` of a text that says where things are implemented."""
    matches = re.findall(r"`([a-z_]+)\.(\w+(?:\.\w+)?)`", text) if "mplemented in" in text else []
    return [(module, name) for module, name in matches if module in MODULES and name != "py"]


def test_files_that_are_named_are_there() -> None:
    there = {path.name for path in ROOT.rglob("*.py")} | OF_USERS | OF_PACKAGES
    wrong = []
    for path in MODULES.values():
        comments = re.findall(r"#.*", path.read_text(encoding="utf-8"))
        for text in [*docstrings(path), *comments]:
            named = re.findall(r"\b\w+\.py\b", text)
            wrong += [f"{path.relative_to(ROOT)}: {name}" for name in named if name not in there]
    assert not wrong


def test_what_is_said_to_implement_a_formula_is_there() -> None:
    wrong = []
    for path in MODULES.values():
        for module, name in (pointer for text in docstrings(path) for pointer in pointers(text)):
            if name not in defined(MODULES[module]):
                wrong.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert not wrong


def test_the_mathematics_says_where_it_is_implemented() -> None:
    for stem in WITH_FORMULAS:
        text = next(docstrings(MODULES[stem]))
        assert "\n    " in text and pointers(text), f"{stem}: a formula, and where it is implemented"


def test_the_design_names_what_is_there() -> None:
    """Files, folders, classes of `docs/architecture.md` in backticks."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", text)
    assert len(paths) > 40
    assert not [
        path
        for path in paths
        if path not in OF_WHEELS and not any((base / path).exists() for base in (PACKAGE, ROOT, ROOT / "tests"))
    ]
    classes = {name for path in MODULES.values() for name in defined(path) if name[0].isupper()}
    assert set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", text)) <= classes
