"""The verbs on a saved graph, without torch: plan, simulate, report; and what a package holds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from autoshard.api import verbs
from autoshard.cli import commands
from autoshard.errors import InvalidFileError, UserError
from autoshard.ir import graph_json, plan_json
from autoshard.package.output_folder import MANIFEST
from autoshard.package.package_files import SEARCH_LOG, read_package
from autoshard.system import progress
from tests.graphs import mlp_graph
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    graph = folder / "mlp.graph.json"
    graph.write_text(graph_json.dumps(mlp_graph(4, 64, 128)), encoding="utf-8")
    words = ["plan", str(graph), "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm", "--out", str(folder / "out")]
    program = "import sys; sys.modules['torch'] = None\nfrom autoshard.cli import commands\n"
    program += f"sys.exit(commands.main({words!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert "next: torchrun --nproc-per-node 4" in done.stdout
    return folder / "out"


def names(folder: Path) -> set[str]:
    """All files but the log of wall times, which differs from run to run."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return files - {SEARCH_LOG}


def test_a_package_holds_what_its_manifest_says(package: Path) -> None:
    listed = json.loads((package / MANIFEST).read_text(encoding="utf-8"))["files"]
    assert names(package) == {*listed, MANIFEST}
    wanted = {"model_parallel.py", "train.py", "convert.py", "plan.json", "graph.json", "timeline.json", "report.html"}
    assert wanted | {"README.md", "runtime/__init__.py"} <= names(package)


def test_what_a_model_prints_is_no_part_of_the_json(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(request: object) -> object:
        print("loading the weights")
        return graph_json.load(package.parent / "mlp.graph.json")

    monkeypatch.setattr("autoshard.workflow.read_graph", read)
    words = ["plan", str(package.parent / "mlp.graph.json"), "--mesh", "dp=2", "--hardware", "cpu-local", "--json"]
    assert commands.main([*words, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["mesh"] == {"dp": 2}
    assert "loading the weights" in printed.err


def test_a_damaged_profile_is_placed_in_its_plan(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(package, tmp_path / "out")
    path = tmp_path / "out" / "plan.json"
    path.write_text(path.read_text(encoding="utf-8").replace("312 TFLOP/s", "312 TFLAP/s"), encoding="utf-8")
    assert commands.main(["simulate", str(tmp_path / "out")]) == 5
    assert "out/plan.json, profile a100-80g-sxm:" in capsys.readouterr().err


def test_nothing_of_autoshard_is_imported(package: Path) -> None:
    for path in package.rglob("*.py"):
        assert "import autoshard" not in path.read_text(encoding="utf-8")
        assert "from autoshard" not in path.read_text(encoding="utf-8")


def test_planning_again_changes_no_byte(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (package / name).read_bytes() for name in names(package)}
    graph = package.parent / "mlp.graph.json"
    words = ["plan", str(graph), "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm", "--out", str(package), "--json"]
    assert commands.main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {name: (package / name).read_bytes() for name in names(package)} == before
    plan = plan_json.load(package / "plan.json")
    assert printed["plan_hash"] == plan_json.plan_hash(plan, graph_json.load(package / "graph.json"))
    assert printed["predicted_seconds"] == plan.predicted_seconds
    assert printed["mesh"] == {"dp": 2, "tp": 2}


def test_simulate(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json.load(package / "plan.json")
    assert commands.main(["simulate", str(package / "plan.json"), "-o", str(tmp_path / "t.json"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step_seconds"] == plan.predicted_seconds
    assert 0 < printed["error_band"]["error"] < 1 and printed["error_band"]["kind"] in ("measured", "datasheet")
    assert (tmp_path / "t.json").read_bytes() == (package / "timeline.json").read_bytes()
    assert commands.main(["simulate", str(package)]) == 0
    shown = capsys.readouterr().out
    assert "communication tp" in shown and "±" in shown.splitlines()[1]


def test_a_compiled_step_is_simulated(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The perceptron has no numbered blocks: its operators stay as they are, and so does its step."""
    out = str(tmp_path / "t.json")
    assert commands.main(["simulate", str(package), "--compiled", "-o", out, "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["step_seconds"] == plan_json.load(package / "plan.json").predicted_seconds
    )


def test_report(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["report", str(package), "-o", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'r.html'}\n"
    assert (tmp_path / "r.html").read_bytes() == (package / "report.html").read_bytes()


def test_the_plan_as_a_picture(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["report", str(package), "--svg", "-o", str(tmp_path / "p.svg")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "p.svg")
    picture = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg") and picture.strip() in (package / "report.html").read_text(encoding="utf-8")


def test_an_output_that_cannot_be_written(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["report", str(package), "-o", str(tmp_path / "none" / "r.html")]) == 2
    assert "can't write" in capsys.readouterr().err


def test_a_graph_of_another_plan(package: Path, tmp_path: Path) -> None:
    for name in (MANIFEST, "plan.json"):
        (tmp_path / name).write_bytes((package / name).read_bytes())
    (tmp_path / "graph.json").write_text(graph_json.dumps(mlp_graph(2)), encoding="utf-8")
    with pytest.raises(InvalidFileError, match="is not the graph"):
        read_package(tmp_path)


def test_an_edited_file_is_not_overwritten(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, out = package.parent / "mlp.graph.json", tmp_path / "out"
    words = ["plan", str(graph), "--mesh", "dp=2", "--hardware", "a100-80g-sxm", "--out", str(out)]
    assert commands.main(words) == 0
    (out / "train.py").write_text("mine\n", encoding="utf-8")
    (out / "data.py").write_text("mine\n", encoding="utf-8")
    assert commands.main(words) == 2
    assert "train.py was edited" in capsys.readouterr().err
    assert (out / "train.py").read_text(encoding="utf-8") == "mine\n"
    (out / "train.py").unlink()
    assert commands.main(words) == 0
    assert (out / "data.py").read_text(encoding="utf-8") == "mine\n"


def test_progress_is_told_only_where_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 3600.0)
    with progress.step("thinking"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SILENT_SECONDS", 1e-3)
    said = threading.Event()
    announce = progress._announce

    def heard(label: str, start: float, done: threading.Event, screen: TextIO) -> None:
        said.set()
        announce(label, start, done, screen)

    monkeypatch.setattr(progress, "_announce", heard)
    with progress.step("thinking"):
        assert said.wait(60)
        written = ""
        while "\n" not in written:
            written += capsys.readouterr().err
    assert re.fullmatch(r"(thinking … \d+ s\n)+thinking: \d+\.\d s\n", written + capsys.readouterr().err)
    with progress.step("thinking", quiet=True):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_a_spinner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)
    with pytest.raises(ZeroDivisionError), progress.step("thinking"):
        _ = 1 / 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["none.py:build", "none.pt2", "collections:Counter"])
def test_a_package_is_verified_where_it_was_planned(package: Path, spec: str) -> None:
    loaded = verbs.load_plan(package)
    loss = (("--loss", "none.py:loss"),)
    with pytest.raises(UserError, match="  try: the command in the folder where it was planned: none"):
        verbs.verify(replace(loaded, plan=replace(loaded.plan, model=spec, model_arguments=loss)))
