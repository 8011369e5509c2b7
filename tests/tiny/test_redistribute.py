"""The pair table, and the cheapest path against a brute-force search written from the definitions."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import redistribute
from autoshard.ir.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL,
    Layout,
    LocalSize,
    Placement,
    Shard,
    chunk_bounds,
    local_shape,
    local_sizes,
    normalise,
)
from autoshard.ir.mesh import Mesh
from autoshard.redistribute import (
    BACKWARD,
    FORWARD,
    LOCAL,
    Pass,
    Step,
    Terms,
    all_pairs,
    dim_cuts,
    kind,
    messages,
    path,
    runtime_call,
)
from autoshard.redistribute.exchanges import direct_steps
from autoshard.redistribute.path_costs import BACKWARD as BACK
from autoshard.redistribute.path_costs import FORWARD as THERE
from autoshard.redistribute.path_costs import SUM, path_parts
from autoshard.redistribute.steps import clean_cut, table_step


def test_a_gather_by_index_moves_what_an_all_gather_over_the_same_devices_does() -> None:
    """Each of the 6 devices sends its 10 bytes to all others; an exchange moves what the device has after it."""
    mesh = Mesh.parse("dp=2,tp=3")
    step = Step((0, 1), (Shard(0), Shard(1)), (REPLICATE, REPLICATE), "gather", "pick")
    assert messages(step, mesh)[0].full_bytes(10, 60) == 60
    assert messages(replace(step, forward="exchange"), mesh)[0].full_bytes(10, 60) == 60
    step = Step((0, 1), (Shard(0), Shard(1)), (Shard(1), Shard(0)), "gather", "gather")
    assert [message.full_bytes(10, 10) for message in messages(step, mesh)] == [60, 60]
    assert messages(replace(step, forward="exchange"), mesh)[0].full_bytes(10, 10) == 10


KINDS = ("S", "R", "R+", "P")
LOCAL_PASS = Pass(3e-6, 1e-8)
FACTORS = {"all_gather": 1.0, "reduce_scatter": 1.1, "all_reduce": 2.0, "all_to_all": 1.1}


def seconds(axes: tuple[int, ...], primitive: str, full_bytes: float) -> float:
    return 1e-5 + FACTORS.get(primitive, 1) * full_bytes / (3e7 * (axes[0] + 1))


def terms(
    shape: tuple[int, ...], mesh: str | Mesh, differentiable: bool = True, dtype: str = "float32", **options: Any
) -> Terms:
    parsed = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    return Terms(shape, dtype, parsed, differentiable, seconds, LOCAL_PASS, **options)


def layout(text: str) -> Layout:
    return Layout.parse(text)


def written(step: Step) -> str:
    before, after = (" ".join(map(str, placements)) for placements in (step.before, step.after))
    return f"{step.forward or 'copy'} {','.join(map(str, step.axes))}: {before} -> {after}"


def steps(source: str, target: str, shape: tuple[int, ...], mesh: str, **options: Any) -> list[str]:
    return list(map(written, path(layout(source), layout(target), terms(shape, mesh, **options)).steps))


def test_tables_have_every_pair_but_the_idle_ones() -> None:
    expected = {(a, b) for a in KINDS for b in KINDS if a != b or a == "S"}
    assert set(FORWARD) == set(BACKWARD) == expected


def test_backward_of_a_step_is_a_forward_of_the_swapped_pair_of_gradients() -> None:
    """The gradient of S, R, R+, P lies as S, R, P, R+ or R: what is summed in one is replicated in the other."""
    dual = {"S": ("S",), "R": ("R", "R+"), "R+": ("P",), "P": ("R", "R+")}
    for before, after in BACKWARD:
        allowed = {FORWARD.get((x, y), "") for x in dual[after] for y in dual[before]}
        assert BACKWARD[before, after] in allowed, (before, after)


def test_runtime_calls() -> None:
    assert runtime_call(Shard(0), REPLICATE_PARTIAL) == ("all_gather", "reduce_scatter")
    assert runtime_call(REPLICATE, REPLICATE_PARTIAL) == ("copy", "all_reduce")
    assert runtime_call(REPLICATE_PARTIAL, Shard(1)) == ("slice_shard", "zero_pad")
    assert runtime_call(REPLICATE, PARTIAL) == ("mask", "identity")
    assert runtime_call(Shard(0), Shard(1)) == ("all_to_all", None)


def test_nothing_to_do() -> None:
    assert steps("S0 P", "S0 P", (8, 8), "a=2,b=2") == []


def test_slices_come_before_gathers() -> None:
    route = steps("S0 R", "R S1", (8, 8), "a=2,b=2", differentiable=False)
    assert route == ["slice 1: R -> S1", "all_gather 0: S0 -> R"]


def test_reduce_scatter_instead_of_all_reduce_and_slice() -> None:
    assert steps("P", "S0", (8, 8), "a=4") == ["reduce_scatter 0: P -> S0"]
    assert steps("P S1", "S0 S1", (8, 8), "a=2,b=2") == ["reduce_scatter 0: P -> S0"]


def test_one_collective_over_joined_axes() -> None:
    mesh = "a=2,b=2"
    assert steps("P P", "R R", (8, 8), mesh) == ["all_reduce 0,1: P P -> R R"]
    assert steps("P P", "S0 S0", (8, 8), mesh) == ["reduce_scatter 0,1: P P -> S0 S0"]
    assert steps("S0 S0", "R R", (8, 8), mesh) == ["all_gather 0,1: S0 S0 -> R R"]
    assert steps("S0/2 S0/2", "R+ R+", (8, 8), mesh) == ["all_gather 0,1: S0/2 S0/2 -> R+ R+"]
    assert steps("R R", "R+ R+", (8, 8), mesh) == ["copy 0,1: R R -> R+ R+"]
    assert steps("S0 S0", "S1 S1", (8, 8), mesh) == ["all_to_all 0,1: S0 S0 -> S1 S1"]


@pytest.mark.parametrize("all_to_all", [True, False])
def test_what_is_only_summed_is_not_cut_and_gathered(all_to_all: bool) -> None:
    """Where an all-reduce costs more than all that: it goes in a bucket, at a fraction of its price alone."""

    def dear(axes: tuple[int, ...], primitive: str, full_bytes: float) -> float:
        return seconds(axes, primitive, full_bytes) * (9 if primitive == "all_reduce" else 1)

    prices = replace(terms((8, 8), "a=2,b=2", all_to_all=all_to_all), seconds=dear)
    for source, target in (("R R", "R+ R+"), ("R R", "R R+"), ("R S0", "R+ S0"), ("S0 R", "S0 R+")):
        ends = layout(source), layout(target)
        route, parts = path(*ends, prices), path_parts(*([end] for end in ends), prices)
        assert [step.backward for step in route.steps] == ["all_reduce"] and not route.forward_seconds
        assert all_pairs(*([end] for end in ends), prices)[0, 0] == pytest.approx(route.backward_seconds, rel=1e-6)
        assert parts.deferred[0, 0] == parts.summed[0, 0] == sum(1 << axis for axis in route.steps[0].axes)
        assert [step for _, step in redistribute.steps_between(*([end] for end in ends), prices)] == [*route.steps]


def test_joined_axes_need_not_be_neighbours() -> None:
    assert steps("P S1 P", "S0 S1 S0", (8, 8), "a=2,b=2,c=2") == ["reduce_scatter 0,2: P P -> S0 S0"]


def test_uneven_nested_shards_are_not_one_cut() -> None:
    """Chunks of chunks are other chunks: 7 = (2, 2) + (2, 1), but 7 = 2 + 2 + 2 + 1 over four; 6 = (2, 1) + (2, 1)."""
    cuts = [((0, Shard(0)), (1, Shard(0)))]
    mesh = Mesh.parse("a=2,b=2")
    assert [clean_cut(size, (), cuts[0], mesh) is not None for size in (6, 7, 8)] == [False, True, True]


def test_an_exchange_over_several_axes() -> None:
    assert steps("S0 S1", "S1 S0", (8, 8), "a=2,b=2") == ["exchange 0,1: S0 S1 -> S1 S0"]
    assert steps("S0 S1 S1", "S0 S0 S0", (8, 8), "a=2,b=2,c=2") == ["all_to_all 1,2: S1 S1 -> S0 S0"]
    assert steps("S0 S1 S1", "S0 S0 S1", (8, 8), "a=2,b=2,c=2") == ["exchange 1,2: S1 S1 -> S0 S1"]
    assert steps("S0", "S0/3", (12,), "a=2") == ["exchange 0: S0 -> S0/3"]
    assert steps("S0 S1", "S0/3 S1", (12, 8), "a=2,b=2") == ["exchange 0: S0 -> S0/3"]


def test_a_cut_through_a_block_has_a_way_out() -> None:
    """Between layouts that no sequence of clean steps joins."""
    mesh = "a=2,b=2"
    assert steps("S0 S0/3", "R R", (12,), mesh) == ["exchange 0,1: S0 S0/3 -> R R"]
    assert steps("R R", "S0 S0/3", (12,), mesh) == ["pick 0,1: R R -> S0 S0/3"]
    assert steps("S0 S0/3", "P R+", (12,), mesh) == ["exchange 0,1: S0 S0/3 -> R R+", "mask 0: R -> P"]
    assert steps("S0 S0/3", "R R", (12,), mesh, all_to_all=False) == ["gather 0,1: S0 S0/3 -> R R"]


def test_without_all_to_all_nothing_is_exchanged() -> None:
    for source, target in itertools.product(("S0 S1", "P S1/3", "R+ S0", "S0 S0/3"), ("S1 S0", "S0 S0", "S1/3 R+")):
        for text in steps(source, target, (12, 12), "a=2,b=2", all_to_all=False):
            assert not text.startswith(("exchange", "all_to_all")), text
    assert steps("S0", "S1", (8, 8), "a=2", all_to_all=False) == ["all_gather 0: S0 -> R", "slice 0: R -> S1"]


def test_a_forward_that_is_paid_twice_may_go_another_way() -> None:
    source, target = layout("S0 S0"), layout("R+ R+")
    once, twice = (all_pairs([source], [target], terms((8,), "a=2,b=2", forward_times=t)) for t in (1.0, 2.0))
    route = path(source, target, terms((8,), "a=2,b=2"))
    assert twice[0, 0] - once[0, 0] == pytest.approx(route.forward_seconds, rel=1e-6)


def test_without_gradient_partial_gradients_are_free() -> None:
    prices = all_pairs([layout("R")], [layout("R+"), layout("R")], terms((8,), "a=2", False))
    assert prices[0] == pytest.approx([0.0, 0.0], abs=1e-11)


def test_dim_cuts_of_nested_blocks() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    step = table_step((1,), layout("S0 S0/4"), layout("S0 S1/3*2"))
    joined, cut = dim_cuts(step, layout("S0 S0/4"), (16, 12), mesh)
    assert joined is not None and cut is not None
    assert (joined.dim, joined.blocks, joined.unit) == (0, 2, 1)  # dp leaves two of the four blocks
    assert joined.size.evaluate(mesh, (0, 0)) == 8
    assert (cut.dim, cut.blocks, cut.unit, cut.size) == (1, 3, 2, LocalSize(12))


def test_local_blocks_need_equal_blocks_on_all_devices() -> None:
    mesh = Mesh.parse("a=2,b=2")
    outer = local_sizes((12,), layout("S0 R"), mesh)[0]
    assert redistribute.local_blocks(outer, Shard(0, 2), mesh) == 1
    assert redistribute.local_blocks(outer, Shard(0, 4), mesh) == 2
    assert redistribute.local_blocks(outer, Shard(0, 3), mesh) is None
    assert redistribute.local_blocks(LocalSize(12), Shard(0, 5), mesh) is None


# --- brute force ---


@lru_cache(maxsize=100_000)
def _bytes(state: Layout, shape: tuple[int, ...], mesh: Mesh) -> float:
    return 4.0 * max(math.prod(local_shape(shape, state, mesh, mesh.coordinates(r))) for r in range(mesh.size))


def _held(state: Layout, dim: int, shape: tuple[int, ...], mesh: Mesh) -> list[list[int]]:
    """The indices of a dim that every rank holds."""
    size = local_sizes(shape, state, mesh)[dim]
    ranks = (size.intervals(mesh, mesh.coordinates(rank)) for rank in range(mesh.size))
    return [[i for start, stop in intervals for i in range(start, stop)] for intervals in ranks]


@lru_cache(maxsize=100_000)
def _clean(state: Layout, axes: tuple[int, ...], shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the axes can be joined here.

    They are the innermost on their dim, which, without them, lies in the same whole blocks on every device, and they
    cut it as one axis would.
    """
    shards = [p for p in (state.placements[a] for a in axes) if isinstance(p, Shard)]
    if not shards:
        return True
    dim = shards[0].dim
    if any(a > axes[0] and a not in axes for a, _ in state.shards(dim)):
        return False
    without = state
    for axis in axes:
        without = without.replace(axis, REPLICATE)
    return any(_is_clean_cut(state, without, axes, shard, shape, mesh) for shard in (shards[0], shards[-1]))


