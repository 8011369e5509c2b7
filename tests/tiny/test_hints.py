"""Every error that a user can meet says what to try."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from autoshard import errors
from autoshard.cli import commands
from autoshard.constraints.pins import parse_pin
from autoshard.errors import InvalidFileError, UserError
from autoshard.graph_capture.model_spec import check_spec, split_spec
from autoshard.ir.mesh import Mesh
from autoshard.solvers import check_names

PACKAGE = Path(__file__).resolve().parents[2] / "autoshard"
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, UserError)}
# A problem as arrays is no user's input, and `memory_fit` adds the hint; the package has errors of its own.
ELSEWHERE = ("solvers/", "search/memory_fit.py", "search/min_memory.py", "emit/package/", "emit/runtime/")


def silent(source: str) -> list[int]:
    """Lines that make an error of a single argument: without a hint."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [(call, getattr(call.func, "id", getattr(call.func, "attr", ""))) for call in calls]
    return [
        call.lineno
        for call, name in names
        if name in KINDS
        and len(call.args) + len(call.keywords) < 2
        and not any(isinstance(a, ast.Starred) for a in call.args)
    ]


def test_every_error_has_a_hint() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if "_data" not in path.parts]
    unhinted = {path.relative_to(PACKAGE).as_posix(): silent(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in unhinted.items() if lines and not name.startswith(ELSEWHERE)} == {}
    assert sum(len(lines) for lines in unhinted.values()) > 0  # those elsewhere: the search for them works


MESHES = [
    ("", "--mesh dp=2,tp=4, or --devices 8 to search for one"),
    (" ", "--mesh dp=2,tp=4, or --devices 8 to search for one"),
    ("dp=0,tp=2", "--mesh dp=1,tp=2"),
    ("dp=2,dp=4", "--mesh dp=2,tp=4"),
    ("dp=2,tp=2,dp=0", "--mesh dp=2,tp=2,cp=1"),
    ("2x2", "--mesh dp=2,tp=4"),
]


@pytest.mark.parametrize(("text", "hint"), MESHES, ids=[text for text, _ in MESHES])
def test_meshes(text: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        Mesh.parse(text)
    assert caught.value.hint == hint
    for word in hint.split():
        if "=" in word:
            Mesh.parse(word.rstrip(","))  # what is proposed is a mesh


def test_an_unknown_axis_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UserError) as caught:
        parse_pin("fc=Shard(1)@tp", Mesh.parse("outer=2,inner=4"))
    assert caught.value.hint == "Shard(1)@outer or Shard(1)@inner"


TYPED = [
    (["pln"], "autoshard plan"),
    (["simulate", "x", "--export", "profile"], "--export profiler"),
    (["simulate", "x", "--export", "perfetto"], "autoshard simulate --help"),
    (["plan", "x", "--precision", "bf16"], "--precision bf16-mixed"),
    (["profiles", "b200"], "b200-180g-sxm"),
    (["profiles", "ascend-910b5"], "ascend-910b4 or ascend-910b3 or ascend-910b2"),
    (["profiles", "zzz"], "one of these, or a path that ends in .toml"),
    (["plan", "x", "--hardware", "cpu-local", "--mesh", "dp=2", "--time-limit", "10"], '--time-limit "10 s"'),
    (["plan", "x", "--hardware", "cpu-local", "--mesh", "dp=2", "--memory-limit", "60"], '--memory-limit "60 GiB"'),
    (["plan", "x", "--hardware", "cpu-local", "--mesh", "dp=2", "--memory-limit", "much"], '--memory-limit "64 GiB"'),
]


@pytest.mark.parametrize(("typed", "hint"), TYPED, ids=[" ".join(typed) for typed, _ in TYPED])
def test_what_was_perhaps_meant(typed: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(typed) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  try: {hint}"


PINS = [
    ("fc=Shrad(1)@tp", "Shard(1)@tp"),
    ("fc=replicat()@tp", "Replicate@tp"),
    ("fc=Part?@tp", "Partial@tp"),
    ("fc=?@tp", "Shard(0)@tp"),
    ("modul:fc=n@tp", "module:fc=n@tp"),
    ("wieght:fc=n@tp", "parameter:fc=n@tp"),
]


@pytest.mark.parametrize(("pin", "hint"), PINS, ids=[pin for pin, _ in PINS])
def test_pins(pin: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_pin(pin, Mesh.parse("tp=2"))
    assert caught.value.hint == hint


def test_names_of_solvers() -> None:
    with pytest.raises(UserError) as caught:
        check_names("propagate")
    assert caught.value.hint == "--solver propagation"
    with pytest.raises(UserError, match="the ilp engine 'gurobbi' is not known"):
        check_names("ilp", "gurobbi")
    check_names("ilp", "highs")
    check_names("dp", "gurobbi")  # said to be ignored, no error


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "model.py").write_text("def _own(): ...\ndef build(): ...\n", encoding="utf-8")
    (tmp_path / "small.graph.json").write_text("{}", encoding="utf-8")
    assert split_spec("examples/model.py:build") == ("examples/model.py", "build")
    check_spec("examples/model.py:build")
    check_spec("some.module:build")
    hints = {
        "examples/modle.py:build": "examples/model.py:build",
        "model.py:build": "examples/model.py:build",
        "examples/model.py": "examples/model.py:build",
        "examples/model.py:": "examples/model.py:build",
    }
    for spec, hint in hints.items():
        with pytest.raises(UserError) as caught:
            check_spec(spec)
        assert (caught.value.hint, caught.value.exit_code) == (hint, 2)
    with pytest.raises(InvalidFileError) as missing:
        check_spec("smal.graph.json")
    assert missing.value.hint == "small.graph.json"
    with pytest.raises(UserError, match="cannot find model"):
        check_spec("gpt2")
