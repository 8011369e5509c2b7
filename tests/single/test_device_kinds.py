"""Clusters of several kinds of devices: what a profile of them says, stages and places on kinds, and what can't be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autoshard.api import verbs
from autoshard.api.step_answer import planned_step
from autoshard.cli.commands import main
from autoshard.cluster.device_kinds import orders, used
from autoshard.cluster.hardware import Hardware, hardware_text, load_hardware, parse_hardware
from autoshard.constraints.step_request import StagePin, StepRequest
from autoshard.costs.model_flops import ideal_seconds
from autoshard.emit import emit
from autoshard.errors import InvalidFileError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.simulation.steps.program_step import simulate_plan_step
from autoshard.verification.case import check_files, make_case
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.workflow import make_plan
from tests.single.test_joint_search import space
from tests.single.test_place_meshes import SPEC, captured
from tests.slow import slow

A100, V100 = load_hardware("a100-80g-sxm"), load_hardware("v100-32g-sxm2")
SPELLED = "a100-80g-sxm:8,v100-32g-sxm2:8"


@cache
def both(devices: int = 8) -> Hardware:
    return load_hardware(f"a100-80g-sxm:{devices},v100-32g-sxm2:{devices}")


def test_ranks_have_the_kind_that_the_cluster_says(tmp_path: Path) -> None:
    cluster = both()
    assert (cluster.of_ranks(0, 8), cluster.of_ranks(8, 4)) == (A100, V100) and cluster.of_ranks(4, 8) == cluster
    assert cluster.max_devices == 16 and cluster.nodes(12) == (8, 4)
    assert load_hardware("a100-80g-sxm:2,v100-32g-sxm2:16").nodes(18) == (2, 8, 8)
    assert parse_hardware(hardware_text(cluster)) == cluster
    assert [order.of_ranks(0, 8).name for order in orders(cluster)] == [A100.name, V100.name]
    rows = "".join(f'[[kinds]]\ndevices = 8\nprofile = "{kind.name}"\n' for kind in (A100, V100))
    file = tmp_path / "both.toml"
    file.write_text(f'schema = 1\nname = "{SPELLED}"\n{rows}')
    assert load_hardware(str(file)) == cluster


def test_the_kinds_of_the_ranks_that_are_used_are_those_that_count() -> None:
    three = load_hardware(f"{SPELLED},h100-80g-sxm:8")
    assert used(three, 8) == A100 and used(three, 24) is three
    assert used(three, 16) == both() == parse_hardware(used(three, 16).text)
    assert used(three, 12) == load_hardware("a100-80g-sxm:8,v100-32g-sxm2:4")
    assert len(list(orders(three))) == 6 and len(list(orders(load_hardware(f"{SPELLED},{SPELLED}")))) == 1


def test_profiles_of_kinds_are_files_next_to_the_cluster_and_of_one_kind(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(A100.text.replace('name = "a100-80g-sxm"', 'name = "own"'))
    rows = "[[kinds]]\ndevices = 8\nprofile = 'own.toml'\n[[kinds]]\ndevices = 8\nprofile = '{}'\n"
    cluster, head = tmp_path / "cluster.toml", 'schema = 1\nname = "x"\n'
    cluster.write_text(head + rows.format("v100-32g-sxm2"))
    hardware = load_hardware(str(cluster))
    assert [kind.hardware.name for kind in hardware.kinds] == ["own", "v100-32g-sxm2"]
    cluster.write_text(head + rows.format("cluster.toml"))
    with pytest.raises(InvalidFileError, match="a kind of devices can't be several"):
        load_hardware(str(cluster))
    cluster.write_text(head + rows.format("v100-32g-sxm2").replace("devices = 8\nprofile = 'v", "profile = 'v"))
    with pytest.raises(InvalidFileError, match=r"cluster.toml:6: kinds\[1\].devices: is missing"):
        load_hardware(str(cluster))


def test_what_spans_kinds_is_of_the_slowest_with_the_least_memory() -> None:
    """In whatever order; a dtype that one kind lacks is none of theirs."""
    for cluster in orders(both()):
        assert cluster.usable_memory_bytes == V100.usable_memory_bytes
        assert cluster.peak_flops("float16") == V100.peak_flops("float16")
        with pytest.raises(UsageError, match="can't compute in bfloat16"):
            cluster.peak_flops("bfloat16")
        assert cluster.links[-1].bandwidth == V100.links[-1].bandwidth < A100.links[-1].bandwidth


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("a100-80g-sxm:8", "expected NAME, or NAME:DEVICES"),
        ("a100-80g-sxm:8,", "expected NAME, or NAME:DEVICES"),
        ("a100-80g-sxm:12,v100-32g-sxm2:8", "whose nodes have 8, do not fill nodes"),
        ("a100-80g-sxm:0,v100-32g-sxm2:8", "do not fill nodes"),
        ("a100-80g-sxm:8,v100:8", "unknown hardware profile 'v100'"),
    ],
)
def test_clusters_that_can_not_be(spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        load_hardware(spec)
    if "fill" in said:
        assert load_hardware(caught.value.hint).kinds


@pytest.mark.parametrize("rows", ["[[kinds]]\ndevices = 8\n", '[[kinds]]\ndevices = "8"\nprofile = "cpu-local"\n'])
def test_files_that_can_not_be(rows: str) -> None:
    with pytest.raises(InvalidFileError):
        parse_hardware(f'schema = 1\nname = "x"\n{rows}')


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--mesh dp=4,tp=8", "dp=4,tp=8 has 32 devices"),
        slow("--mesh dp=8 --stages 4 --micro-batches 8", "describes at most 16"),
        slow("--mesh dp=8 --memory-limit 20GiB", "each kind of device has its own"),
        slow("--devices 16 --global-batch 32 --memory-limit 20GiB", "each kind of device has its own"),
        ("--devices 16 --global-batch 32 --level 1", "--level 1 of a step that is searched for is not offered"),
        slow("--mesh dp=8 --precision bf16-mixed", "has no bfloat16"),
        ("estimate --layers 2 --hidden 64 --heads 2 --sequence 8 --vocabulary 9 --batch 8", "of one kind of devices"),
    ],
)
def test_what_is_not_offered(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        options.split() if options.startswith("estimate") else ["plan", "examples/gpt2.py:build", *options.split()]
    )
    assert main([*command, "--hardware", SPELLED]) == 2
    assert said in capsys.readouterr().err


@cache
def gpt2() -> Graph:
    sizes = {"batch": 4, "sequence": 512, "n_layer": 4, "n_embd": 1024, "n_head": 8, "vocabulary": 1000}
    return capture("examples/gpt2.py:build", sizes, "fp16-mixed")


def staged(hardware: Hardware, parts: Plan | None = None) -> Plan:
    """GPT-2 on two stages, cut as `parts` is."""
    graph = gpt2()
    request = SearchRequest(Mesh.parse("dp=2"), step=StepRequest(stages=2, micro_batches=4))
    plan = make_plan(graph, hardware, request).plan
    return plan if parts is None else replace(plan, step=replace(plan.step, parts=parts.step.parts))


@pytest.mark.slow
def test_a_stage_takes_what_its_kind_of_devices_takes() -> None:
    """Each as in a step whose stages are all of its kind; the slower one has fewer blocks."""
    graph, cluster = gpt2(), both(2)
    mixed = staged(cluster)
    steps = {}
    for name, hardware in (("both", cluster), ("a100", A100), ("v100", V100)):
        plan = replace(mixed, hardware_text=hardware.text)
        steps[name] = simulate_plan_step(plan, lower(plan, graph), graph, hardware).costs.parts
    first, second = steps["both"]
    assert first.forward_seconds == pytest.approx(steps["a100"][0].forward_seconds, rel=0.01)
    assert second.forward_seconds == pytest.approx(steps["v100"][1].forward_seconds, rel=0.01)
    assert steps["v100"][0].forward_seconds > 1.1 * first.forward_seconds
    ops = [op.name for op in graph.ops]
    cuts = [ops.index(plan.step.parts[1].first_op) for plan in (mixed, staged(A100))]
    assert cuts[0] >= cuts[1]


def test_the_fullest_stage_is_full_for_its_own_kind() -> None:
    graph, cluster = gpt2(), both(2)
    plan = staged(cluster)
    peaks = simulate_plan_step(plan, lower(plan, graph), graph, cluster).peak_bytes
    shares = [peak / kind.usable_memory_bytes for peak, kind in zip(peaks, (A100, V100), strict=True)]
    assert plan.step_peak_bytes / plan.step_capacity_bytes == pytest.approx(max(shares))
    assert plan.peak_within(1.0) == pytest.approx(max(shares))


@pytest.mark.slow
def test_a_searched_step_is_no_slower_than_on_twice_the_slower_kind() -> None:
    ways = space(gpt2(), 4, 64, zero=(0,), micro_batch=(2, 4), stages=(2,))
    slow_ones = load_hardware("v100-32g-sxm2:2,v100-32g-sxm2:2")
    alone = joint_search(gpt2(), slow_ones, ways, slow_ones.usable_memory_bytes)
    every = [joint_search(gpt2(), cluster, ways, cluster.usable_memory_bytes) for cluster in orders(both(2))]
    fastest = min(every, key=lambda result: result.best.seconds)
    assert fastest.best.problem.choice.stages == 2 and fastest.best.seconds < 0.9 * alone.best.seconds
    assert all(result.bound <= result.best.seconds for result in every)
    parts = [part.stop - part.first for part in fastest.best.plan.parts]
    kinds = [kind.hardware.name for kind in fastest.best.problem.by_stage]
    assert dict(zip(kinds, parts, strict=True))[A100.name] > dict(zip(kinds, parts, strict=True))[V100.name]
    whole, halves = (ideal_seconds(gpt2(), cluster, 4) for cluster in (both(2), V100))
    assert whole < halves


def test_a_plan_says_which_ranks_are_of_which_kind() -> None:
    model = verbs.capture("tests/transformer_models.py:gpt2")
    step = StepRequest(global_batch=16, stages=2, micro_batch=4, zero=0)
    answer = planned_step(model, both(2), SearchRequest(None, devices=4, step=step))
    assert any("are v100-32g-sxm2" in note for note in answer.plan.plan.search.notes)


def placed(hardware: Hardware) -> Plan:
    step = StepRequest(places=(StagePin("vision", 0), StagePin("language", 1)), place_mesh=("1:dp=2,tp=2",))
    return make_plan(captured(), hardware, SearchRequest(Mesh.parse("dp=2"), step=step)).plan


@pytest.mark.slow
def test_places_on_two_kinds_compute_the_models_own_numbers_and_say_where_they_run() -> None:
    hardware = load_hardware("v100-32g-sxm2:2,a100-80g-sxm:4")
    plan = placed(hardware)
    program = lower(plan, captured())
    files = emit(program, plan, captured())
    assert check_files(make_case(SPEC, {}, captured(), steps=2), program, files).passed
    readme = files["README.md"]
    assert "on 6 devices" in readme and "`DEVICES` is 2 and 4 in their order" in readme
    assert "| 5 | 1 | dp=1, tp=1 |" in readme and "ranks 2 to 5 are a100-80g-sxm" in readme


@pytest.mark.parametrize("order", [slow(0), 1])
@pytest.mark.slow
def test_the_package_of_two_kinds_is_that_of_one(order: int) -> None:
    """What devices take changes no number: of one cut the files differ in what they predict alone."""
    graph, cluster = gpt2(), list(orders(both(2)))[order]
    mixed = staged(cluster)
    alone = staged(A100, mixed)
    decided = replace(mixed, hardware=alone.hardware, hardware_text=alone.hardware_text)
    first, second = (emit(lower(plan, graph), plan, graph) for plan in (mixed, decided))
    same = [name for name in first if name.endswith(".py") and first[name] == second[name]]
    assert "part_0.py" in same and "runtime/stages.py" in same
