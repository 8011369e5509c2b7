"""ruff and mypy as tests, so that one command checks everything."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.planted_faults import explained, stale
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {
    "ruff": ["ruff", "check", "--no-cache", "."],
    "format": ["ruff", "format", "--no-cache", "--check", "."],
    "mypy": ["mypy", "--no-error-summary"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tool_is_content(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *TOOLS[tool]], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=HANGS
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_the_tests_near_a_planted_fault_are_there() -> None:
    near = tomllib.loads((ROOT / "benchmarks" / "near_tests.toml").read_text("utf-8"))
    code = near["folder"] | near["file"]
    tests = {*near["by_processes"]}.union(*code.values())
    assert not [name for name in tests if not (ROOT / "tests" / name).exists()] and tests
    assert not [name for name in code if not (ROOT / "autoshard" / name).exists()]


@pytest.mark.slow
def test_the_places_of_faults_that_change_nothing_are_there() -> None:
    assert explained() and not stale(explained())
    assert stale(["emit/classes.py gone: 0 -> 1"]), "the function is looked for, too"


def test_no_test_depends_on_how_fast_a_machine_is() -> None:
    """What is waited for, and a whole test, may last until it must hang."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            limits = node.keywords if isinstance(node, ast.Call) else ()
            short = [k for k in limits if k.arg in ("timeout", "timeout_seconds") and _seconds(k.value) < HANGS]
            if short or (isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.timeout"):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"timeout=HANGS, of tests/hangs.py: {wrong}"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert settings["timeout"] > HANGS


def _seconds(node: ast.expr) -> float:
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else HANGS


def test_what_scripts_import_of_this_repository_is_there() -> None:
    """mypy reads autoshard/ alone: a renamed module would be missed by a benchmark that no test runs."""
    gone = []
    for folder in ("benchmarks", "docs", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                module = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else ""
                if isinstance(node, ast.ImportFrom) and module.split(".")[0] in (
                    "autoshard",
                    "benchmarks",
                    "docs",
                    "tests",
                ):
                    names = [alias.name for alias in node.names if not _is_there(module, alias.name)]
                    gone += [f"{path.relative_to(ROOT)}:{node.lineno}: {module}.{name}" for name in names]
    assert not gone


def _is_there(module: str, name: str) -> bool:
    folder = ROOT / module.replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    match = re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) if file.exists() else None
    return bool(match) or (folder / f"{name}.py").exists() or (folder / name).is_dir()
