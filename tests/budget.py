"""Sizes that pyproject.toml bounds: lines of Python, words of the docs, tuned constants. Every test run prints them.

A tuned constant is a name at the top of a module of autoshard/ that is a number or a tuple of them: `LIMIT = 2**24`.
Raising a bound is a line in the change that needs it, with its reason in the commit's message.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROSE = ("README.md", "CHANGELOG.md", "docs/*.md")
WRITTEN = ("architectures.md", "fuzzing.md")  # by a script, whole
NOT_PROSE = (
    re.compile(r"<!-- ([^:>\n]+): written by .*?(?:<!-- \1 end -->|\Z)", re.DOTALL),
    re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE),
    re.compile(r"^\|.*$", re.MULTILINE),
)
TREES = ("autoshard", "tests", "benchmarks")


@dataclass(frozen=True)
class Row:
    """One size with its bound; `name` as in [tool.autoshard.budget]."""

    name: str
    size: int
    bound: int

    @property
    def passed(self) -> bool:
        return self.size > self.bound


def rows(root: Path = ROOT) -> list[Row]:
    """The bounded sizes, in the order of pyproject.toml."""
    bounds = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["autoshard"]["budget"]
    tally = sizes(root)
    unknown = [name for name in bounds if name not in tally]
    if unknown:
        raise KeyError(f"[tool.autoshard.budget] bounds what nothing counts: {', '.join(unknown)}")
    return [Row(name, tally[name], bound) for name, bound in bounds.items()]


@cache
def sizes(root: Path = ROOT) -> dict[str, int]:
    """Every size that can be bounded, by name."""
    tally: Counter[str] = Counter()
    for tree in TREES:
        for path in sorted((root / tree).rglob("*.py")):
            source = path.read_text("utf-8")
            tally[f"lines of {tree}"] += source.count("\n")
            if tree == "autoshard":
                constants = sum(1 for _ in tuned(source))
                folder = path.relative_to(root).parent.parts[:2]
                tally["constants of autoshard"] += constants
                if len(folder) > 1:
                    tally[f"lines of {'/'.join(folder)}"] += source.count("\n")
                    tally[f"constants of {'/'.join(folder)}"] += constants
    pages = {path: path.read_text("utf-8") for glob in PROSE for path in root.glob(glob)}
    tally["words of docs"] = sum(len(text.split()) for text in pages.values())
    tally["words of prose"] = sum(len(prose(text).split()) for path, text in pages.items() if path.name not in WRITTEN)
    return dict(tally)


def prose(text: str) -> str:
    """What of a page is written by hand: no code, no table, nothing between the marks of a script."""
    for pattern in NOT_PROSE:
        text = pattern.sub("", text)
    return text


def tuned(source: str) -> Iterator[str]:
    """Names of the tuned constants of a module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _numbers(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _numbers(node.target, node.value)


def _numbers(target: ast.expr, value: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, element in zip(target.elts, value.elts, strict=False):
            yield from _numbers(one, element)
    elif isinstance(target, ast.Name) and _is_number(value):
        yield target.id


def _is_number(node: ast.expr) -> bool:
    """A number, arithmetic of numbers, or several in a tuple."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Tuple) and bool(node.elts) and all(map(_is_number, node.elts))


def summary() -> list[str]:
    """What a test run prints: the bounded sizes, then lines and constants of each folder of autoshard/."""
    tally, prefix = sizes(), "lines of autoshard/"
    bounded = [f"{row.name} {row.size:,} of {row.bound:,}{' (too many)' * row.passed}" for row in rows()]
    folders = sorted(
        (name.removeprefix(prefix) for name in tally if name.startswith(prefix)), key=lambda name: -tally[prefix + name]
    )
    each = [f"{name} {tally[prefix + name]:,} ({tally[f'constants of autoshard/{name}']})" for name in folders]
    return [f"budget: {', '.join(bounded)}", f"lines (constants) of autoshard/: {', '.join(each)}"]
