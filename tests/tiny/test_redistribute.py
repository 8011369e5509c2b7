"""The pair table, and the cheapest path against a brute-force search written from the definitions."""

from __future__ import annotations

import heapq
import itertools
import math
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import redistribute
from autoshard.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL,
    Layout,
    LocalSize,
    Placement,
    Shard,
    local_shape,
    local_sizes,
    normalise,
)
from autoshard.mesh import Mesh
from autoshard.redistribute import BACKWARD, FORWARD, Step, all_pairs, dim_cuts, kind, path, runtime_call

KINDS = ("S", "R", "R+", "P")
FACTORS = {"all_gather": 1.0, "reduce_scatter": 1.1, "all_reduce": 2.0, "all_to_all": 0.3}


def seconds(axis: int, primitive: str, full_bytes: float) -> float:
    return 1e-5 + FACTORS[primitive] * full_bytes / (1e6 * (axis + 1))


def layout(text: str) -> Layout:
    return Layout.parse(text)


def steps(source: str, target: str, shape: tuple[int, ...], mesh: str, differentiable: bool = True) -> list[str]:
    found = path(layout(source), layout(target), shape, "float32", Mesh.parse(mesh), differentiable, seconds)
    assert found is not None
    return [f"{s.axis}: {s.before} -> {s.after}" for s in found.steps]


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
    assert steps("S0 R", "R S1", (8, 8), "a=2,b=2", differentiable=False) == ["1: R -> S1", "0: S0 -> R"]


def test_reduce_scatter_instead_of_all_reduce_and_slice() -> None:
    assert steps("P", "S0", (8, 8), "a=4") == ["0: P -> S0"]
    assert steps("P S1", "S0 S1", (8, 8), "a=2,b=2") == ["0: P -> S0"]


def test_inner_axis_steps_aside_for_the_outer_one() -> None:
    found = steps("S0 S0", "R S0", (8,), "a=2,b=2", differentiable=False)
    assert found == ["1: S0 -> R", "0: S0 -> R", "1: R -> S0"]
    assert steps("S0 S0", "R S0", (64, 64), "a=2,b=2")[0].startswith("1: S0 ->")


def test_misaligned_blocks_have_no_path() -> None:
    mesh = Mesh.parse("a=2,b=2")
    assert path(layout("S0 S0/3"), layout("R R"), (12,), "float32", mesh, True, seconds) is None
    assert math.isinf(all_pairs([layout("S0 S0/3")], [layout("R R")], (12,), "float32", mesh, True, seconds)[0][0, 0])


def test_without_gradient_partial_gradients_are_free() -> None:
    mesh = Mesh.parse("a=2")
    forward, backward = all_pairs([layout("R")], [layout("R+"), layout("R")], (8,), "float32", mesh, False, seconds)
    assert forward.tolist() == [[0.0, 0.0]] and backward.tolist() == [[0.0, 0.0]]


def test_dim_cuts_of_nested_blocks() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    joined, cut = dim_cuts(Step(1, Shard(0, 4), Shard(1, 3, 2)), layout("S0 S0/4"), (16, 12), mesh)
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


