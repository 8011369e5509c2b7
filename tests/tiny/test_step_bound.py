"""The bound on the simulated step: below every plan's, whatever the plan, for all weights, and near the best ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from autoshard import solvers
from autoshard.cluster.hardware import load_hardware
from autoshard.costs.memory_traffic import moving_facts, moving_terms
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.formulation import resource_tables
from autoshard.formulation.dependency_path import longest
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.host_lead import with_leads
from autoshard.formulation.planning_context import PlanningContext
from autoshard.formulation.resource_tables import ResourceTables
from autoshard.formulation.slowed_rows import SLOWED
from autoshard.formulation.step_resources import HOST, IN_ROW, PATH, StepResources, follows, step_resources
from autoshard.formulation.weight_tasks import members
from autoshard.ir.graph import Graph, Op, Parameter, Saved, Tensor
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Floats, objective
from autoshard.program.lower import lower
from autoshard.redistribute import FEW, prices
from autoshard.redistribute.path_costs import path_parts
from autoshard.search import shortest_step
from autoshard.search.build_plan import Origin, plan_of
from autoshard.search.shortest_step import StepSearch, heaviest, step_bound
from autoshard.simulation import simulate
from autoshard.solvers.common.clock import watched
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import Solution
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.elimination.minimise import minimum_within
from autoshard.solvers.heuristics.random_plans import random_choice
from autoshard.solvers.relax import hub_relaxation, reader_shares
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.styles.known_styles import STYLES
from tests.graphs import mlp_graph
from tests.slow import quick_at, slow, thinned
from tests.step_times import step_seconds

MESHES = ("dp=2,tp=2", "dp=2,tp=8", "a=2,b=4,c=2")
SIZES = ((16, 64), (4096, 2048))  # (rows, width): the host limits, the device limits


def made(mesh: str, rows: int, width: int, micro_batches: int = 1) -> Formulation:
    graph = mlp_graph(layers=4, batch=rows, hidden=width)
    hardware = load_hardware("h100-80g-sxm")
    return formulate(PlanningContext(graph, Mesh.parse(mesh), hardware, micro_batches=micro_batches))


def plans(formulation: Formulation, best: Choice) -> Iterator[Choice]:
    """The best one, random ones, and the best one with a few choices changed."""
    yield best
    yield from (random_choice(formulation.problem, seed) for seed in range(8))
    draw = random.Random(0)
    for changes in (1, 2, 5, 10, 20):
        choice = list(best)
        for n in draw.sample(range(len(choice)), min(changes, len(choice))):
            old, choice[n] = choice[n], draw.randrange(len(formulation.problem.nodes[n].seconds))
            if math.isinf(objective(formulation.problem, choice)):
                choice[n] = old
        yield tuple(choice)


def all_hold(resources: StepResources, formulation: Formulation, best: Choice) -> float:
    """The largest part of a step that two resources account for, of all plans; 1 or less where the bound is true."""
    return max(
        resources.longest(resources.least_used(choice)) / step_seconds(formulation, choice)
        for choice in plans(formulation, best)
    )


@pytest.mark.parametrize("mesh", thinned(MESHES, 2))
@pytest.mark.parametrize(("rows", "width"), quick_at(SIZES, 0))
@pytest.mark.parametrize("micro_batches", [slow(1), 16])
def test_no_two_resources_take_longer_than_a_step(mesh: str, rows: int, width: int, micro_batches: int) -> None:
    """Of several micro-batches: than the mean one."""
    formulation = made(mesh, rows, width, micro_batches)
    search = StepSearch(formulation)
    best = search.first() or random_choice(formulation.problem, 0)
    for in_order in (True, False):
        resources = step_resources(formulation, in_order=in_order)
        assert 0.5 < all_hold(resources, formulation, best) <= 1 + 1e-9


@pytest.mark.parametrize("mesh", MESHES[:2])
@pytest.mark.parametrize(("rows", "width"), quick_at([*SIZES, (512, 1024)], 2))
@pytest.mark.parametrize("micro_batches", [slow(1), 16])
def test_the_host_and_then_the_device_take_no_longer_than_a_step(
    mesh: str, rows: int, width: int, micro_batches: int
) -> None:
    """For every plan the turn that is most for it; and where both show, it says more than either alone."""
    formulation = made(mesh, rows, width, micro_batches)
    resources, more = step_resources(formulation), []
    for choice in plans(formulation, StepSearch(formulation).first() or random_choice(formulation.problem, 0)):
        led = with_leads(resources, formulation, [choice])
        least = led.longest(led.least_used(choice))
        assert least <= step_seconds(formulation, choice) * (1 + 1e-9)
        more.append(least / resources.longest(resources.least_used(choice)))
    assert min(more) >= 1 - 1e-9
    assert max(more) > 1.02 or (rows, width) != (512, 1024)


def with_views(graph: Graph, operand: str, count: int) -> Graph:
    """`count` transposes of `operand` one after another, at the end; the last is the output."""
    before, shape = operand, graph.tensor(operand).shape
    for n in range(count):
        shape, view = shape[::-1], f"view_{n}"
        op = Op(view, "aten.permute", (before,), (("dims", (1, 0)),), (view,), "", "mlp.py:7")
        tensor = Tensor(view, shape, "float32", graph.tensor(operand).requires_grad)
        graph = replace(graph, tensors=(*graph.tensors, tensor), ops=(*graph.ops, op))
        before = view
    return replace(graph, outputs=(before,))


def without_loss() -> Graph:
    """Views come last: the host issues them after the last that the device does."""
    graph = mlp_graph(layers=2)
    graph = replace(graph, loss=None, ops=graph.ops[:-1], outputs=(graph.ops[-2].results[0],))
    tensors = tuple(t for t in graph.tensors if t.name not in ("loss", "y"))
    return with_views(replace(graph, tensors=tensors, inputs=("x",)), graph.outputs[0], 20)


def input_views(trainable: bool) -> Graph:
    """Views of an input come first: the host issues their backward last, where nothing is updated after it."""
    graph = mlp_graph(layers=1)
    first = replace(graph, ops=(), tensors=tuple(replace(t, requires_grad=True) for t in graph.tensors))
    views = with_views(first, "x", 20)
    ops = tuple(replace(op, operands=tuple("view_19" if o == "x" else o for o in op.operands)) for op in graph.ops)
    parameters = tuple(replace(p, trainable=trainable) for p in graph.parameters)
    return replace(views, ops=(*views.ops, *ops), outputs=graph.outputs, parameters=parameters)


def frozen_front() -> Graph:
    """A large forward without gradients, then many small operators with: the host runs ahead of the first."""
    graph = mlp_graph(layers=1, batch=8192, hidden=8192)
    tensors = [replace(t, requires_grad=False) for t in graph.tensors]
    frozen = tuple(replace(p, trainable=False) for p in graph.parameters)
    tensors += [Tensor("scale", (), "float32", True), Tensor("small_0", (), "float32", True)]
    ops = [*graph.ops, Op("small_0", "aten.mul", ("loss", "scale"), (), ("small_0",), "", "mlp.py:7", Saved((0, 1)))]
    for n in range(1, 60):
        name = f"small_{n}"
        tensors.append(Tensor(name, (), "float32", True))
        ops.append(Op(name, "aten.relu", (f"small_{n - 1}",), (), (name,), "", "mlp.py:8", Saved((), (0,))))
    parameters = (*frozen, Parameter("scale", "scale"))
    return replace(
        graph, tensors=tuple(tensors), ops=tuple(ops), parameters=parameters, outputs=("small_59",), loss="small_59"
    )


HOST_BOUND = {
    "views last": without_loss,
    "views of an input": lambda: input_views(True),
    "views of an input, nothing trained": lambda: input_views(False),
    "a frozen front": frozen_front,
}


@pytest.mark.parametrize("name", HOST_BOUND)
@pytest.mark.parametrize("mesh", ("dp=1", "dp=2"))
def test_what_the_host_issues_is_no_longer_than_a_step(name: str, mesh: str) -> None:
    formulation = formulate(PlanningContext(HOST_BOUND[name](), Mesh.parse(mesh), load_hardware("h100-80g-sxm")))
    search = StepSearch(formulation)
    best = search.first()
    assert best is not None
    assert 0.3 < all_hold(search.resources, formulation, best) <= 1 + 1e-9
    bound = search.bound([best])
    assert 0 < bound.seconds <= step_seconds(formulation, best) * (1 + 1e-9)


@pytest.mark.parametrize("mesh", quick_at(MESHES[:2], 0))
def test_without_a_loss_no_gradients_are_summed(mesh: str) -> None:
    """Its values are marked as those of a training step: nothing but the forward runs."""
    graph = mlp_graph(layers=2, batch=64, hidden=2048)
    last = graph.ops[-2].results[0]
    tensors = tuple(t for t in graph.tensors if t.name not in ("loss", "y"))
    graph = replace(graph, loss=None, ops=graph.ops[:-1], outputs=(last,), tensors=tensors, inputs=("x",))
    formulation = formulate(PlanningContext(graph, Mesh.parse(mesh), load_hardware("h100-80g-sxm")))
    resources = step_resources(formulation)
    best = StepSearch(formulation).first()
    assert best is not None and 0.5 < all_hold(resources, formulation, best) <= 1 + 1e-9
    some = [random_choice(formulation.problem, seed) for seed in range(4)]
    assert all(not resources.least_used(choice)[len(resources.names) :].any() for choice in some)


def in_a_row(tables: ResourceTables, table: Floats, v: int, count: int, regathered: bool) -> Floats:
    for (phase, axes), seconds in tables.ways.parts(v).seconds.items():
        table[tables._rows(axes, phase != "forward")] += seconds / count
        table[tables._row(IN_ROW, phase != "forward")] += seconds / count
    return table


def test_that_it_could_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of weights, counted as if nothing else ran beside them, are above the step."""
    formulation = made("dp=2,tp=8", *SIZES[1])
    best = StepSearch(formulation).first()
    assert best is not None
    monkeypatch.setattr(ResourceTables, "_weight_part", in_a_row)
    assert all_hold(step_resources(formulation), formulation, best) > 1


