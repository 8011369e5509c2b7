"""The sizes that pyproject.toml bounds stay below their bounds, and a bound that is passed is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import budget

PLANTED = """[tool.autoshard.budget]
"lines of autoshard" = 3
"words of docs" = 2
"constants of autoshard/solvers" = 1
"""


@pytest.mark.parametrize("row", budget.rows(), ids=lambda row: row.name)
def test_a_size_is_below_its_bound(row: budget.Row) -> None:
    assert not row.passed, f"{row.name}: {row.size:,}, and pyproject.toml bounds it by {row.bound:,}"


def test_what_passes_a_bound_is_seen(tmp_path: Path) -> None:
    """One line, one word and one constant more than is allowed: each is reported, and nothing else."""
    (tmp_path / "pyproject.toml").write_text(PLANTED, encoding="utf-8")
    (tmp_path / "README.md").write_text("two words", encoding="utf-8")
    folder = tmp_path / "autoshard" / "solvers"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("LIMIT = 3\nNAME = 'x'\nON = True\n", encoding="utf-8")
    assert not [row.name for row in budget.rows(tmp_path) if row.passed]
    budget.sizes.cache_clear()
    (folder / "two.py").write_text("SHARE: float = -0.5\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("now three words", encoding="utf-8")
    assert [(row.name, row.size) for row in budget.rows(tmp_path) if row.passed] == [
        ("lines of autoshard", 4), ("words of docs", 3), ("constants of autoshard/solvers", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("A = 2**24", ["A"]),
        ("A, B = 1, -2.5", ["A", "B"]),
        ("A: float = 1e-3", ["A"]),
        ("A = (1, 2)", ["A"]),
        ("A = True\nB = 'x'\nC = 2 * D\nE = [1]\ndef f(): G = 1", []),
    ],
)
def test_what_counts_as_a_tuned_constant(source: str, names: list[str]) -> None:
    assert list(budget.tuned(source)) == names


def test_a_bound_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.autoshard.budget]\n"lines of nowhere" = 3\n', encoding="utf-8")
    with pytest.raises(KeyError, match="lines of nowhere"):
        budget.rows(tmp_path)


def test_prose_is_what_hands_write() -> None:
    page = "two words\n| a | table |\n```python\ncode = 1\n```\n"
    page += "<!-- it: written by `x` -->\nby a script\n<!-- it end -->\nmore"
    assert budget.prose(page).split() == ["two", "words", "more"]
