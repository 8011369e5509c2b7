"""A search of whole steps that may keep results of a block one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli.commands import main
from autoshard.errors import UsageError
from autoshard.ir.graph_json import dumps
from autoshard.ir.plan import KEEP_SOME
from autoshard.ir.plan_json import load
from autoshard.replay.command_line import command
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_step import check_request
from autoshard.search.search_request import SearchRequest
from autoshard.text.step_text import certainty
from autoshard.whole_step_search.joint_plan import joint_plan, step_seconds
from autoshard.whole_step_search.joint_search import joint_search
from tests.graphs import mlp_graph
from tests.single.test_joint_search import gpt2, hardware, space
from tests.single.test_joint_search import wide as wide_gpt2


def test_some_results_are_kept_where_memory_allows_them_and_no_more() -> None:
    """Between what full recomputation holds and what keeping all that is dear does."""
    graph = wide_gpt2()
    ways = space(
        graph, 1, 8, stages=(1,), tensor=(1,), micro_batch=(4,), zero=(0,), keeps=("all", "expensive", "input")
    )
    lean = joint_search(graph, hardware(), replace(ways, keeps=("input",)), 8e10)
    free = joint_search(graph, hardware(), ways, 8e10)
    faster = 0
    for share in (0.1, 0.3, 0.5):
        room = lean.best.peak_bytes + share * (free.best.peak_bytes - lean.best.peak_bytes)
        three = joint_search(graph, hardware(), ways, room)
        more = joint_search(graph, hardware(), replace(ways, keeps=(*ways.keeps, KEEP_SOME)), room)
        assert more.best.peak_bytes <= room and more.bound <= three.bound * (1 + 1e-9)
        assert more.best.seconds <= three.best.seconds * (1 + 1e-9)
        faster += more.best.seconds < three.best.seconds
        chosen = [
            more.best.problem.keeps[k][p] for k, p in zip(more.best.problem.kinds, more.best.plan.points, strict=True)
        ]
        if any(keep.startswith(KEEP_SOME) for keep in chosen):
            _, plan = joint_plan(more, hardware(), Origin("gpt2"))
            assert step_seconds(plan) == pytest.approx(more.best.seconds, rel=0.04)
            assert {policy.keep for policy in plan.step.recompute} == {keep for keep in chosen if keep != "all"}
    assert faster


def test_the_command_says_which_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "gpt2.graph.json"
    saved.write_text(dumps(gpt2()), encoding="utf-8")
    argv = ["plan", str(saved), "--precision", "bf16-mixed", "--devices", "1", "--global-batch", "8", "--stages", "1"]
    argv += [
        "--hardware",
        "a100-80g-sxm",
        "--micro-batch",
        "2",
        "--recompute",
        "tensors",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(argv) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "results kept: " in printed and "what takes longest to make again for each byte" in printed
    plan = load(tmp_path / "out" / "plan.json")
    assert all(policy.keep.startswith(KEEP_SOME) for policy in plan.step.recompute) and plan.step.recompute
    assert "--recompute tensors" in command(plan)
    assert "keep=(" in (tmp_path / "out" / "model_parallel.py").read_text(encoding="utf-8")
    assert main(["explain", str(tmp_path / "out")]) == 0
    assert "results kept: " in " ".join(capsys.readouterr().out.split())


def test_without_a_search_nothing_says_which_results() -> None:
    with pytest.raises(UsageError, match="--recompute tensors is for steps that are searched for"):
        check_request(gpt2(), SearchRequest(step=replace(SearchRequest().step, recompute="tensors")).step)


def test_what_may_be_kept_is_said_as_it_was_asked() -> None:
    """Of what was not offered nothing is told; a block without results of that kind is named."""
    graph = gpt2()
    ways = space(graph, 1, 8, stages=(1,), tensor=(1,), micro_batch=(4,), zero=(0,), keeps=("input",))
    result = joint_search(graph, hardware(), ways, 8e10)
    assert certainty(result)[-1].endswith("; of each its input is kept") and not result.undivided
    single = mlp_graph(4, 8, 64)
    ways = space(single, 1, 8, stages=(1,), tensor=(1,), micro_batch=(4,), zero=(0,), keeps=("all", KEEP_SOME))
    result = joint_search(single, hardware(), ways, 8e10)
    assert certainty(result)[-1].endswith("; of each all is kept")
    reason = "it is not called by itself, or has other matmuls than those of several linear layers and attention"
    assert result.undivided[0] == (f"results of h.0, kept one by one: {reason}", 1)