@lru_cache(maxsize=100_000)
def _clean(state: Layout, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether `axis` can be joined here: innermost on its dim, and the same whole blocks on every device without it."""
    shard = state.placements[axis]
    if not isinstance(shard, Shard):
        return True
    if any(a > axis for a, _ in state.shards(shard.dim)):
        return False
    outer = local_sizes(shape, Layout((*state.placements[:axis], *[REPLICATE] * (len(mesh.axes) - axis))), mesh)[
        shard.dim
    ]
    length = shape[shard.dim] // shard.blocks
    counts = set()
    for rank in range(mesh.size):
        held = [i for start, stop in outer.intervals(mesh, mesh.coordinates(rank)) for i in range(start, stop)]
        blocks = [len(list(run)) for _, run in itertools.groupby(held, key=lambda i: i // length)]
        if len(set(blocks)) > 1:
            return False
        counts |= {len(blocks)} - {0}
    return shard.blocks == 1 or len(counts) == 1


def _primitive_seconds(name: str, axis: int, given_bytes: float, made_bytes: float) -> float:
    if name in ("", "slice", "mask", "zero_pad"):
        return redistribute.COPY_SECONDS if name else 0.0
    return seconds(axis, name, given_bytes if name == "all_to_all" else max(given_bytes, made_bytes))


def _neighbours(state: Layout, letters: list[list[Placement]], shape: tuple[int, ...], mesh: Mesh, gradient: bool):  # type: ignore[no-untyped-def]
    for axis, options in enumerate(letters):
        before = state.placements[axis]
        for after in options:
            other = state.replace(axis, after)
            same_dim = isinstance(before, Shard) and isinstance(after, Shard) and before.dim == after.dim
            if (
                before == after
                or same_dim
                or not _clean(state, axis, shape, mesh)
                or not _clean(other, axis, shape, mesh)
            ):
                continue
            pair = kind(before), kind(after)
            here, there = _bytes(state, shape, mesh), _bytes(other, shape, mesh)
            forward = _primitive_seconds(FORWARD[pair], axis, here, there)
            backward = _primitive_seconds(BACKWARD[pair], axis, there, here) if gradient else 0.0
            yield other, forward + backward


def brute_force(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, gradient: bool) -> float:
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
        for other, price in _neighbours(state, letters, shape, mesh, gradient):
            if cost + price < best.get(other, math.inf):
                best[other] = cost + price
                heapq.heappush(queue, (cost + price, str(other)))
    return math.inf


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


@settings(max_examples=60)
@given(cases())
def test_path_and_all_pairs_equal_brute_force(
    case: tuple[list[Layout], list[Layout], tuple[int, ...], Mesh, bool],
) -> None:
    sources, targets, shape, mesh, gradient = case
    forward, backward = all_pairs(sources, targets, shape, "float32", mesh, gradient, seconds)
    for (i, source), (j, target) in itertools.product(enumerate(sources), enumerate(targets)):
        expected = brute_force(source, target, shape, mesh, gradient)
        found = path(source, target, shape, "float32", mesh, gradient, seconds)
        assert forward[i, j] + backward[i, j] == pytest.approx(expected, rel=1e-9, abs=1e-10)
        if found is None:
            assert math.isinf(expected)
            continue
        assert found.forward_seconds + found.backward_seconds == pytest.approx(expected, rel=1e-9, abs=1e-10)
        state = source
        for step in found.steps:
            assert state.placements[step.axis] == step.before
            dim_cuts(step, state, shape, mesh)  # asserts that the blocks are clean
            state = state.replace(step.axis, step.after)
        assert state == target


def test_same_answer_every_time_and_in_any_company() -> None:
    mesh, shape = Mesh.parse("a=2,b=4"), (64, 96)
    layouts = [layout(f"{x} {y}") for x in ("R", "S0", "S1/3", "P") for y in ("R+", "S1", "S0", "S1/3*4", "P")]
    together = sum(all_pairs(layouts, layouts, shape, "bfloat16", mesh, True, seconds))
    again = sum(all_pairs(layouts[::-1], layouts[::-1], shape, "bfloat16", mesh, True, seconds))[::-1, ::-1]
    assert together == pytest.approx(again, rel=1e-12)
    for i, j in itertools.product(range(0, len(layouts), 3), range(0, len(layouts), 2)):
        one = path(layouts[i], layouts[j], shape, "bfloat16", mesh, True, seconds)
        assert one == path(layouts[i], layouts[j], shape, "bfloat16", mesh, True, seconds)
        price = math.inf if one is None else one.forward_seconds + one.backward_seconds
        assert price == pytest.approx(together[i, j], rel=1e-12)
