"""The table of bad model files, and what a model's code may do without harm."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from autoshard.cli import commands
from tests.bad_inputs import Row, check, good_files, model_text
from tests.bad_inputs.models import ROWS
from tests.slow import quick_at

WORDS = ["plan", "model.py:build", "--mesh", "dp=2", "--hardware", "cpu-local", "--out", "o"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    good_files(folder)
    return folder


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_one_message(
    row: Row, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(row, good, tmp_path, monkeypatch, capsys)


HARMLESS = {
    "changes the folder": "import os; os.chdir('/')",
    "reads the command line": "import argparse; argparse.ArgumentParser().parse_args()",
    "turns warnings into errors": "import warnings; warnings.simplefilter('error')",
    "takes Ctrl-C": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "replaces stdout": "import sys; sys.stdout = sys.stderr",
    "forks a child that goes on": "import os\nif os.fork(): os.wait()\nelse: raise SystemExit(3)",
    "switches gradients off": "torch.set_grad_enabled(False)",
}


@pytest.mark.parametrize("top", quick_at(HARMLESS.values(), 6), ids=HARMLESS)
def test_what_a_model_does_to_the_process_is_put_back(
    top: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    (tmp_path / "model.py").write_text(model_text(bottom=top), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = (signal.getsignal(signal.SIGINT), sys.argv, sys.stdout, os._exit, torch.is_grad_enabled())
    assert commands.main([*WORDS, "--json"]) == 0
    assert before == (signal.getsignal(signal.SIGINT), sys.argv, sys.stdout, os._exit, torch.is_grad_enabled())
    assert json.loads(capsys.readouterr().out)["mesh"] == {"dp": 2}
    assert (tmp_path / "o" / "plan.json").is_file()


def test_a_damaged_outcome_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `report` advises for a damaged verification.json works: `verify` does not read what it replaces."""
    (tmp_path / "model.py").write_text(model_text(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert commands.main([*WORDS[:3], "dp=1", *WORDS[4:]]) == 0
    for content in ("{", "[]", ""):
        Path("o/verification.json").write_text(content)
        capsys.readouterr()
        assert commands.main(["report", "o"]) == 5
        assert "verify the package again: autoshard verify o" in capsys.readouterr().err
    assert commands.main(["verify", "o", "--backend", "lockstep"]) == 0
    assert commands.main(["report", "o"]) == 0
