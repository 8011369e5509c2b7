"""Ctrl-C: the best plan so far where there is one, else the end at once; the handler is as before."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from autoshard import solvers
from autoshard.cli import commands
from autoshard.ir import graph_json, plan_json
from autoshard.solvers.relax.reader_shares import ReaderShares
from tests.graphs import mlp_graph


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
    [
        ("dp", "autoshard.search.search_task.solvers.solve"),
        ("auto", "autoshard.solvers.relax.reader_shares.ReaderShares.search"),
    ],
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

    monkeypatch.setattr("autoshard.search.kept.kept_search.formulate", pressed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run(words(graph_file, tmp_path / "out"), capsys)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, err) == (130, "", "autoshard: interrupted\n")
    assert not (tmp_path / "out").exists()
