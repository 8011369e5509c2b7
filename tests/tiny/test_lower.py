"""Lowering: unflattened storage, gradient buckets, and every invariant of `program.check` on many plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, PlanStep
from autoshard.program.gradient_buckets import gradient_buckets
from autoshard.program.lower import chosen_strategies, lower, split
from autoshard.program.program_check import check
from autoshard.program.weights import careful_casts, weight_path
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.coverage import covering_plans
from tests.graphs import mlp_graph
from tests.programs import Maker
from tests.slow import quick_at

GRAPH = mlp_graph(batch=6, hidden=10)
HARDWARE = load_hardware("a100-80g-sxm")
BATCH = ("a", "b", "i0")  # the names of the batch factor in the ops of this graph
MESHES = ("dp=1", "dp=2", "dp=3", "dp=2,tp=2", "dp=2,sp=2,tp=2")


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((2304, 768), "S0/3*64", ((3, 12, 64, 768), "S1")),
        ((2304, 768), "S1 S0/3", ((3, 768, 768), "S2 S1")),
        ((768,), "S0*64 S0*64", ((12, 64), "S0 S0")),
        ((5, 7), "R S1", ((5, 7), "R S1")),
        ((4, 6), "S1/2 S0", ((4, 2, 3), "S2 S0")),
    ],
)
def test_blocked_shards_are_held_unflattened(shape, layout, expected):
    sizes, split_layout = split(shape, Layout.parse(layout))
    assert (sizes, str(split_layout)) == expected


def checked(plan: Plan) -> None:
    check(lower(plan, GRAPH), GRAPH, chosen_strategies(plan, GRAPH))


@pytest.mark.parametrize("text", quick_at(MESHES, 1))
def test_the_best_the_megatron_and_random_plans_lower_to_sound_programs(text):
    mesh = Mesh.parse(text)
    checked(search(GRAPH, HARDWARE, SearchRequest(mesh)))
    checked(search(GRAPH, HARDWARE, SearchRequest(mesh, strategy="megatron")))
    for seed in range(10):
        checked(random_plan(PlanningContext(GRAPH, mesh, HARDWARE), seed))


def test_every_strategy_lowers_to_a_sound_program():
    plans = covering_plans(GRAPH, Mesh.parse("dp=2,tp=2"), HARDWARE, seed=0)
    assert len({op.strategy for plan in plans for op in plan.ops}) > 20
    for plan in plans:
        checked(plan)


def test_a_weight_of_two_uses_whose_gradients_lie_differently():
    """Of one use the gradient is summed over devices, of the other each has the whole: only the first is deferred."""
    tied = {"w1": "w0", "b1": "b0"}
    ops = tuple(replace(op, operands=tuple(tied.get(name, name) for name in op.operands)) for op in GRAPH.ops)
    left = tuple(parameter for parameter in GRAPH.parameters if parameter.tensor not in tied)
    tensors = tuple(tensor for tensor in GRAPH.tensors if tensor.name not in tied)
    graph, mixed = replace(GRAPH, ops=ops, parameters=left, tensors=tensors), 0
    for seed in range(40):
        plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2"), HARDWARE), seed)
        strategies = chosen_strategies(plan, graph)
        mixed += {str(strategies[op].operands[1]) for op in ("linear_0", "linear_1")} == {"R", "R+"}
        check(lower(plan, graph), graph, strategies)
    assert mixed


def test_a_partial_gradient_is_reduced_once_in_a_bucket(monkeypatch: pytest.MonkeyPatch):
    plan = _data_parallel(monkeypatch)
    program = lower(plan, GRAPH)
    paths = {path for bucket in program.gradient_buckets for path in bucket.parameters}
    assert paths == {parameter.path for parameter in program.parameters}
    assert all(bucket.axes == ("dp",) for bucket in program.gradient_buckets)
    assert not [i for i in program.instructions if not hasattr(i, "op")], "nothing moves in a data-parallel forward"


@pytest.mark.parametrize(("text", "cut", "expected"), [("dp=2", "", [1, 25, 4]), ("dp=2,tp=2", " S0", [2, 28])])
def test_the_first_bucket_has_a_mebibyte_of_a_device_and_others_25(text: str, cut: str, expected: list[int]) -> None:
    """As DistributedDataParallel's: 30 layers of 1 MiB each, the last of which backward ends first."""
    make = Maker(Mesh.parse(text))
    x, paths = make.input("x", (2, 512), "R R"[: len(cut) + 1]), [f"w{n}" for n in range(30)]
    for path in paths:
        weight = make.parameter(path, (512, 512), f"R{cut}", f"R+{cut}")
        x = make.compute("aten.linear", (x, weight, None), [(f"after_{path}", (2, 512), "R R"[: len(cut) + 1])])
    values = {value.name: value for value in make.values}
    buckets = gradient_buckets(make.parameters, make.instructions, values, make.mesh, {})
    assert [len(bucket.parameters) for bucket in buckets] == expected
    assert [path for bucket in buckets for path in bucket.parameters] == paths[::-1]


