"""Pins: every notation, every reason for a refusal, and that every solution keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import solvers
from autoshard.api.settings import search_request, step_request
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints import shard_counts
from autoshard.constraints.apply_pins import choice_text, pinned
from autoshard.constraints.pins import parse_pin, read_pins
from autoshard.errors import NAMED, InfeasibleError, InvalidFileError, UsageError
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.whole_step_search.step_request_space import searched_step
from tests.graphs import mlp_graph
from tests.rule_graphs import Writer

HARDWARE = load_hardware("a100-80g-sxm")
MESH = Mesh.parse("dp=2,tp=4")


def products() -> Formulation:
    """x (64, 64) @ w (64, 64), a relu after it, and a batched product: what the original interface cuts."""
    w = Writer()
    w.input("x", (64, 64), "float32")
    w.parameter("w", (64, 64))
    w.input("a", (8, 16, 32, 32), "float32")
    w.parameter("b", (8, 16, 32, 32))
    w.op("product", "aten.mm", ["x", "w"], (64, 64))
    w.op("active", "aten.relu", ["product"], (64, 64))
    w.op("batched", "aten.matmul", ["a", "b"], (8, 16, 32, 32))
    w.op("total", "aten.sum", ["active"], ())
    return formulate(PlanningContext(w.graph("total"), MESH, HARDWARE))


PRODUCTS = products()
MLP = formulate(PlanningContext(mlp_graph(3, 64, 64), MESH, HARDWARE))


def choices(formulation: Formulation, *texts: str) -> dict[str, str]:
    """Name of a node -> what the best plan under these pins does there, as one could pin it."""
    result = pinned(formulation, [parse_pin(text, formulation.mesh) for text in texts])
    solution = solvers.solve(result.formulation.problem)
    sites = result.formulation.sites
    return {site.name: choice_text(site, s, formulation.mesh) for site, s in zip(sites, solution.choice, strict=True)}


def layouts(formulation: Formulation, op: str, *texts: str) -> tuple[Layout | None, ...]:
    """The operands of an operator in the best plan under these pins."""
    result = pinned(formulation, [parse_pin(text, formulation.mesh) for text in texts])
    solution = solvers.solve(result.formulation.problem)
    node = next(n for n, site in enumerate(result.formulation.sites) if site.name == op and site.kind == "op")
    return result.formulation.sites[node].strategies[solution.choice[node]].operands


def test_placements() -> None:
    assert choices(MLP, "linear_0=Shard(1)@tp,Shard(0)@dp")["linear_0"] == "Shard(0)@dp,Shard(1)@tp"
    assert choices(MLP, "linear_0=Shard(-1)@tp")["linear_0"].endswith("Shard(1)@tp")
    assert choices(MLP, "linear_0=Replicate@tp,Replicate()@dp")["linear_0"] == "Replicate@dp,Replicate@tp"
    assert choices(MLP, "linear_0=Partial@tp")["linear_0"].endswith("Partial@tp")
    assert choices(MLP, "linear_0=S1@tp,m@dp")["linear_0"] == "Partial@dp,Shard(1)@tp"


def test_an_axis_need_not_be_named_where_there_is_one() -> None:
    formulation = formulate(PlanningContext(mlp_graph(1, 64, 64), Mesh.parse("tp=4"), HARDWARE))
    assert choices(formulation, "linear_0=Shard(1)")["linear_0"] == "Shard(1)@tp"


def test_what_can_be_pinned() -> None:
    assert choices(MLP, "h.1.fc.weight=Shard(1)@tp")["w1"].endswith("Shard(1)@tp")
    assert choices(MLP, "x=Shard(0)@dp,Shard(1)@tp")["x"] == "Shard(0)@dp,Shard(1)@tp"
    chosen = choices(MLP, "h.*.fc=Shard(1)@tp", "*.weight=Replicate@dp", "module:h.0=Shard(0)@dp")
    assert all(
        chosen[f"linear_{n}"].endswith("Shard(1)@tp") and chosen[f"w{n}"].startswith("Replicate") for n in range(3)
    )
    assert chosen["relu_0"].startswith("Shard(0)@dp")
    assert choices(MLP, "parameter:h.0*=Replicate@tp")["b0"].endswith("Replicate@tp")


def test_cuts_of_the_original_interface() -> None:
    x, w = layouts(PRODUCTS, "product", "product=((2, 4), (4, 1))")
    assert (str(x), str(w)) == ("S0 S1", "R+ S0")
    x, w = layouts(PRODUCTS, "product", "product=((2, 1), None)")
    assert x is not None and x.shards(0) == ((0, Shard(0)),)
    a, b = layouts(PRODUCTS, "batched", "batched=((2, 4, 1, 1), (2, 4, 1, 1))")
    assert (str(a), str(b)) == ("S0 S1", "S0 S1")
    assert choices(PRODUCTS, "x=((8, 1),)")["x"] == "Shard(0)@dp,Shard(0)@tp"
    assert choices(PRODUCTS, "x=(2, 4)")["x"] == "Shard(0)@dp,Shard(1)@tp"


def test_an_out_strategy_is_how_the_consumers_take_the_result() -> None:
    """MatMul ((2,4),(4,1)) with out ((8,1)): the sum over tp is scattered onto the rows."""
    (taken,) = layouts(PRODUCTS, "active", "product=((2, 4), (4, 1)) -> ((8, 1),)")
    assert taken is not None and shard_counts.counts(taken, 2, MESH) == (8, 1)
    (taken,) = layouts(PRODUCTS, "active", "product=((2, 4), (4, 1)) -> ((2, 1),)")
    assert taken is not None and shard_counts.counts(taken, 2, MESH) == (2, 1)


REFUSED = [
    (
        "product=((2, 4), (4, 1)) -> ((4, 1),)",
        "of the result can be sharded 2 or 8 times after these shards, not 4",
    ),
    ("product=((3, 1), (1, 1))", "3 shards are no product of axis sizes of dp=2,tp=4: 1, 2, 4, 8"),
    ("product=((4, 2), (2, 4))", "it needs 32 devices (m 4 x k 2 x n 4), dp=2,tp=4 has 8"),
    ("product=((8, 1),)", "cuts of 1, but there are 2 tensors: x, w"),
    ("product=((0, 1), (1, 1))", "a cut must be at least 1, got 0"),
    ("batched=((2, 1, 1, 1), (1, 1, 1, 4))", "are one loop (i0) and must be sharded equally, got 2 and 1"),
    ("product=((2, 4), (2, 1))", "dim 1 of operand 0 and dim 0 of operand 1 are one loop (k)"),
    ("product=((2,), (1, 1))", "x has 2 dims [64, 64], but (2,) cuts 1"),
    ("x=((3, 1),)", "3 shards are no product"),
    ("x=((8, 8),)", "(8, 8) needs 64 devices"),
    ("product=Shard(2)@tp", "it has 2 dims"),
    ("product=Shard(0)@xp", "unknown mesh axis 'xp'"),
    ("product=Shard(0)@tp,Shard(1)@tp", "axis tp is used twice"),
    ("product=Shard(0)", "no mesh axis"),
    ("product=Shard(x)@tp", "can't read 'Shard(x)'"),
    ("product=((2, 1)", "can't read the cuts"),
    ("product=((2, 'a'), None)", "expected whole numbers"),
    ("product", "expected WHAT=HOW"),
    ("thing:product=Shard(0)@tp", "unknown kind 'thing'"),
    ("product=q@tp", "its rule is m k, k n -> m n"),
    ("prodct=Shard(0)@tp", "no parameter, input, operator or module is called 'prodct'"),
    ("total=Shard(0)@tp", "offers no strategy with Shard(0)@tp"),
    ("x=Partial@tp", "offers no layout with Partial@tp"),
    ("product=((2, 1), (1, 1)) -> ((2, 1), (1, 1))", "cuts of 2, but there are 1 tensors"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[text for text, _ in REFUSED])
def test_a_refusal_says_why(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        pinned(PRODUCTS, [parse_pin(text, MESH)])
    assert reason in caught.value.message
    assert caught.value.exit_code == 2


def test_the_nearest_offered_are_named_and_are_offered() -> None:
    with pytest.raises(UsageError, match="offers no strategy") as caught:
        pinned(PRODUCTS, [parse_pin("product=Shard(5)@tp,Shard(1)@dp", MESH)])
    nearest = caught.value.hint.removeprefix("the nearest offered: ").split(" or ")
    assert len(nearest) == NAMED
    for text in nearest:
        assert choices(PRODUCTS, f"product={text}")["product"] == text
        assert text.startswith("Shard(1)@dp")
    with pytest.raises(UsageError) as caught:
        pinned(PRODUCTS, [parse_pin("prodct=Shard(0)@tp", MESH)])
    assert "product" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        pinned(MLP, [parse_pin("h=Shard(0)@tp", MESH)])
    assert "h.*" in caught.value.hint


def test_a_layout_that_is_written_otherwise_is_the_same() -> None:
    assert choices(PRODUCTS, "x=S0*16@tp") == choices(PRODUCTS, "x=S0@tp")
    with pytest.raises(UsageError, match="offers no layout"):
        pinned(PRODUCTS, [parse_pin("x=S0*32@tp", MESH)])


def test_pins_that_contradict_each_other() -> None:
    with pytest.raises(UsageError, match=r"'product=Shard\(0\)@tp' and 'product=Shard\(1\)@tp' contradict each other"):
        pinned(PRODUCTS, [parse_pin("product=Shard(0)@tp", MESH), parse_pin("product=Shard(1)@tp", MESH)])


def test_a_dim_that_the_operator_needs_whole() -> None:
    w = Writer()
    w.parameter("x", (64, 64))
    w.op("sums", "aten.cumsum", ["x"], (64, 64), dim=1)
    w.op("total", "aten.sum", ["sums"], ())
    formulation = formulate(PlanningContext(w.graph("total"), MESH, HARDWARE))
    with pytest.raises(UsageError, match="the operator needs all of it"):
        pinned(formulation, [parse_pin("sums=Shard(1)@tp", MESH)])
    with pytest.raises(UsageError, match="the operator needs all of it"):
        pinned(formulation, [parse_pin("sums=((1, 4),)", MESH)])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_solution_keeps_its_pins(data: st.DataObject) -> None:
    """Random choices of random nodes, pinned as they print: the plan has them, or none exists."""
    formulation = data.draw(st.sampled_from([MLP, PRODUCTS]))
    nodes = [n for n, site in enumerate(formulation.sites) if site.kind != "sink"]
    texts = {}
    for n in data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4, unique=True)):
        site = formulation.sites[n]
        choice = data.draw(st.integers(0, len(site.strategies or site.layouts) - 1))
        kind = "op" if site.kind == "op" else "input" if site.kind == "input" else "parameter"
        paths = {p.tensor: p.path for p in formulation.graph.parameters}
        texts[site.name] = (f"{kind}:{paths.get(site.name, site.name)}", choice_text(site, choice, formulation.mesh))
    try:
        chosen = choices(formulation, *(f"{what}={how}" for what, how in texts.values()))
    except InfeasibleError:
        return
    for name, (_, how) in texts.items():
        assert chosen[name] == how


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_cut_that_is_offered_can_be_pinned(data: st.DataObject) -> None:
    op = PRODUCTS.graph.by_op[data.draw(st.sampled_from(["product", "batched", "active"]))]
    site = next(site for site in PRODUCTS.sites if site.name == op.name)
    strategy = data.draw(st.sampled_from(site.strategies))
    cuts = shard_counts.of_operands(strategy, shard_counts.operand_shapes(PRODUCTS.graph, op), MESH)
    chosen = layouts(PRODUCTS, op.name, f"{op.name}={shard_counts.text(cuts)}")
    ranks = [len(cut) for cut in cuts if cut is not None]
    assert [shard_counts.counts(x, rank, MESH) for x, rank in zip(chosen, ranks, strict=True) if x is not None] == list(
        cuts
    )


def test_the_plan_says_who_decided() -> None:
    pins = ("h.0.fc=Shard(1)@tp", "h.1.fc.weight=Shard(0)@dp")
    plan = search(mlp_graph(3, 64, 64), HARDWARE, SearchRequest(MESH, pins=pins))
    assert {op.op for op in plan.ops if op.decided_by == "pin"} == {"linear_0"}
    assert [p.path for p in plan.parameters if p.decided_by == "pin"] == ["h.1.fc.weight"]
    assert plan.search.pins == ("h.0.fc=Shard(1)@tp", "h.1.fc.weight=Shard(0)@dp")
    free = search(mlp_graph(3, 64, 64), HARDWARE, SearchRequest(MESH))
    assert plan.certificate.lower_bound_seconds >= free.certificate.lower_bound_seconds
    assert {x.decided_by for x in (*free.ops, *free.parameters, *free.inputs)} == {"search"}


FILES = [
    ("pins.toml", '"h.0.fc" = "Shard(1)@tp"\n"x" = [[8, 1]]\n'),
    ("pins.toml", '[pins]\n"h.0.fc" = "Shard(1)@tp"\n"x" = "((8, 1),)"\n'),
    ("pins.json", json.dumps({"h.0.fc": "Shard(1)@tp", "x": [[8, 1]]})),
]


@pytest.mark.parametrize(("name", "text"), FILES, ids=range(len(FILES)))
def test_files(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    first, second, third = read_pins(["y=Replicate@dp"], tmp_path / name, MESH)
    assert (first.what, str(first.wants[0])) == ("h.0.fc", "Shard(1)@tp")
    assert (second.what, second.cuts) == ("x", ((8, 1),))
    assert third.what == "y"


def test_a_file_puts_modules_on_stages(tmp_path: Path) -> None:
    """Beside other pins, and where a whole step is searched."""
    file = tmp_path / "pins.toml"
    file.write_text('"stage:h.0-1" = 0\n"stage:h.2" = "1"\n"x" = "Replicate@dp"\n', encoding="utf-8")
    options = {"stages": 2, "micro_batches": 2, "pins_file": str(file)}
    request = search_request("dp=2,tp=2", None, 2, ["stage:h.3=1"], None, None, options)
    assert [(pin.path, pin.stage) for pin in request.step.pins] == [("h.0", 0), ("h.1", 0), ("h.2", 1), ("h.3", 1)]
    assert [pin.what for pin in request.pins_on(MESH)] == ["x"]
    step = step_request({"global_batch": 256, "stages": 2}, (), file)
    wanted = SearchRequest(devices=2, step=step, pins_file=file)
    result = searched_step(mlp_graph(4, 64, 64), HARDWARE, wanted)
    assert result.pins.texts == ("x=Replicate@dp",)
    first, second = result.best.plan.parts
    assert (first.first, first.stop) == (0, 2) and second.stop == 5  # the last has the loss
    file.write_text('"x" = "Shard(7)@dp"\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"x offers no layout with Shard\(7\)@dp"):
        searched_step(mlp_graph(4, 64, 64), HARDWARE, wanted)


DAMAGED = [("a.toml", "x ="), ("a.json", "{"), ("a.json", "[1]"), ("a.toml", "x = 3")]


@pytest.mark.parametrize(("name", "text"), DAMAGED, ids=str)
def test_damaged_files(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidFileError, match=name):
        read_pins([], tmp_path / name, MESH)
    with pytest.raises(InvalidFileError, match="can't read the pins"):
        read_pins([], tmp_path / "none.toml", MESH)