def test_that_early_reductions_could_make_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of inputs' gradients, counted as if no weight product stood beside them, are above the step."""
    beside = ResourceTables._beside
    monkeypatch.setattr(ResourceTables, "_beside", lambda tables, v: 0 * beside(tables, v))
    formulation = made("dp=2,tp=2", *SIZES[1], 16)
    best = StepSearch(formulation).first()
    assert best is not None and all_hold(step_resources(formulation), formulation, best) > 1


@pytest.mark.parametrize("mesh", quick_at(MESHES[:2], 0))
def test_the_bound_is_below_every_step_and_the_means_below_their_least_plan(mesh: str) -> None:
    formulation = made(mesh, *SIZES[1])
    search = StepSearch(formulation)
    best = search.first()
    assert best is not None
    bound = search.bound([best])
    resources = search.leading
    assert 0 < bound.seconds <= min(step_seconds(formulation, choice) for choice in plans(formulation, best))
    for weights, least in bound.tried:
        assert weights.min() >= 0 and weights.sum() == pytest.approx(2.0)
        lowest = weights @ resources.least_used(least)
        for choice in plans(formulation, best):
            assert lowest <= weights @ resources.least_used(choice) * (1 + 1e-9)
    assert bound.seconds > 0.4 * step_seconds(formulation, best)


