"""Real processes: closed streams, full disks, missing packages, Ctrl-C; the garbage collector is as before."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from autoshard import solvers
from autoshard.cli import commands
from autoshard.ir import graph_json, plan_json
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.system.process_memory import infrequent_gc
from tests.graphs import mlp_graph
from tests.hangs import HANGS
from tests.slow import quick_at, slow, thinned

# --- streams that are closed or full, no home, files that may not grow, missing packages: real processes ---


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


@pytest.mark.parametrize(("line", "says"), thinned(REFUSED, 2), ids=[says for _, says in REFUSED])
def test_what_the_system_refuses_is_told_in_a_sentence(line: str, says: str, tmp_path: Path) -> None:
    done = shell(tmp_path, line)
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr and "\n  try: " in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.graph.json"]


GOOD = [
    slow(PLAN, BARE),  # no HOME, no TERM, no locale
    slow(PLAN, {**BARE, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}),
    slow(f"{PLAN} --json", {**BARE, "PYTHONIOENCODING": "ascii"}),
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


# --- ctrl-C: the best plan so far where there is one, else the end at once; the handler is as before ---


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.graph.json"
    path.write_text(graph_json.dumps(mlp_graph(2, 64, 128)), encoding="utf-8")
    return path


def words(graph: Path, out: Path) -> list[str]:
    return ["plan", str(graph), "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm", "--out", str(out)]


def run(typed: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = commands.main(typed)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize(
    ("solver", "place"),
    quick_at(
        [
            ("dp", "autoshard.search.search_task.solvers.solve"),
            ("auto", "autoshard.solvers.relax.reader_shares.ReaderShares.search"),
        ],
        1,
    ),
)
def test_ctrl_c_ends_the_search_with_the_best_plan_so_far(
    solver: str,
    place: str,
    graph_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    solve = {"dp": solvers.solve, "auto": ReaderShares.search}[solver]
    calls: list[object] = []

    def interrupted(*arguments: object, **also: object) -> object:
        if not calls:
            signal.raise_signal(signal.SIGINT)
        calls.append(arguments)
        return solve(*arguments, **also)  # type: ignore[arg-type]

    monkeypatch.setattr(place, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        code, out, _ = run([*words(graph_file, tmp_path / "out"), "--solver", solver], capsys)
        after = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0
    assert "search stopped early; this is the best plan so far" in " ".join(out.split())
    assert plan_json.load(tmp_path / "out" / "plan.json").search.cut_short
    assert len(calls) <= 2  # the optimum, and at most the plan that was under way
    assert after is signal.default_int_handler


def test_ctrl_c_before_there_is_a_plan_ends_at_once(
    graph_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*arguments: object) -> object:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    monkeypatch.setattr("autoshard.search.cached.search_cache.formulate", pressed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run(words(graph_file, tmp_path / "out"), capsys)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, err) == (130, "", "autoshard: interrupted\n")
    assert not (tmp_path / "out").exists()


# --- the search for cycles is as it was, however a plan ends ---


def test_the_thresholds_are_given_back() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyboardInterrupt), infrequent_gc():
        assert gc.get_threshold()[0] > before[0]
        raise KeyboardInterrupt
    assert gc.get_threshold() == before
    first, second = ExitStack(), ExitStack()  # two threads: the one that began first ends first
    first.enter_context(infrequent_gc())
    second.enter_context(infrequent_gc())
    first.close()
    second.close()
    assert gc.get_threshold() == before
