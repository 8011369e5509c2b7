"""Streams that are closed or full, no home, files that may not grow, missing packages: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.ir import graph_json
from tests.graphs import mlp_graph
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[2]
PLAN = "plan mlp.graph.json --mesh dp=2 --hardware cpu-local --out o"
# No bytecode: where files may not grow, Python would leave half of it in this clone.
BARE = {
    "PATH": os.environ.get("PATH", ""),
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "1",
    "AUTOSHARD_CACHE": "off",
}


def shell(folder: Path, line: str, environment: dict[str, str] = BARE) -> subprocess.CompletedProcess[str]:
    """`line` in a shell, where `autoshard` is this one."""
    (folder / "mlp.graph.json").write_text(graph_json.dumps(mlp_graph(2)), encoding="utf-8")
    line = line.replace("autoshard ", f"{sys.executable} -m autoshard ")
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=HANGS,
    )


REFUSED = [
    ("autoshard profiles >&-", "standard output is closed"),
    ("autoshard profiles >/dev/full", "No space left on device"),
    ("autoshard profiles --json >/dev/full", "No space left on device"),
    (f"ulimit -f 2; autoshard {PLAN}", "File too large"),
    ("autoshard plan $'a\\xff.py:build' --mesh dp=2 --hardware cpu-local", "is not UTF-8"),
    (f"autoshard {PLAN}/$(printf 'x%.0s' {{1..300}})", "File name too long"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_the_system_refuses_is_told_in_a_sentence(line: str, says: str, tmp_path: Path) -> None:
    done = shell(tmp_path, line)
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr and "\n  try: " in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.graph.json"]


GOOD = [
    (PLAN, BARE),  # no HOME, no TERM, no locale
    (PLAN, {**BARE, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}),
    (f"{PLAN} --json", {**BARE, "PYTHONIOENCODING": "ascii"}),
    (PLAN, {**BARE, "PYTHONWARNINGS": "error", "PYTHONOPTIMIZE": "1"}),
]


@pytest.mark.parametrize(("typed", "environment"), GOOD, ids=["bare", "ascii", "ascii json", "warnings and -O"])
def test_what_may_be_missing(typed: str, environment: dict[str, str], tmp_path: Path) -> None:
    done = shell(tmp_path, f"autoshard {typed}", environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o" / "plan.json").is_file()
    if "--json" in typed:
        assert json.loads(done.stdout)["mesh"] == {"dp": 2}


def test_closed_stderr_and_a_reader_that_went_away(tmp_path: Path) -> None:
    assert shell(tmp_path, "autoshard profiles 2>&- | head -n 1").stdout.startswith("profile")
    assert (
        shell(tmp_path, "autoshard profiles | true; test ${PIPESTATUS[0]} -eq 141 -o ${PIPESTATUS[0]} -eq 0").returncode
        == 0
    )


def test_a_damaged_file_is_found_without_assertions(tmp_path: Path) -> None:
    shell(tmp_path, "true")
    path = tmp_path / "mlp.graph.json"
    path.write_text(path.read_text(encoding="utf-8").replace("[8, 16]", "[8, 17]", 1), encoding="utf-8")
    typed = f"{sys.executable} -O -m autoshard {PLAN}".split()
    done = subprocess.run(typed, cwd=tmp_path, env=BARE, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 5 and "contradict each other" in done.stderr


def test_a_package_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build(): ...\n", encoding="utf-8")
    program = (
        "import sys; sys.modules['torch'] = None\nfrom autoshard.cli import commands\n"
        "sys.exit(commands.main(['plan', 'model.py:build', '--mesh', 'dp=2', '--hardware', 'cpu-local']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=BARE, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("autoshard: torch can't be imported")
