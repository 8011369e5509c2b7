"""Fused collectives as the user asks: in the program, the step and the summary, and their counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.fusion_request import fusion_text, read_fusion
from autoshard.costs.collective import joint_seconds
from autoshard.emit.model_file import gradient_buckets as bucket_lines
from autoshard.errors import UsageError
from autoshard.ir import plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Fusion, Plan
from autoshard.ir.program import GradientBucket, Program
from autoshard.program import gradient_buckets
from autoshard.program.early_reductions import early_linears
from autoshard.program.lower import lower
from autoshard.program.program_check import _check_weight_buckets
from autoshard.program.weight_buckets import parameter_paths
from autoshard.replay.command_line import command
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation import simulate
from autoshard.simulation.memory_curve import bucket_bytes
from autoshard.simulation.timeline import Event, Timeline
from autoshard.text.account_text import waits
from autoshard.text.collective_lines import CollectiveCount, collective_counts, collective_words
from autoshard.text.plan_summary import summary
from autoshard.workflow import make_plan
from tests.graphs import mlp_graph

# --- as the user asks ---


HARDWARE = load_hardware("a100-80g-sxm")


def planned(strategy: str, *fuse: str) -> tuple[Graph, Plan, Program]:
    graph = mlp_graph()
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse("dp=2"), strategy=strategy, fuse=fuse))
    return graph, plan, lower(plan, graph)


def test_gradients_alone_by_size_and_by_index() -> None:
    graph, plan, whole = planned("dp")
    (bucket,) = whole.gradient_buckets
    names = bucket.parameters
    assert len(names) > 2

    def groups(*fuse: str) -> list[tuple[str, ...]]:
        fused = lower(replace(plan, fusion=read_fusion(fuse)), graph)
        return [bucket.parameters for bucket in fused.gradient_buckets]

    assert groups("all_reduce=none") == [(name,) for name in names]
    assert groups("all_reduce=index:1") == [names[:1], names[1:]]
    assert groups("allreduce=index:1,3") == [group for group in (names[:1], names[1:3], names[3:]) if group]
    assert groups("all_reduce=1 GiB") == [names]
    first = bucket_bytes(whole, replace(bucket, parameters=names[:2]))
    assert groups(f"all_reduce={first:.0f} B")[0] == names[:2]


def test_the_first_gradients_start_before_many_are_made() -> None:
    """Weights of 4 MiB: the first one's bucket is not kept open for 25 MiB, as those after it are."""
    graph = mlp_graph(10, 8, 1024)
    plan = search(graph, HARDWARE, SearchRequest(Mesh.parse("dp=2"), strategy="dp"))
    first, *others = lower(plan, graph).gradient_buckets
    weights = [sum("weight" in path for path in bucket.parameters) for bucket in (first, *others)]
    assert weights[0] == 1 and max(weights[1:]) > 2 and sum(weights) == 10


def test_buckets_close_early_where_backward_has_just_waited_for_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column- and row-parallel weights of 8 MiB: behind a sum over tp, the next is some products away."""
    graph, programs = mlp_graph(12, 512, 2048), {}
    plans = {s: search(graph, HARDWARE, SearchRequest(Mesh.parse("dp=2,tp=2"), strategy=s)) for s in ("megatron", "dp")}
    for behind in (0.5, 1.0):
        monkeypatch.setattr(gradient_buckets, "BEHIND", behind)
        programs[behind] = {strategy: lower(plan, graph) for strategy, plan in plans.items()}
    early, late = (programs[behind]["megatron"] for behind in (0.5, 1.0))
    linears = early_linears(early.instructions)
    assert len(linears) == 6
    assert {bucket.after for bucket in early.gradient_buckets[1:-1]} <= set(linears)
    assert not {bucket.after for bucket in late.gradient_buckets[1:-1]} <= set(linears)
    assert simulate(early, graph, HARDWARE).step_seconds < simulate(late, graph, HARDWARE).step_seconds
    assert programs[0.5]["dp"].gradient_buckets == programs[1.0]["dp"].gradient_buckets  # nothing to wait for


def test_weights_alone_and_together() -> None:
    graph, plan, program = planned("fsdp")

    def groups(*fuse: str) -> list[tuple[str, ...]]:
        fused = lower(replace(plan, fusion=read_fusion(fuse)), graph)
        _check_weight_buckets(fused)
        return [parameter_paths(fused, bucket) for bucket in fused.weight_buckets]

    every = [path for bucket in program.weight_buckets for path in parameter_paths(program, bucket)]
    assert len(every) > 1
    assert groups("all_gather=none") == [(path,) for path in every]
    assert groups("reduce_scatter=1 GiB") == [tuple(every)]


def test_the_step_has_as_many_collectives_as_the_program_has_buckets() -> None:
    """Of the search's own plan, and in the words that are printed."""
    graph, plan, program = planned("dp", "all_reduce=none")
    timeline = simulate(program, graph, HARDWARE)
    counts = collective_counts(timeline)
    assert counts["all_reduce", ("dp",)].calls == len(program.gradient_buckets) > 1
    text = " ".join(summary(plan, graph, timeline=timeline).split())
    assert collective_words(timeline) in text and "over 1 group, on 1 stream" in text
    assert f"critical path {waits(timeline)}" in text and "computing" in waits(timeline)
    assert "fused all_reduce=none" in text
    assert "--fuse all_reduce=none" in command(plan)