def _is_clean_cut(
    state: Layout, without: Layout, axes: tuple[int, ...], shard: Shard, shape: tuple[int, ...], mesh: Mesh
) -> bool:
    length = shape[shard.dim] // shard.blocks
    if shape[shard.dim] % shard.blocks:
        return False
    counts = set()
    parts = math.prod(mesh.sizes[a] for a in axes)
    held = zip(_held(without, shard.dim, shape, mesh), _held(state, shard.dim, shape, mesh), strict=True)
    for rank, (outer, inner) in enumerate(held):
        blocks = [list(run) for _, run in itertools.groupby(outer, key=lambda i: i // length)]
        if len({len(block) for block in blocks}) > 1:
            return False
        counts |= {len(blocks)} - {0}
        coordinates = mesh.coordinates(rank)
        index = functools.reduce(lambda n, a: n * mesh.sizes[a] + coordinates[a], axes, 0)
        unit = shard.unit if not blocks or len(blocks[0]) % shard.unit == 0 else 1
        cut = [block[slice(*chunk_bounds(len(block), parts, index, unit))] for block in blocks]
        if [i for block in cut for i in block] != inner:
            return False
    return shard.blocks == 1 or len(counts) == 1


def _seconds(step: Step, before: Layout, shape: tuple[int, ...], mesh: Mesh, gradient: bool) -> float:
    """The price of a step, by the definition of each primitive's message."""
    here, there = (_bytes(state, shape, mesh) for state in (before, step.applied(before)))
    group = math.prod(mesh.sizes[a] for a in step.axes)
    pairs = [(kind(x), kind(y), mesh.sizes[a]) for a, x, y in zip(step.axes, step.before, step.after, strict=True)]
    summed = math.prod(n for x, y, n in pairs if x == "P" != y)
    gradients = math.prod(n for x, y, n in pairs if y == "R+" != x)
    there_and_back = any(x == "R+" for x, _, _ in pairs)
    sizes = {
        "all_to_all": (here, there),
        "exchange": (summed * there, summed * there if there_and_back else gradients * here),
        "gather": (group * here, group * there),
    }
    total = 0.0
    for name, size in zip((step.forward, step.backward), sizes_of(sizes, step, max(here, there)), strict=True):
        if name in (*LOCAL, "exchange", "gather"):  # alone, or to pack and unpack
            total += LOCAL_PASS.launch_seconds
            total += LOCAL_PASS.seconds_per_byte * (2 * min(here, there) if name in ("slice", "pick") else here + there)
        if name in LOCAL:
            pass
        elif name:
            total += seconds(step.axes, {"exchange": "all_to_all", "gather": "all_gather"}.get(name, name), size)
        if not gradient:
            break
    return total


def sizes_of(sizes: dict[str, tuple[float, float]], step: Step, larger: float) -> tuple[float, float]:
    forward = sizes.get(step.forward, (larger, larger))[0]
    backward = sizes.get(step.backward, (larger, larger))[1]
    return forward, backward


def _neighbours(
    state: Layout, letters: list[list[Placement]], shape: tuple[int, ...], mesh: Mesh
) -> Iterator[tuple[Layout, Step]]:
    """By one step of the pair table over any set of axes that all take the same, of the same dim."""
    for count in range(1, len(letters) + 1):
        for axes in itertools.combinations(range(len(letters)), count):
            before = [state.placements[a] for a in axes]
            for after in itertools.product(*(letters[a] for a in axes)):
                other = state
                for axis, placement in zip(axes, after, strict=True):
                    other = other.replace(axis, placement)
                kinds = {(kind(x), kind(y)) for x, y in zip(before, after, strict=True)}
                dims = [{p.dim for p in side if isinstance(p, Shard)} for side in (before, after)]
                if any(x == y for x, y in zip(before, after, strict=True)) or len(kinds) > 1:
                    continue
                if max(map(len, dims)) > 1 or dims[0] & dims[1]:
                    continue
                step = table_step(axes, state, other)
                if _clean(state, axes, shape, mesh) and _clean(other, axes, shape, mesh):
                    yield other, step


def brute_force(
    source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, gradient: bool, largest: float = math.inf
) -> float:
    """The cheapest sequence of steps of the pair table through tensors of no more than `largest` bytes."""
    letters: list[list[Placement]] = []
    for axis, size in enumerate(mesh.sizes):
        plain: list[Placement] = [Shard(d) for d, length in enumerate(shape) if length % size == 0]
        free = [REPLICATE, REPLICATE_PARTIAL] if gradient else [REPLICATE]
        letters.append(list(dict.fromkeys([source.placements[axis], target.placements[axis], *free, *plain])))
    best = {source: 0.0}
    queue = [(0.0, str(source))]
    while queue:
        cost, text = heapq.heappop(queue)
        state = Layout.parse(text)
        if state == target:
            return cost
        if cost > best[state]:
            continue
        for other, step in _neighbours(state, letters, shape, mesh):
            price = _seconds(step, state, shape, mesh, gradient)
            if _bytes(other, shape, mesh) <= largest and cost + price < best.get(other, math.inf):
                best[other] = cost + price
                heapq.heappush(queue, (cost + price, str(other)))
    return math.inf


def exchanges(source: Layout, target: Layout) -> bool:
    """Whether no single gather, sum, scatter or slice does what the shards need."""
    pairs = {(kind(x), kind(y)) for x, y in zip(source.placements, target.placements, strict=True) if x != y}
    pairs = {("S", "R") if pair == ("S", "P") else pair for pair in pairs} & {
        ("S", "S"), ("S", "R"), ("S", "R+"), ("R", "S"), ("R+", "S"), ("P", "S"),
    }  # fmt: skip
    gathers, slices = {("S", "R"), ("S", "R+")}, {("R", "S"), ("R+", "S")}
    return bool(pairs) and not (pairs <= gathers or pairs <= slices or pairs == {("P", "S")})


def direct_price(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, gradient: bool) -> float:
    shrinks = _bytes(target, shape, mesh) <= _bytes(source, shape, mesh)
    total, state = 0.0, source
    for step in direct_steps(source, target, shrinks):
        total += _seconds(step, state, shape, mesh, gradient)
        state = step.applied(state)
    assert state == target
    return total


SHAPES = ((8, 12), (7, 12), (12,), (4, 6, 2))
PLACEMENTS = ("R", "R+", "P", "S0", "S1", "S1/3", "S0/2", "S1*2", "S0*2")


Case = tuple[list[Layout], list[Layout], tuple[int, ...], Mesh, bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = Mesh.parse(draw(st.sampled_from(["a=2", "a=3", "a=2,b=2", "a=2,b=3", "a=2,b=2,c=2"])))
    shape, gradient = draw(st.sampled_from(SHAPES)), draw(st.booleans())
    fitting = [p for p in PLACEMENTS if not p.startswith("S1") or len(shape) > 1]

    def one() -> Layout:
        text = " ".join(draw(st.sampled_from(fitting)) for _ in mesh.axes)
        return normalise(layout(text), shape, mesh, gradient)

    return [one() for _ in range(2)], [one() for _ in range(3)], shape, mesh, gradient


def expected_price(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, gradient: bool) -> float:
    """Of the cheapest way by the table, or of the direct one.

    The latter where there is no other, where the cheapest other swells, or where it is cheaper and really exchanges.
    """
    by_table = brute_force(source, target, shape, mesh, gradient)
    if source == target:
        return by_table
    direct = direct_price(source, target, shape, mesh, gradient)
    ends = max(_bytes(source, shape, mesh), _bytes(target, shape, mesh))
    if brute_force(source, target, shape, mesh, gradient, ends) > by_table * (1 + 1e-9):
        return direct
    return min(by_table, direct) if math.isinf(by_table) or exchanges(source, target) else by_table


@settings(max_examples=50)
@given(cases())
def test_path_and_all_pairs_equal_brute_force(case: Case) -> None:
    sources, targets, shape, mesh, gradient = case
    move_terms = terms(shape, mesh, gradient)
    together = all_pairs(sources, targets, move_terms)
    for (i, source), (j, target) in itertools.product(enumerate(sources), enumerate(targets)):
        expected = expected_price(source, target, shape, mesh, gradient)
        route = path(source, target, move_terms)
        assert together[i, j] == pytest.approx(expected, rel=1e-9, abs=1e-10)
        assert route.forward_seconds + route.backward_seconds == pytest.approx(expected, rel=1e-9, abs=1e-10)
        state = source
        for step in route.steps:
            dim_cuts(step, state, shape, mesh)  # asserts that the blocks are clean
            state = step.applied(state)
        assert state == target


@settings(max_examples=50)
@given(cases())
def test_parts_of_all_ways_are_those_of_each_way(case: Case) -> None:
    """But for packing for an exchange, which parts leave out."""
    sources, targets, shape, mesh, gradient = case
    move_terms = terms(shape, mesh, gradient)
    together = path_parts(sources, targets, move_terms)
    for (i, source), (j, target) in itertools.product(enumerate(sources), enumerate(targets)):
        one, alone = path(source, target, move_terms), path_parts([source], [target], move_terms)
        for phases, seconds in (((THERE,), one.forward_seconds), ((BACK, SUM), one.backward_seconds)):
            total = sum(part[i, j] for (phase, _), part in together.seconds.items() if phase in phases)
            if any(step.by_index for step in one.steps):
                assert total <= seconds * (1 + 1e-9)
            else:
                assert total == pytest.approx(seconds, rel=1e-9, abs=1e-15)
        for key in together.seconds.keys() | alone.seconds.keys():
            apart = alone.seconds[key][0, 0] if key in alone.seconds else 0.0
            assert (together.seconds[key][i, j] if key in together.seconds else 0.0) == pytest.approx(apart, rel=1e-9)
        for phase in together.tasks.keys() | alone.tasks.keys():
            apart = alone.tasks[phase][0, 0] if phase in alone.tasks else 0.0
            assert (together.tasks[phase][i, j] if phase in together.tasks else 0.0) == apart
        assert together.summed[i, j] == alone.summed[0, 0] and together.deferred[i, j] == alone.deferred[0, 0]


def test_same_answer_every_time_and_in_any_company() -> None:
    move_terms = terms((64, 96), "a=2,b=4", dtype="bfloat16")
    layouts = [layout(f"{x} {y}") for x in ("R", "S0", "S1/3", "P") for y in ("R+", "S1", "S0", "S1/3*4", "P")]
    together = all_pairs(layouts, layouts, move_terms)
    reordered = all_pairs(layouts[::-1], layouts[::-1], move_terms)[::-1, ::-1]
    assert together == pytest.approx(reordered, rel=1e-12)
    for i, j in itertools.product(range(0, len(layouts), 3), range(0, len(layouts), 2)):
        one = path(layouts[i], layouts[j], move_terms)
        assert one == path(layouts[i], layouts[j], move_terms)
        assert one.forward_seconds + one.backward_seconds == pytest.approx(together[i, j], rel=1e-6, abs=1e-10)


def test_steps_between_are_those_of_the_paths() -> None:
    move_terms = terms((12, 8), "a=2,b=2")
    layouts = [layout(text) for text in ("R R+", "S0 S1", "S0/3 R", "P S1", "S1 S0")]
    ways = {(source, path(source, target, move_terms).steps) for source in layouts for target in layouts}
    expected = set()
    for state, taken in ways:
        for step in taken:
            expected.add((state, step))
            state = step.applied(state)
    steps = set(redistribute.steps_between(layouts, layouts, move_terms))
    assert {(s, x) for s, x in steps if not x.by_index} <= expected | steps
    assert {x.forward for _, x in steps} == {x.forward for _, x in expected}
