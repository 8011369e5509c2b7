"""Every cell of the pair table, and random paths over it, run in lock-step: values and gradients by their meaning."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.emit import runtime
from autoshard.emit.runtime import ParallelMesh
from autoshard.ir.layout import Layout, Shard, normalise, parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.redistribute import FORWARD, Step, Terms, dim_cuts, kind, path, runtime_call
from autoshard.redistribute.exchanges import direct_steps
from autoshard.redistribute.steps import table_step
from autoshard.verification.ranks.lockstep import LockstepError, run_lockstep
from tests.shards import assert_means, place
from tests.slow import quick_at


def apply(step: Step, x: Tensor, before: Layout, shape: tuple[int, ...], mesh: Mesh, local: ParallelMesh) -> Tensor:
    """One step by the runtime, called as emitted code calls it."""
    coordinates = mesh.coordinates(local.rank)
    axis = local.joint([mesh.names[a] for a in step.axes])
    if step.by_index:
        by = "all_gather" if "gather" in (step.forward, step.backward) else "all_to_all"
        return runtime.exchange(x, axis, shape, str(before), str(step.applied(before)), by=by)
    name, grad = runtime_call(step.before[0], step.after[0])
    joined, cut = dim_cuts(step, before, shape, mesh)
    function = getattr(runtime, name)
    if joined and cut:
        return function(
            x, axis, joined.dim, cut.dim, joined_size=joined.size.evaluate(mesh, coordinates),
            joined_blocks=joined.blocks, joined_unit=joined.unit, cut_blocks=cut.blocks, cut_unit=cut.unit,
        )  # fmt: skip
    if joined:
        size = joined.size.evaluate(mesh, coordinates)
        return function(x, axis, joined.dim, size=size, blocks=joined.blocks, unit=joined.unit, grad=grad)
    if cut:
        return function(x, axis, cut.dim, blocks=cut.blocks, unit=cut.unit, grad=grad)
    return function(x, axis, grad=grad)


def check(steps: tuple[Step, ...], source: Layout, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Runs the steps on random tensors; value and gradient must mean the same global tensors before and after."""
    generator = torch.Generator().manual_seed(7)
    value, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    target = source
    for step in steps:
        target = step.applied(target)
    values = place(value, source, mesh, seed=1)
    gradients = place(gradient, target, mesh, gradient=True, seed=2)

    def work(local: ParallelMesh) -> tuple[Tensor, Tensor]:
        x = values[local.rank].requires_grad_()
        y, layout = x, source
        for step in steps:
            y = apply(step, y, layout, shape, mesh, local)
            layout = step.applied(layout)
        assert y.is_contiguous()
        y.backward(gradients[local.rank])
        assert x.grad is not None
        return y.detach(), x.grad

    results = run_lockstep(dict(mesh.axes), work)
    assert_means([y for y, _ in results], value, target, mesh)
    assert_means([g for _, g in results], gradient, source, mesh, gradient=True)


EXAMPLES = {"S": ("S0", "S1", "S1/3", "S1*2", "S1/3*2"), "R": ("R",), "R+": ("R+",), "P": ("P",)}
CELLS = [
    (before, after)
    for x, y in FORWARD
    for before, after in itertools.product(EXAMPLES[x], EXAMPLES[y])
    if x != "S" or y != "S" or before[:2] != after[:2]
]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(12, 24), (5, 18), (2, 6)])  # even, uneven, with empty shards
def test_every_cell_of_the_pair_table(size: int, shape: tuple[int, ...]) -> None:
    mesh = Mesh((("a", size),))
    for before, after in CELLS:
        source, target = Layout.parse(before), Layout.parse(after)
        check((table_step((0,), source, target),), source, shape, mesh)


NESTED = [(x, y) for x in ("S1", "S1/3", "S1*2") for y in ("S1", "S1/3", "S1/6", "S1*2") if y != "S1/3" or x == y]


@pytest.mark.parametrize(("outer", "inner"), NESTED)  # without those whose outer cut goes through a block
def test_inner_axis_of_a_dim_that_two_axes_cut(outer: str, inner: str) -> None:
    mesh, shape = Mesh.parse("a=2,b=2"), (3, 24)
    for other in ("R", "R+", "P", "S0"):
        here, there = Layout.parse(f"{outer} {inner}"), Layout.parse(f"{outer} {other}")
        for source, target in ((here, there), (there, here)):
            check((table_step((1,), source, target),), source, shape, mesh)


