"""Checkpoints and weights files from elsewhere: nothing in them runs, and each fault is one sentence."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bad_inputs.checkpoints import LOADERS, MARKER, ROWS, Row
from tests.single.test_train_alone import LOADER, Start, folder, package, start  # noqa: F401 - fixtures
from tests.slow import quick

TRIED = [(row, verb) for row in ROWS for verb in row.verbs]


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Where a good checkpoint is written once."""
    return tmp_path_factory.mktemp("saved") / "step-1"


@pytest.fixture
def good(saved: Path, start: Start, tmp_path: Path) -> Path:  # noqa: F811
    if not saved.exists():
        assert start("--steps", 1, "--save", saved.parent)[0] == 0
    shutil.copytree(saved, tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture
def convert(package: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:  # noqa: F811
    def run(*options: object) -> tuple[int, str, str]:
        import convert as module  # of the package

        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, options)])
        return (module.main(), *capsys.readouterr())

    return run


@pytest.mark.parametrize(("row", "verb"), quick(TRIED, TRIED[::8]), ids=lambda value: str(value))
def test_nothing_runs(
    row: Row,
    verb: str,
    good: Path,
    start: Start,  # noqa: F811
    convert: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    row.damage(good)
    before = set(tmp_path.rglob("*"))
    Path("data.py").write_text(LOADER)
    more = ("--data", "data.py:make") if row in LOADERS else ()
    typed: dict[str, Callable[[], tuple[int, str, str]]] = {
        "convert": lambda: convert("--to-original", good, "out.pt"),
        "resume": lambda: start("--steps", 2, "--resume", good, *more),
        "weights": lambda: start("--steps", 1, "--weights", good / row.about),
        "to-sharded": lambda: convert("--to-sharded", good / row.about, "sharded"),
    }
    code, _, said = typed[verb]()
    assert code == row.code and row.says in said, said
    assert said.startswith("error: ") and "Traceback" not in said and len(said) < 2000, said
    assert "safe_globals" not in said and "will likely succeed" not in said, "advice to trust it"
    assert not list(tmp_path.rglob(MARKER))
    assert {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} - before == {tmp_path / "data.py"}


def test_the_good_checkpoint_is_read(good: Path, start: Start, convert: Start, tmp_path: Path) -> None:  # noqa: F811
    """What the rows damage."""
    assert start("--steps", 2, "--resume", good)[0] == 0
    assert convert("--to-original", good, tmp_path / "out.pt")[0] == 0


def test_of_a_folder_of_checkpoints_the_last_whole_one_is_taken(
    good: Path,
    convert: Start,
    tmp_path: Path,
) -> None:
    """What is half written, or damaged, is no checkpoint; a line says which one was taken."""
    saved = tmp_path / "saved"
    for number in (2, 10, 11):
        shutil.copytree(good, saved / f"step-{number}")
    shutil.copytree(good, saved / "step-12.partial")
    (saved / "step-11" / ".metadata").write_bytes(b"no index")
    code, printed, _ = convert("--to-original", saved, tmp_path / "out.pt")
    assert code == 0 and (tmp_path / "out.pt").exists()
    assert f"taken from {saved / 'step-10'}\n" in printed and f"{saved / 'step-11'} is left out: " in printed
    for number in (2, 10):
        (saved / f"step-{number}" / "training.json").unlink()
    code, _, said = convert("--to-original", saved, tmp_path / "none.pt")
    assert code == 2 and said == f"error: {saved} has no checkpoint that can be read\n"
    assert not (tmp_path / "none.pt").exists()
