"""The command line: quick help, one clear sentence and an exit code for bad input, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.cli.parser import _pair
from autoshard.errors import CaptureError, CheckError, InfeasibleError, InvalidFileError, UsageError
from autoshard.ir import graph_json
from tests.graphs import mlp_graph
from tests.slow import quick_at

ROOT = Path(__file__).resolve().parents[2]
HELP_MODULES = 160  # 126 when this was written: what a tenth of a second imports


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.graph.json"
    path.write_text(graph_json.dumps(mlp_graph()), encoding="utf-8")
    return path


def plan_words(graph: Path, out: Path, **options: str) -> list[str]:
    chosen = {"mesh": "dp=2,tp=2", "hardware": "a100-80g-sxm", "out": str(out)} | options
    return [
        "plan",
        str(graph),
        *(word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)),
    ]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = commands.main(words)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    start = "import sys, autoshard.cli.commands as c\ntry: c.main(['--help'])\n"
    program = start + "except SystemExit: pass\nprint(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"torch", "numpy", "jinja2", "rich"} & set(done.stdout.split("'"))
    assert len(done.stdout.split("'")) // 2 < HELP_MODULES


@pytest.mark.parametrize(
    "verb", ["trace", "plan", "verify", "simulate", "report", "explain", "diff", "profiles", "prove"]
)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        commands.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"autoshard {verb}" in capsys.readouterr().out


BAD_OPTIONS = [
    ({"mesh": "dp"}, 2, "expected name=size"),
    ({"mesh": "dp=0"}, 2, "axis dp has size 0"),
    ({"mesh": "dp=2,dp=2"}, 2, "axis dp is named twice"),
    ({"devices": "8"}, 2, "the mesh dp=2,tp=2 has 4 devices, but --devices says 8"),
    ({"hardware": "a100"}, 2, "a100-80g-sxm"),
    ({"hardware": "none.toml"}, 5, "none.toml"),
    ({"memory_limit": "much"}, 2, "'much' is not a quantity of bytes"),
    ({"memory_limit": "1 KiB"}, 3, "1 KiB"),
    ({"strategy": "fastest"}, 2, "unknown strategy 'fastest'"),
    ({"strategy": "random:x"}, 2, "expected a whole number"),
    ({"precision": "fp8"}, 2, "invalid choice: 'fp8'"),
    ({"precision": "bf16-mixed"}, 2, "--precision can't change the saved graph"),
    ({"with": "n=2"}, 2, "--with can't change the saved graph"),
    ({"with": "n"}, 2, "expected NAME=VALUE, got 'n'"),
    ({"frobnicate": "1"}, 2, "autoshard plan has no option --frobnicate"),
    ({"memory-limits": "1"}, 2, "try: --memory-limit"),
]


@pytest.mark.parametrize(("options", "code", "message"), BAD_OPTIONS, ids=[text for _, _, text in BAD_OPTIONS])
def test_bad_options(
    options: dict[str, str],
    code: int,
    message: str,
    graph_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(tmp_path.rglob("*"))
    exit_code, out, err = run(plan_words(graph_file, tmp_path / "out", **options), capsys)
    assert exit_code == code
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before


EARLY = [
    (["missing.py:build"], 2, "there is no file missing.py"),
    (["missing.pt2"], 5, "there is no file missing.pt2"),
    (["model"], 2, "cannot find model 'model'"),
    (["model.py:build", "--precision", "bf16-mixed", "--hardware", "ascend-910a"], 2, "ascend-910a has no bfloat16"),
    (["model.py:build", "--solver", "fastest"], 2, "unknown solver 'fastest'"),
    (["model.py:build", "--strategy", "fastest"], 2, "unknown strategy 'fastest'"),
    (["model.py:build", "--pin", "fc=Shard(0)@xp"], 2, "unknown mesh axis 'xp'"),
    (["model.py:build", "--pins", "none.toml"], 5, "can't read the pins none.toml"),
]


@pytest.mark.parametrize(("more", "code", "message"), EARLY, ids=[message for _, _, message in EARLY])
def test_what_is_cheap_to_see_is_told_before_torch_is_imported(
    more: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    monkeypatch.setattr("autoshard.workflow.read_graph", lambda request: pytest.fail("captured"))
    where = [] if "--hardware" in more else ["--hardware", "a100-80g-sxm"]
    exit_code, out, err = run(["plan", *more, *where, "--mesh", "dp=2"], capsys)
    assert (exit_code, out) == (code, "")
    assert message in err and "  try: " in err


def test_trace_looks_for_the_file_first(tmp_path: Path) -> None:
    program = "import sys, autoshard.cli.commands as c; print(c.main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["trace", str(tmp_path / "missing.py:build"), "-o", str(tmp_path / "out.json")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "2 False\n"


def test_a_mesh_larger_than_the_cluster(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(plan_words(graph_file, tmp_path / "out", mesh="dp=100000"), capsys)
    assert code == 2
    assert "at most" in err


def test_no_verb_and_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], capsys)[0] == 2
    code, _, err = run(["plan", "x.graph.json"], capsys)
    assert code == 2
    assert "--hardware" in err
    code, _, err = run(["plan", "x.graph.json", "--hardwear", "cpu-local"], capsys)
    assert code == 2
    assert "has no option --hardwear" in err and "try: --hardware" in err
    code, _, err = run(["plan", "x.graph.json", "--hardware", "cpu-local"], capsys)
    assert code == 2
    assert "--mesh, or --devices to search for one" in err


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "autoshard.graph", "schema_version": 99}', "\x00"])
def test_a_damaged_graph(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.graph.json"
    path.write_text(text, encoding="utf-8")
    code, _, err = run(plan_words(path, tmp_path / "out"), capsys)
    assert code == 5
    assert "model.graph.json" in err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_else(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years\n", encoding="utf-8")
    code, _, err = run(plan_words(graph_file, tmp_path / "out"), capsys)
    assert code == 2
    assert "holds something else: thesis.tex" in err
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("verb", ["verify", "simulate", "report"])
def test_no_package(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run([verb, str(tmp_path / "none")], capsys)
    assert code == 5
    assert "there is no package at" in err
    code, _, err = run([verb, str(tmp_path)], capsys)
    assert code == 5
    assert "is not a package" in err


def test_errors_as_json(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*plan_words(graph_file, tmp_path / "out", mesh="dp"), "--json"], capsys)
    assert json.loads(out)["error"]["exit_code"] == code == 2


ERRORS = [(UsageError, 2), (InfeasibleError, 3), (CaptureError, 4), (InvalidFileError, 5), (CheckError, 6)]


@pytest.mark.parametrize(("kind", "code"), ERRORS, ids=[kind.__name__ for kind, _ in ERRORS])
def test_exit_codes(
    kind: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("what is wrong", "this")  # type: ignore[call-arg]

    monkeypatch.setattr("autoshard.cluster.hardware.list_profiles", fail)
    assert run(["profiles"], capsys) == (code, "", "autoshard: what is wrong\n  try: this\n")
    with pytest.raises(kind):
        commands.main(["profiles", "--debug"])


def test_a_bug_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("autoshard.cluster.hardware.list_profiles", lambda: 1 / 0)
    code, _, err = run(["profiles"], capsys)
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "this is a bug" in err
    assert "Traceback" not in err


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoshard.cluster.hardware.list_profiles", interrupt)
    assert run(["profiles"], capsys) == (130, "", "autoshard: interrupted\n")


def test_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["profiles"], capsys)
    assert code == 0
    assert all(name in out for name in ("a100-80g-sxm", "ascend-910a", "cpu-local"))
    assert "Omni-Path 6.25 GB/s (633 MB/s measured)" in out  # what counts beside what the datasheet says
    assert out.count("/s measured)") == 1
    code, text, _ = run(["profiles", "cpu-local"], capsys)
    assert code == 0
    assert text == json.loads(run(["profiles", "cpu-local", "--json"], capsys)[1])["cpu-local"]


VALUES = [
    ("a=1", 1),
    ("a=1.5", 1.5),
    ("a=true", True),
    ("a=False", False),
    ("a=text", "text"),
    ("a=", ""),
    ("a=b=c", "b=c"),
]


@pytest.mark.parametrize(("text", "value"), VALUES, ids=[text for text, _ in VALUES])
def test_argument_values(text: str, value: object) -> None:
    assert _pair(text) == ("a", value)
    assert type(_pair(text)[1]) is type(value)


def test_every_verb_that_writes_takes_both_names_for_where() -> None:
    """Strangers type `plan -o` and `report --out`."""
    verbs = commands.parser(commands.VERBS)._subparsers._group_actions[0].choices
    names = {verb: {o for action in parser._actions for o in action.option_strings} for verb, parser in verbs.items()}
    writing = {verb for verb, options in names.items() if options & {"-o", "--out", "--output"}}
    assert {"trace", "plan", "simulate", "compare", "report", "estimate", "calibrate"} <= writing
    assert all({"-o", "--out"} <= names[verb] for verb in writing)


@pytest.mark.parametrize("name", quick_at(["--micro-batches", "--micro-size", "--accumulate"], 1))
def test_accumulation_by_the_name_that_people_know(name: str, graph_file: Path, tmp_path: Path) -> None:
    words = plan_words(graph_file, tmp_path / "package", strategy="dp")
    assert commands.main([*words, name, "3"]) == 0
    assert "MICRO_BATCHES = 3" in (tmp_path / "package" / "model_parallel.py").read_text(encoding="utf-8")
