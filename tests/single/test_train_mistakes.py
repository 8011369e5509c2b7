"""What is wrong with the options of train.py is told in one sentence, before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.single.test_train_alone import Start, folder, package, start, steps

__all__ = ["folder", "package", "start"]  # fixtures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "-1"), "--steps -1: expected 0 or more"),
        (("--lr", "-1"), "--lr -1: expected 0 or more"),
        (("--save-every", "-2"), "--save-every -2: expected 0 or more"),
        (("--log-every", "0"), "--log-every 0: expected 1 or more"),
        (("--max-norm", "0"), "--max-norm 0: expected more than 0"),
        (("--data", "nowhere"), "--data nowhere: expected file.py:function"),
        (("--resume", "nowhere"), "--resume nowhere: there is no checkpoint here"),
        (("--weights", "nowhere.pt"), "--weights nowhere.pt: "),
    ],
)
def test_mistakes_are_one_sentence(start: Start, options: tuple[str, ...], message: str) -> None:
    code, _, said = start(*options)
    assert code == 2 and said.startswith(f"error: {message}") and "Traceback" not in said


def test_an_option_that_the_package_lacks_has_a_reason(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        start("--pack")
    said = "unrecognized arguments: --pack (a package has no option that its plan has no use for; --help lists"
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save", "--profile", "--tensorboard", "--log-json"])
def test_where_nothing_can_be_written_is_told_before_the_first_step(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (tmp_path / "file").touch()
    code, printed, said = start("--steps", 1, option, tmp_path / "file" / "new" / "name")
    assert (code, steps(printed)) == (2, {}) and said.startswith(f"error: {option} {tmp_path}/file/new/name: "), said
    assert f"{tmp_path}/file is no folder" in said and "Traceback" not in said
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, printed, said = start("--steps", 1, option, tmp_path / "new" / "name")
    assert (code, steps(printed)) == (2, {}) and f"no permission to write in {tmp_path}\n" in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_log_may_be_a_file_that_is_there(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /dev/stdout is, in a folder where nobody but root can write."""
    log, permitted = tmp_path / "log", os.access
    log.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and permitted(path, mode))
    assert start("--steps", 1, "--log-json", log)[0] == 0 and len(log.read_text().splitlines()) == 1
    code, printed, said = start("--steps", 1, "--log-json", tmp_path)
    assert (code, steps(printed)) == (2, {}) and said.startswith(f"error: --log-json {tmp_path}: it is a folder"), said
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != log)
    code, printed, said = start("--steps", 1, "--log-json", log)
    assert (code, steps(printed)) == (2, {}) and f"--log-json {log}: no permission to write in it" in said, said


def test_an_error_of_a_loader_that_is_read_ahead_is_told(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import torch\ndef make():\n    yield {'ids': torch.zeros(4, 6).long()}\n")
    code, said, stderr = start("--steps", 2, "--data", f"{tmp_path / 'bad.py'}:make")
    assert code == 2 and "the batch lacks labels" in stderr and not steps(said)