def test_the_size_of_the_cost_model_is_the_best_of_all_numbers_of_buckets() -> None:
    """n starts beside backward and the last bucket after it, for every n."""
    graph, plan, whole = planned("dp", "all_reduce=auto")
    (fusion,) = plan.fusion
    total = sum(bucket_bytes(whole, bucket) for bucket in lower(replace(plan, fusion=()), graph).gradient_buckets)
    mesh = plan.mesh
    start = joint_seconds(HARDWARE, mesh, (0,), "all_reduce", 1.0)
    per_byte = (joint_seconds(HARDWARE, mesh, (0,), "all_reduce", 2e12) - start) / 2e12

    def seconds(size: float) -> float:
        return total / size * start + per_byte * size

    assert seconds(fusion.bucket_bytes) <= min(seconds(total / n) for n in range(1, 100)) * 1.01


@pytest.mark.parametrize(
    ("strategy", "fuse", "told"),
    [
        ("dp", "all_reduce=index:1,2", ""),
        ("dp", "all_reduce=index:1,6,90", "ignored of all_reduce at 6, 90: this plan all-reduces 6 gradients"),
        ("dp", "all_gather=none", "ignored of all_gather: this plan gathers no weights"),
        ("fsdp", "all_gather=none", ""),
        ("fsdp", "all_reduce=none", "ignored of all_reduce: this plan all-reduces no gradients"),
    ],
)
def test_what_changes_nothing_is_said(strategy: str, fuse: str, told: str) -> None:
    graph = mlp_graph()
    result = make_plan(graph, HARDWARE, SearchRequest(Mesh.parse("dp=2"), strategy=strategy, fuse=(fuse,)))
    notes = [note for note in result.plan.search.notes if "--fuse" in note]
    assert [told in note for note in notes] == [True] * bool(told), notes
    assert not told or told.split(": ")[1] in " ".join(summary(result.plan, graph).split())


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["=auto"], "expected all_reduce"),
        (["broadcast=auto"], "expected all_reduce, all_gather or reduce_scatter"),
        (["all_reduce=25"], "--fuse 'all_reduce=25'"),
        (["all_reduce=0 B"], "more than zero"),
        (["all_gather=index:3"], "only gradients that are all-reduced"),
        (["all_reduce=index:3,2"], "growing"),
        (["all_reduce=index:"], "growing"),
        (["all_gather=1MiB", "reduce_scatter=2MiB"], "scattered together"),
        (["all_reduce"], "expected all_reduce"),
    ],
)
def test_what_can_not_be_is_said(texts: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_fusion(texts)


@pytest.mark.parametrize("text", ["all_reduce=none", "all_gather=auto", "all_reduce=index:1,7", "all_reduce=25 MiB"])
def test_it_is_said_again_as_it_was(text: str) -> None:
    (one,) = read_fusion([text])
    assert read_fusion([fusion_text(one)]) == (one,)


def test_all_at_once_and_a_plan_of_before() -> None:
    assert [one.collective for one in read_fusion(["none"])] == ["all_reduce", "all_gather"]
    _, plan, _ = planned("dp", "all_reduce=25MiB")
    assert plan.fusion == (Fusion("all_reduce", "size", 25 * 2**20),)
    text = plan_json.dumps(plan)
    assert plan_json.loads(text) == plan
    old = plan_json.dumps(replace(plan, fusion=())).replace('"schema_version": 8', '"schema_version": 5')
    assert plan_json.loads(old.replace(',\n "fusion": []', "")) == replace(plan, fusion=())


# --- how many collectives a simulated step has, over how many groups, of how many sizes ---


def event(kind: str, axes: tuple[str, ...], size: float, at: int | None = 0) -> Event:
    return Event("e", "communication x" if kind else "", 0.0, 1.0, "forward", size, "", "", at, (), kind, axes)


def test_equal_kinds_over_one_group_are_counted_together() -> None:
    events = (
        event("all_reduce", ("tp",), 8.0), event("", (), 100.0), event("all_reduce", ("tp",), 8.0),
        event("all_reduce", ("tp",), 4), event("all_gather", ("tp",), 8), event("all_reduce", ("dp", "tp"), 8, None),
    )  # fmt: skip
    timeline = Timeline(events, 6.0, (), (), 0.0, 0.0, (), 0.0)
    assert collective_counts(timeline) == {
        ("all_reduce", ("tp",)): CollectiveCount(3, 2, 20.0),
        ("all_gather", ("tp",)): CollectiveCount(1, 1, 8.0),
        ("all_reduce", ("dp", "tp")): CollectiveCount(1, 1, 8.0, 1),
    }


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 1, 2, 3), (3, 2, 2, 0), (12, 11, 10, 9)])
def test_the_table_of_a_package_is_of_these_buckets(order: tuple[int, ...]) -> None:
    """Alike ones that follow each other are written as one, whatever names and numbers a model has."""
    *_, program = planned("dp")
    paths = [(f"a.{n}.w", f"a.{n + 1}.b.{n}.c", f"a.{n - 1}.d") for n in order]
    paths += [("head",), ("a.7.{x}",), ("a.6.{x}",), ("a.007.'",), ("a.6.'",), ("a.5.'",)]
    buckets = tuple(GradientBucket(("dp",), "float32", group) for group in paths)
    values: dict[str, Any] = {}
    exec("\n".join(bucket_lines(replace(program, gradient_buckets=buckets))), values)
    assert values["GRADIENT_BUCKETS"] == [(("dp",), [*group]) for group in paths]
