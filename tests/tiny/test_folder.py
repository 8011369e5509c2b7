"""The output folder: whole or absent, and never anybody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.errors import InvalidFileError, UsageError
from autoshard.package import output_folder

FILES = {"train.py": "print()\n", "plan.json": "{}\n"}


def names(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file())


def test_a_new_folder(tmp_path: Path) -> None:
    output_folder.write_package(tmp_path / "a" / "b", FILES)
    assert names(tmp_path) == ["a/b/manifest.json", "a/b/plan.json", "a/b/train.py"]


def test_replaced_and_tidied_but_the_users_files_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output_folder.write_package(out, {**FILES, "old.py": "x\n"})
    (out / "data.py").write_text("mine\n", encoding="utf-8")
    (out / "__pycache__").mkdir()
    output_folder.write_package(out, {**FILES, "train.py": "new\n"})
    assert names(out) == ["data.py", "manifest.json", "plan.json", "train.py"]
    assert (out / "train.py").read_text(encoding="utf-8") == "new\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    output_folder.write_package(tmp_path, FILES)
    assert names(tmp_path) == ["manifest.json", "plan.json", "train.py"]


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"holds something else: thesis\.tex"):
        output_folder.write_package(tmp_path, FILES)
    assert names(tmp_path) == ["thesis.tex"]


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    output_folder.write_package(tmp_path, FILES)
    (tmp_path / "train.py").write_text("edited\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"train\.py was edited"):
        output_folder.write_package(tmp_path, FILES)
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == "edited\n"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        output_folder.check_target(tmp_path / "out")
    with pytest.raises(UsageError):
        output_folder.write_package(tmp_path / "out" / "inside", FILES)


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't write"):
        output_folder.write_package(tmp_path / "out", {**FILES, "bad.py": "\ud800"})
    assert list(tmp_path.iterdir()) == []


def test_update(tmp_path: Path) -> None:
    output_folder.write_package(tmp_path, FILES)
    output_folder.update_package(tmp_path, {"report.html": "<p>\n"})
    output_folder.check_target(tmp_path)
    assert output_folder.read_file(tmp_path, "report.html") == "<p>\n"
    assert names(tmp_path) == ["manifest.json", "plan.json", "report.html", "train.py"]


def test_reading_what_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="not a package"):
        output_folder.read_file(tmp_path, "plan.json")
    output_folder.write_package(tmp_path, FILES)
    with pytest.raises(InvalidFileError, match=r"can't read .*graph\.json"):
        output_folder.read_file(tmp_path, "graph.json")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"kind": "autoshard.package"}', '{"kind": "autoshard.package", "files": {"../x": ""}}']
)
def test_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    output_folder.write_package(tmp_path, FILES)
    (tmp_path / output_folder.MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidFileError, match=r"manifest\.json is (damaged|not JSON)"):
        output_folder.check_target(tmp_path)
