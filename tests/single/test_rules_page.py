"""docs/rules.md says what the table says."""

from __future__ import annotations

from pathlib import Path

from autoshard.rules import OPERATORS
from autoshard.verification.rule_page import page, with_rest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"


def test_the_page_is_up_to_date() -> None:
    old = PAGE.read_text(encoding="utf-8")
    assert old == with_rest(old, page()), "python -m autoshard.verification.rule_page --write"


def test_every_operator_is_on_the_page() -> None:
    text = page()
    ruled = {target for target, known in OPERATORS.items() if known.rule is not None}
    assert not {target for target in ruled if f"`{target.removeprefix('aten.')}`" not in text}
    assert "`... m, n m, +n? -> ... n` | `m` |" in text


def test_what_others_wrote_below_the_table_stays() -> None:
    assert with_rest(page() + "\n## More\n", page()).endswith("\n\n## More\n")