def test_other_plans_are_found_between_and_beside() -> None:
    formulation = made("dp=2,tp=8", *SIZES[1])
    search = StepSearch(formulation)
    first = search.first()
    assert first is not None
    others = list(search.others())
    known = [choice for _, choice in search.plans]
    assert first in known and {choice for _, choice in others} <= {*known}
    shortest = [search.resources.longest(search.resources.roughly_used(choice)) for choice in (first, *known)]
    assert shortest[0] == min(shortest[: 1 + len(known) - len(others)])
    assert all(math.isfinite(objective(formulation.problem, choice)) for _, choice in others)


def test_where_tables_are_too_large_plans_are_still_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_shares, "SOON_ENTRIES", 1)
    monkeypatch.setattr(ReaderShares, "search", counted := Counted(ReaderShares.search))
    search = StepSearch(made("dp=2,tp=8", *SIZES[1]))
    assert search.first() is not None and len(search.plans) > 1
    assert len([arg for arg in counted.first if arg is search.shares]) == 1  # with other prices they are as large
    assert len(list(search.others())) > 0


@pytest.mark.parametrize("mesh", quick_at(MESHES[:2], 0))
def test_a_bound_is_exact_as_long_as_messages_would_take_more(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortest_step, "SOON_ENTRIES", 1)
    monkeypatch.setattr(hub_relaxation, "bounded", lambda *args: pytest.fail("messages"))
    search = StepSearch(made(mesh, *SIZES[1]))
    first = search.first()
    assert first is not None and 0 < search.bound([first]).seconds <= search.resources.longest(search.used[0])


