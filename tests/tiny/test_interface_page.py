"""docs/interface.md names tests that there are, and has a row for every item."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "interface.md").read_text(encoding="utf-8")
LAST = {"A": 20, "D": 18, "E": 3, "F": 9, "G": 4, "H": 2, "I": 8}  # of each section


def test_every_test_is_there() -> None:
    """A name alone is one of the file named before it."""
    named = re.findall(r"`(?:(tests/[\w/]+\.py)(?:::(\w+))?|(test_\w+))`", PAGE)
    assert len(named) > 30
    missing, file = [], ""
    for path, name, alone in named:
        file = path or file
        if f"def {name or alone}" not in (ROOT / file).read_text(encoding="utf-8"):
            missing.append((file, name or alone))
    assert not missing


def test_every_item_has_a_row() -> None:
    found: set[str] = set()
    for row in re.findall(r"^\| ([A-I]\d.*?) \|", PAGE, re.MULTILINE):
        for section, first, last in re.findall(r"([A-I])(\d+)(?:–[A-I](\d+))?", row):
            found |= {f"{section}{number}" for number in range(int(first), int(last or first) + 1)}
    assert {f"{section}{number}" for section, last in LAST.items() for number in range(1, last + 1)} <= found
