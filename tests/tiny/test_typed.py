"""Commands that are printed are typed through a shell as they stand, and arrive as they were meant."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cli import commands
from autoshard.code_text import typed, typed_lines
from autoshard.emit.code_lines import docstring
from autoshard.ir import graph_json, plan_json
from autoshard.replay.command_line import command
from autoshard.text.plan_summary import next_command
from tests.graphs import mlp_graph
from tests.hangs import HANGS

NAMES = (
    "a b", "a\nb", "$(touch planted)", "`touch planted`", "a'b", 'a"b', "-x", "--json", "a;b", "a&b", "a|b", "*", "~",
    "~x",
    "#x", "a\\", "a\\nb", "\tx", "!x", "{a,b}", "$HOME", "é", "名", "a\u202eb", "a\x1b[31m", "a\x017", "<x>", "a=b",
    "''",
)  # fmt: skip
_CODE = "import json, os, sys; print(json.dumps([os.fsencode(word).hex() for word in sys.argv[1:]]))"
ECHO = shlex.join([sys.executable, "-c", _CODE])
TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20)


def arrived(command_text: str, folder: Path, program: str = "autoshard") -> list[str]:
    """The words that `program` is given when a shell reads this. Nothing else may be run, and nothing written."""
    script = f'{program}() {{ {ECHO} "$@"; }}\n{command_text}\n'
    environment = {"PATH": "/nowhere", "HOME": "/nowhere", "LC_ALL": "C"}
    shell = ["/bin/bash", "--norc", "-c", script]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=folder, env=environment, timeout=HANGS)
    assert done.returncode == 0 and not done.stderr, (command_text, done.stderr)
    assert not [*folder.iterdir()]
    return [bytes.fromhex(word).decode("utf-8") for word in json.loads(done.stdout)]


def test_each_name_arrives(tmp_path: Path) -> None:
    text = f"autoshard {typed(*NAMES)}"
    assert "\n" not in text and text.isprintable()
    assert arrived(text, tmp_path) == [*NAMES]
    lines = typed_lines(text, 30)
    assert len(lines) > 5 and arrived("\n".join(lines), tmp_path) == [*NAMES]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(words=st.lists(TEXT, min_size=1, max_size=30))
def test_any_words_arrive(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("w")
    assert arrived("\n".join(typed_lines(f"autoshard {typed(*words)}", 60)), folder) == words


def test_a_path_is_no_option(tmp_path: Path) -> None:
    assert arrived(f"autoshard verify {typed(Path('-x'))}", tmp_path) == ["verify", "./-x"]


def test_a_docstring_shows_a_command_as_it_is_typed(tmp_path: Path) -> None:
    lines = docstring("\n".join(["Made by", *typed_lines(f"autoshard {typed(*NAMES[:20])}", 30)]), 0)
    assert arrived("\n".join(lines[1:-1]), tmp_path) == [*NAMES[:20]]
    namespace: dict[str, object] = {}
    exec("\n".join(lines), namespace)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("~", "''")])
def test_what_is_printed_is_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of `plan` and of the package that it writes into a folder of this name."""
    (tmp_path / "w").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "w")
    graph = Path(f"./{name}.json")
    graph.write_text(graph_json.dumps(mlp_graph(1)), encoding="utf-8")
    out = f"./{name}" if name.startswith("-") else name
    words = [str(graph) if not name.startswith("-") else f"./{graph}", "--mesh", "dp=2", "--hardware", "a100-80g-sxm"]
    assert commands.main(["plan", *words, "--strategy", "random:1", f"--out={out}"]) == 0
    (following,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    given = arrived(following.removeprefix("next: "), tmp_path / "empty", "torchrun")
    assert given[:2] == ["--nproc-per-node", "2"] and (tmp_path / "w" / given[2]).samefile(Path(name) / "train.py")
    plan = plan_json.load(Path(name) / "plan.json")
    again = arrived(command(plan), tmp_path / "empty")
    assert again[0] == "plan" and (tmp_path / "w" / again[1]).samefile(graph)
    head = (Path(name) / "model_parallel.py").read_text(encoding="utf-8").partition("autoshard plan")[2]
    shown = "autoshard plan" + head.partition("\nPredicted for")[0]
    assert arrived(shown, tmp_path / "empty") == again
    inference = next_command(replace(plan, model="m.py:f"), replace(mlp_graph(1), loss=None), Path(name))
    checked = arrived(inference.partition("; ")[0], tmp_path / "empty")
    assert checked[0] == "verify" and (tmp_path / "w" / checked[1]).samefile(name)
    assert os.listdir(tmp_path / "empty") == []


def test_hints_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    graph_json.save(mlp_graph(1), "$(x) y.json")
    base = ["plan", "./$(x) y.json", "--mesh", "dp=2", "--hardware", "a100-80g-sxm", "--strategy", "random:1"]
    assert commands.main([*base, "--out", "a b$(x)"]) == 0
    tried = {
        ("report", "a b$(x)", "a b$(x)", "--svg"): ["report", "a b$(x)", "--svg"],
        (*base, "--eval", "--out", "o"): ["trace", "MODEL", "--eval", "…", "-o", "./$(x) y.json"],
    }
    for words, expected in tried.items():
        capsys.readouterr()
        assert commands.main(words) == 2
        hint = capsys.readouterr().err.partition("  try: ")[2].strip()
        assert [w.removeprefix("./") for w in arrived(hint, tmp_path / "empty")] == [
            w.removeprefix("./") for w in expected
        ]
    (tmp_path / "a b$(x)" / "verification.json").write_text("{")
    assert commands.main(["report", "a b$(x)"]) == 5
    hint = capsys.readouterr().err.partition("  try: ")[2].strip()
    assert arrived(hint.partition(", or")[0], tmp_path / "empty", "rm") == ["a b$(x)/verification.json"]
    assert arrived(hint.partition("again: ")[2], tmp_path / "empty") == ["verify", "a b$(x)"]