PLACEMENTS = ("R", "R+", "P", "S0", "S1", "S2", "S1/3", "S1/2", "S2/2", "S0*2", "S1*2", "S1/2*3")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...], Mesh]:
    mesh = Mesh.parse(draw(st.sampled_from(["a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3", "a=2,b=2,c=2"])))
    shape = draw(st.sampled_from([(4, 12, 8), (5, 12, 2), (3, 18, 7), (8, 24, 4), (1, 6, 1)]))

    fitting = [p for p in map(parse_placement, PLACEMENTS) if not isinstance(p, Shard) or shape[p.dim] % p.blocks == 0]

    def one() -> Layout:
        return normalise(Layout(tuple(draw(st.sampled_from(fitting)) for _ in mesh.axes)), shape, mesh)

    return one(), one(), shape, mesh


FACTORS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 0.3}


ALL_KINDS = [Layout.parse(f"{x} {y}") for x, y in itertools.product(("R", "R+", "P", "S0", "S1"), repeat=2)]


@pytest.mark.parametrize("source", quick_at(ALL_KINDS, 8), ids=str)
def test_the_direct_way_between_all_kinds(source: Layout) -> None:
    mesh, shape = Mesh.parse("a=2,b=2"), (4, 6)
    for target in ALL_KINDS:
        for all_to_all in (True, False):
            check(direct_steps(source, target, True, all_to_all), source, shape, mesh)


def price(axes: tuple[int, ...], primitive: str, full_bytes: float) -> float:
    return FACTORS.get(primitive, 1) * (1e-5 + full_bytes * 1e-8 / (axes[0] + 1))


@settings(max_examples=150)
@given(pairs(), st.booleans())
def test_random_paths(case: tuple[Layout, Layout, tuple[int, ...], Mesh], all_to_all: bool) -> None:
    """There is a way between any two layouts, and it does what it says."""
    source, target, shape, mesh = case
    route = path(source, target, Terms(shape, "float64", mesh, True, price, all_to_all=all_to_all))
    assert all_to_all or not {"all_to_all", "exchange"} & {x for s in route.steps for x in (s.forward, s.backward)}
    check(route.steps, source, shape, mesh)


@settings(max_examples=100)
@given(pairs())
@pytest.mark.slow
def test_the_direct_way(case: tuple[Layout, Layout, tuple[int, ...], Mesh]) -> None:
    """What the search falls back on, also where it knows a cheaper way."""
    source, target, shape, mesh = case
    for shrinks, all_to_all in itertools.product((False, True), repeat=2):
        check(direct_steps(source, target, shrinks, all_to_all), source, shape, mesh)


def test_random_paths_reach_every_cell() -> None:
    """The pairs that the property test can draw have paths through every cell of the table."""
    mesh, shape = Mesh.parse("a=2,b=2"), (4, 12, 8)
    seen = set()
    for source, target in itertools.product(
        ("S0 R", "S1/3 P", "R R+", "P P", "R S1"), ("R R", "S1 R+", "P P", "S0 S0")
    ):
        x, y = Layout.parse(source), Layout.parse(target)
        route = path(x, y, Terms(shape, "float64", mesh, True, price))
        seen |= {(kind(s.before[0]), kind(s.after[0])) for s in route.steps}
    assert seen >= {("S", "S"), ("S", "R"), ("P", "S"), ("R", "S"), ("R", "P"), ("R", "R+"), ("R+", "R")}


def test_integers_travel_too() -> None:
    def work(mesh: ParallelMesh) -> list[int]:
        axis = mesh["a"]
        ids = runtime.all_gather(torch.arange(3) + 3 * axis.index, axis, 0)
        half = runtime.slice_shard(ids, axis, 0)
        table = runtime.all_to_all(half.view(1, 3).repeat(3, 1), axis, 1, 0, joined_size=6)
        return [*ids.tolist(), *half.tolist(), *table.flatten().tolist()]

    first, second = run_lockstep({"a": 2}, work)
    assert first == [*range(6), 0, 1, 2, *range(6), *range(6)]
    assert second == [*range(6), 3, 4, 5, *range(6)]


def test_a_wrong_length_is_named() -> None:
    from autoshard.verification.ranks.lockstep import LockstepError

    with pytest.raises(LockstepError, match=r"dim 0 of \(3,\): expected length 4"):
        run_lockstep({"a": 2}, lambda mesh: runtime.all_gather(torch.zeros(3), mesh["a"], 0, size=8))


def test_an_exchange_of_another_shape_than_the_layout_s_is_refused() -> None:
    def work(local: ParallelMesh) -> Tensor:
        return runtime.exchange(torch.zeros(3, 4), local.joint(["a", "b"]), (4, 4), "S0 S1", "S1 S0")

    with pytest.raises(LockstepError, match=r"\(3, 4\) is not the local shape \(2, 2\) of S0 S1 \(4, 4\)"):
        run_lockstep({"a": 2, "b": 2}, work)