@pytest.mark.parametrize("mesh", quick_at(MESHES[:2], 0))
def test_values_cut_off_and_messages_bound_the_same_steps_from_below(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    formulation = made(mesh, *SIZES[1])
    search = StepSearch(formulation)
    first = search.first()
    assert first is not None
    search.bound([first])
    some = range(0, len(formulation.problem.values), 3)
    assert search.resources.cut_off(()) is search.resources
    assert any(reader.hub for reader in search.resources.cut_off(some).readers)
    (weights, _), *_ = search.bounded.tried if search.bounded else []
    whole, cut = (
        solvers.solve(form.bounding(weights), "dp").objective for form in (search.leading, search.leading.cut_off(some))
    )
    assert 0 < cut <= whole * (1 + 1e-9)

    calls = Counted(minimum_within)
    monkeypatch.setattr(shortest_step, "minimum_within", lambda *args, **also: calls(*args) and None)
    bound = step_bound(search.leading, [first], cut=some)
    assert bound.seconds > 0
    assert len(calls.first) == 2 and len(bound.tried) >= 1  # each form once, whatever the weights
    for choice in plans(formulation, first):
        assert bound.seconds <= step_seconds(formulation, choice)


def test_tables_far_too_large_are_not_worth_leaving_choices_out(monkeypatch: pytest.MonkeyPatch) -> None:
    formulation = made(MESHES[0], *SIZES[1])
    search = StepSearch(formulation)
    first = search.first()
    assert first is not None
    some = range(0, len(formulation.problem.values), 3)
    monkeypatch.setattr(shortest_step, "out_of_reach", lambda *args: True)
    monkeypatch.setattr(shortest_step, "minimum_within", calls := Counted(minimum_within))
    bound = step_bound(search.resources, [first], cut=some)
    coarser = search.resources.cut_off(some).bounding(bound.weights)
    assert bound.seconds > 0 and len(calls.first) == len(bound.tried)  # the coarser form alone
    least = solvers.solve(coarser, "dp").objective + float(bound.weights @ search.resources.constants)
    assert bound.seconds == pytest.approx(least)


class Counted:
    """A function that remembers the first argument of each call."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self.first: list[object] = []

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., object]:
        return lambda *args, **also: self(owner, *args, **also)

    def __call__(self, *args: object, **also: object) -> object:
        self.first.append(args[0])
        return self.function(*args, **also)


def test_an_estimate_counts_what_is_certain() -> None:
    """What a way probably occupies is not below what it surely does: of weights that are gathered before and after
    they are cast, alone and together, once and again."""
    graph = transformer_graph(Transformer(2, 256, 4, 64, 512), 8, "bf16-mixed", "adamw").graph
    formulation = formulate(PlanningContext(graph, Mesh.parse("dp=2,tp=4"), load_hardware("h100-80g-sxm")))
    resources = step_resources(formulation)
    unused = (PATH, SLOWED)  # of these the estimate has no use
    counted = np.tile([not name.startswith(unused) for name in resources.names], 2)
    for reader in resources.readers:
        if len(formulation.problem.values[reader.value].consumers) == 1:
            short = (reader.seconds - resources.values[reader.value])[counted].max(axis=0)
            allowed = np.isfinite(formulation.problem.values[reader.value].seconds)
            assert short[allowed].max() <= 1e-12, formulation.values[reader.value].tensor


def test_weights_are_those_for_which_the_plans_occupy_most() -> None:
    """Two resources a phase; plan a is heavy on the first of the backward, plan b on the second."""
    a, b = np.array([1.0, 0.0, 6.0, 0.0]), np.array([1.0, 0.0, 0.0, 3.0])
    every = np.ones((2, 2), bool)
    weights, value = heaviest([a, b], every)
    assert weights == pytest.approx([1, 0, 1 / 3, 2 / 3]) and value == pytest.approx(3.0)
    assert heaviest([a], every)[1] == pytest.approx(7.0)
    ahead = follows(("path", "host"))  # the host's backward does not follow the forward's path
    weights, value = heaviest([np.array([5.0, 1.0, 1.0, 4.0])], ahead)
    assert value == pytest.approx(6.0) and weights == pytest.approx([1, 0, 1, 0])


def test_a_path_goes_through_what_takes_longest() -> None:
    graph = mlp_graph(layers=3)
    names = [op.name for op in graph.ops]
    path = longest(graph, dict.fromkeys(names, 1.0))
    assert path.ops[-1] == graph.producers[str(graph.loss)].name
    for before, after in zip(path.ops, path.ops[1:], strict=False):
        assert graph.producers[path.reads[after]].name == before
    assert longest(replace(graph, loss=None), dict.fromkeys(names, 1.0)).grows == frozenset()


def test_without_time_nothing_is_proved() -> None:
    formulation = made("dp=2,tp=2", *SIZES[0])
    resources, some = step_resources(formulation), random_choice(formulation.problem, 0)
    with watched(Clock(0.0)):
        assert step_bound(resources, [some]).seconds == 0.0


def in_blocks(layers: int) -> Graph:
    """Each linear layer, with what follows it, is a block of its own."""
    graph = mlp_graph(layers=layers, batch=4096, hidden=4096)
    block, ops = -1, []
    for op in graph.ops:
        block += op.target == "aten.linear"
        ops.append(replace(op, module=f"layers.{max(block, 0)}"))
    return replace(graph, ops=tuple(ops))


def test_weights_of_all_blocks_but_one_are_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fully sharded: the links' seconds of the backward are those that the simulator gives them."""
    formulation = formulate(PlanningContext(in_blocks(6), Mesh.parse("dp=8"), load_hardware("h100-80g-sxm")))
    keep = STYLES["fsdp"].keep(formulation)
    assert not isinstance(keep, str)
    small = narrowed(formulation, keep)
    choice = solvers.solve(small.problem).choice
    plan = plan_of(small, Solution(small.problem, choice, 0.0, "test"), Origin("test"), 1e18, "test")
    timeline = simulate(lower(plan, small.graph), small.graph, small.hardware)
    sent = [e for e in timeline.events if e.phase == "backward" and e.axes]
    gathered = [e for e in sent if e.collective == "all_gather"]
    assert len(gathered) == 5  # of six blocks
    resources = step_resources(small)
    row = len(resources.names) + next(i for i, name in enumerate(resources.names) if name.startswith(("axis", "link")))
    counted, simulated = float(resources.least_used(choice)[row]), sum(e.duration_seconds for e in sent)
    assert 0.9 * simulated < counted <= simulated * (1 + 1e-9)
    assert step_resources(small, fused=True).least_used(choice)[row] < counted  # one message may be of many blocks
    monkeypatch.setattr(resource_tables, "members", lambda graph: dict.fromkeys(graph.weights, 1))
    assert step_resources(small).least_used(choice)[row] > simulated * (1 + 1e-9)


def style_choice(formulation: Formulation, style: str) -> Choice:
    """Of the plan of a style, in the numbers of the whole formulation."""
    keep = STYLES[style].keep(formulation)
    assert not isinstance(keep, str)
    return kept_choice(formulation, keep)


def kept_choice(formulation: Formulation, keep: Mapping[int, Sequence[int]]) -> Choice:
    """The least of those that keep some choices."""
    small = narrowed(formulation, keep)
    picked = solvers.solve(small.problem).choice
    chosen = [keep.get(n, range(len(node.seconds))) for n, node in enumerate(formulation.problem.nodes)]
    return tuple(int(allowed[s]) for allowed, s in zip(chosen, picked, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "sequence"), [(128, 32), slow(2048, 1024)])  # the host limits, the device limits
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", slow("dp=4")])
def test_what_is_sure_of_weights_that_go_together_is_no_more_than_a_step(mesh: str, hidden: int, sequence: int) -> None:
    """Of a transformer's blocks, stored in shards or as they are used, and with choices changed."""
    graph = transformer_graph(Transformer(2, hidden, 4, sequence, 512), 8, "bf16-mixed", "adamw").graph
    formulation = formulate(PlanningContext(graph, Mesh.parse(mesh), load_hardware("h100-80g-sxm")))
    resources, free = step_resources(formulation), step_resources(formulation, in_order=False)
    for style in ("fsdp", "dp"):
        best = style_choice(formulation, style)
        assert all_hold(resources, formulation, best) <= 1 + 1e-9
        more = resources.least_used(best) - free.least_used(best)
        assert style == "dp" or (more[[resources.names.index(name) for name in (IN_ROW, HOST)]] > 0).all()


def test_gathers_that_become_one_count_no_more_than_that_one() -> None:
    """A small weight alone is gathered over one axis after the other; 48 together, over both at once, in half of it."""
    graph = mlp_graph(layers=96, batch=96, hidden=192)
    ops = [replace(op, module=f"layers.{2 * n // len(graph.ops)}") for n, op in enumerate(graph.ops)]
    ops = [replace(op, operands=(*op.operands[:2], None)[: len(op.operands)]) for op in ops]  # no bias
    weights = tuple(p for p in graph.parameters if p.tensor.startswith("w"))
    tensors = tuple(t for t in graph.tensors if not t.name.startswith("b"))
    graph = replace(graph, ops=tuple(ops), parameters=weights, tensors=tensors)
    formulation = formulate(PlanningContext(graph, Mesh.parse("a=4,b=4"), load_hardware("rtx-4090-24g")))
    keep = {}
    for n, site in enumerate(formulation.sites):
        if site.kind == "parameter":
            keep[n] = [s for s, layout in enumerate(site.layouts) if str(layout) == "S0 S0"]
        elif site.name.startswith("linear"):
            keep[n] = [s for s, strategy in enumerate(site.strategies) if str(strategy).startswith("i0 i0")]
    choice = kept_choice(formulation, keep)
    for in_order in (True, False):
        resources = step_resources(formulation, in_order=in_order)
        share = resources.longest(resources.least_used(choice)) / step_seconds(formulation, choice)
        assert 0.4 < share <= 1 + 1e-9


def test_a_weight_that_is_moved_otherwise_than_by_one_gather_goes_alone() -> None:
    """S0 S0 may become one gather over both axes; S0 S1 and a partial value can't."""
    tensor_shape, mesh = (64, 64), Mesh.parse("dp=2,tp=4")
    hardware = load_hardware("h100-80g-sxm")
    formulation = made("dp=2,tp=4", 64, 64)
    tables = ResourceTables(formulation, in_order=True)
    terms = replace(moving_terms(hardware, mesh, formulation.graph, formulation.graph.tensor("w0")), shape=tensor_shape)
    sources = [Layout.parse(text) for text in ("S0 R", "S0 S0", "S0 S1", "S0 P", "R R")]
    parts = path_parts(sources, [Layout.parse("R R")], terms)
    assert tables.in_turn
    assert parts.goes_alone(sources)[:, 0].tolist() == [False, False, True, True, False]


def test_a_way_is_found_once_whatever_its_parts_are_counted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those between many pairs, where it takes long, as the formulation priced them."""
    formulation = made("dp=2,tp=2", *SIZES[0])
    monkeypatch.setattr(prices, "shortest", counted := Counted(prices.shortest))
    step_resources(formulation)
    graph, sites = formulation.graph, formulation.values
    ways = {(moving_facts(graph, graph.tensor(site.tensor)), site.sources, site.targets) for site in sites}
    few = sum(len(sources) * len(targets) <= FEW for _, sources, targets in ways)
    assert len(counted.first) <= few < len(ways)


def test_weights_of_a_block_share_what_a_message_takes_besides_its_bytes() -> None:
    """Twelve weights a block, as they are stored and cast; none outside of blocks."""
    graph = transformer_graph(Transformer(2, 64, 4, 16, 128), 8, "bf16-mixed", "adamw").graph
    counts = members(graph)
    assert set(counts.values()) == {12} and all("layers_" in tensor for tensor in counts)
    assert sum(p.tensor in counts for p in graph.parameters) == 24
