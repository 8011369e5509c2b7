"""The glossary names things that are there, and the words that it replaces are gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` `([^`]+)` \|$", PAGE, re.MULTILINE)
# English that stood for a term of the field; the term is in the glossary, or in every textbook.
GONE = ("dearest", "dearer", "summand", "the mend", "a person", "lies as", "wishes")


def names(path: Path) -> set[str]:
    """What a module defines at its top."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize(("term", "sentence", "place", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_a_term(term: str, sentence: str, place: str, name: str) -> None:
    assert len(sentence) < 130, "one sentence"
    assert name in names(ROOT / "autoshard" / place)


def test_every_row_is_read() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(lines) - 1 > 40


@pytest.mark.parametrize("word", GONE)
def test_a_word_is_gone(word: str) -> None:
    pattern = re.compile(rf"\b{word}s?\b", re.IGNORECASE)
    files = [*(ROOT / "autoshard").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    found = [path.relative_to(ROOT) for path in files if pattern.search(path.read_text(encoding="utf-8"))]
    assert not found