def test_casts_of_weights_that_move_are_careful_and_no_others() -> None:
    """Moved before the cast, after it, or not at all; nothing where there is no backward."""
    make = Maker(Mesh.parse("dp=2"))
    x, y = make.input("x", (4, 8), "S0", "bfloat16"), []
    for name in ("before", "after", "stays"):
        weight = make.parameter(name, (8, 8), "R" if name == "stays" else "S0", "R+" if name == "stays" else "S0")
        weight = make.move(f"{name}_moved", weight, "R+") if name == "before" else weight
        layout = "S0" if name == "after" else "R+"
        low = make.compute("aten.to", (weight,), [(f"{name}_low", (8, 8), layout)], dtype="bfloat16")
        low = make.move(f"{name}_gathered", low, "R+") if name == "after" else low
        y.append(make.compute("aten.linear", (x, low, None), [(f"{name}_y", (4, 8), "S0")], dtype="bfloat16"))
    loss = make.compute("aten.sum", (y[0],), [("loss", (), "P")])
    assert careful_casts(make.program((loss,), loss)) == {"before_low", "after_low"}
    assert not careful_casts(make.program(tuple(y)))


def _data_parallel(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The batch cut over dp, parameters stored whole: plain data parallelism."""
    mesh = Mesh.parse("dp=2")
    plan = search(GRAPH, HARDWARE, SearchRequest(mesh, strategy="dp"))
    assert {str(parameter.layout) for parameter in plan.parameters} == {"R"}
    return plan


def moves(text: str) -> list[PlanStep]:
    """Of `tp S0 R all_gather reduce_scatter, ...`; a way that does nothing is `-`."""
    words = [part.split() for part in text.split(", ")]
    return [
        PlanStep(*(tuple(word.split("+")) for word in row[:3]), *(kind.strip("-") for kind in row[3:])) for row in words
    ]


TP, DP = (f"{axis} S0 R all_gather reduce_scatter" for axis in ("tp", "dp"))
BOTH, MASK = "dp+tp S0+S0 R+R all_gather reduce_scatter", "dp R P mask slice"


@pytest.mark.parametrize(
    ("layout", "rows", "planned", "expected"),
    [
        ("S0 S0", 8, f"{TP}, {DP}", BOTH),
        ("S0 S0", 8, f"{DP}, {TP}", BOTH),
        ("S0 S0", 6, f"{TP}, {DP}", f"{TP}, {DP}"),  # in parts of two and one
        ("S0 S1", 8, f"{TP.replace('0', '1')}, {DP}", f"{TP.replace('0', '1')}, {DP}"),
        ("R S0", 8, f"{MASK}, {TP}", f"{TP}, {MASK}"),
        ("S0 S0", 8, f"tp S0 R all_gather slice, tp R R - all_reduce, {DP}", BOTH),
    ],
)
def test_gathers_of_a_weight_go_as_one_where_their_cuts_are_one(layout, rows, planned, expected):
    mesh = Mesh.parse("dp=2,tp=2")
    assert weight_path(moves(planned), Layout.parse(layout), (rows, 4), mesh) == moves(expected)


def test_an_unknown_strategy_lists_those_offered():
    plan = search(GRAPH, HARDWARE, SearchRequest(Mesh.parse("dp=2")))
    broken = replace(plan, ops=(replace(plan.ops[0], strategy="nonsense"), *plan.ops[1:]))
    with pytest.raises(UsageError, match="linear_0"):
        lower(broken, GRAPH)


def test_a_corrupted_program_is_caught_by_check(monkeypatch: pytest.MonkeyPatch):
    plan = _data_parallel(monkeypatch)
    program = lower(plan, GRAPH)
    with pytest.raises(AssertionError):
        check(replace(program, gradient_buckets=()), GRAPH, chosen_strategies(plan, GRAPH))
