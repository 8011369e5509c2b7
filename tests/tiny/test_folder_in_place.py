"""A checkpoint's folder appears whole, and what stood there before is whole until then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoshard.emit.runtime import put_in_place


class Killed(BaseException):
    pass


def _write(folder: Path, word: str) -> None:
    folder.mkdir()
    (folder / "one").write_text(word)


def test_a_folder_replaces_an_older_one(tmp_path: Path) -> None:
    _write(tmp_path / "step-2", "old")
    _write(tmp_path / "step-2.partial", "new")
    put_in_place(tmp_path / "step-2")
    assert [(path.name, (path / "one").read_text()) for path in tmp_path.iterdir()] == [("step-2", "new")]


@pytest.mark.parametrize("renames", [0, 1])
def test_killed_in_between_both_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    _write(tmp_path / "step-2", "old")
    _write(tmp_path / "step-2.partial", "new")
    done, rename = [], os.replace

    def replace(source: object, target: object) -> None:
        if len(done) == renames:
            raise Killed
        done.append(target)
        rename(str(source), str(target))

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        put_in_place(tmp_path / "step-2")
    assert sorted((path / "one").read_text() for path in tmp_path.iterdir()) == ["new", "old"]
    monkeypatch.undo()
    put_in_place(tmp_path / "step-2")
    assert [(path.name, (path / "one").read_text()) for path in tmp_path.iterdir()] == [("step-2", "new")]
