"""The table of bad inputs that need no torch: one message, the right exit code, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_inputs import Row, check, files, good_files, options
from tests.slow import thinned

ROWS = [*options.ROWS, *files.ROWS]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    good_files(folder)
    return folder


@pytest.mark.parametrize("row", thinned(ROWS, 4), ids=str)
def test_one_message(
    row: Row, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(row, good, tmp_path, monkeypatch, capsys)


def test_the_table_is_long() -> None:
    assert len(ROWS) >= 300
    assert len({(row.typed, row.about, row.damage) for row in ROWS}) == len(ROWS)
