"""Convolutions and pooling whose height or width is cut: the rows that windows need, and whole image models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.emit import runtime
from autoshard.emit.runtime import convolution, halo
from autoshard.emit.runtime.halo import chunk, fetch_rows, plan
from autoshard.ir.graph import Op
from autoshard.ir.layout import AxisShard, Layout, LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.rules import Strategy, explain, granularities, strategies
from autoshard.rules.proof.case_text import case, floats
from autoshard.rules.proof.rule_proof import one_op_graph
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.forced import check
from tests.models import NAMES
from tests.shards import assert_means, part
from tests.slow import slow

SPATIAL = ("y0", "y1", "y2")


@given(st.integers(0, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_a_chunk_is_what_a_layout_says(size: int, parts: list[int]) -> None:
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(parts)))
    local = LocalSize(size, tuple(AxisShard(name) for name in mesh.names))
    for rank in range(mesh.size):
        place = mesh.coordinates(rank)
        start, stop = chunk(size, parts, place)
        assert local.intervals(mesh, place) == ([(start, stop)] if start < stop else [])


@given(st.data())
def test_a_window_has_as_many_positions_as_torch_finds(data: st.DataObject) -> None:
    kernel, dilation, stride = (data.draw(st.integers(1, 4)) for _ in range(3))
    padding, span = data.draw(st.integers(0, kernel // 2)), (kernel - 1) * dilation + 1
    size, ceil = data.draw(st.integers(max(1, span - 2 * padding), 20)), data.draw(st.booleans())
    pooled = F.max_pool1d(torch.zeros(1, 1, size), kernel, stride, padding, dilation, ceil)
    assert convolution._Window(size, span, stride, padding, ceil).length == pooled.shape[-1]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_device_gets_the_rows_it_wants(data: st.DataObject) -> None:
    """Any [start, stop) of any device, also of empty shards, by what the hops of the plan say alone."""
    parts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    size = data.draw(st.integers(1, 14))
    places = list(itertools.product(*map(range, parts)))
    bounds = st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))
    wanted = tuple(data.draw(bounds) for _ in places)
    held = {place: list(range(*chunk(size, parts, place))) for place in places}
    plans = {place: plan(size, tuple(parts), wanted, place) for place in places}
    for number, axis in enumerate(reversed(range(len(parts)))):
        after = {}
        for place in places:
            peers = [(*place[:axis], i, *place[axis + 1 :]) for i in range(parts[axis])]
            got = [held[p][row] for p in peers for row in plans[p][number].sent[place[axis]]]
            hop = plans[place][number]
            assert [len(plans[p][number].sent[place[axis]]) for p in peers] == list(hop.counts)
            after[place] = got
            moved = any(p != place and plans[p][number].sent[place[axis]] for p in peers)
            assert not (hop.silent and moved)
        held = after
    assert [held[place] for place in places] == [list(range(*bound)) for bound in wanted]


def test_gradients_of_rows_that_several_devices_fetched_are_added() -> None:
    """Rows 0..7 over 4 devices; all fetch rows 1..6, wider than any shard."""
    mesh = Mesh.parse("a=4")
    x = torch.arange(24, dtype=torch.float64).view(3, 8)

    def work(local: runtime.ParallelMesh) -> tuple[Tensor, Tensor]:
        mine = part(x, Layout.parse("S1"), mesh, local.rank).requires_grad_()
        rows = fetch_rows(mine, 1, 8, [local["a"]], lambda _: (1, 7))
        (rows * (local.rank + 1)).sum().backward()
        assert mine.grad is not None
        return rows.detach(), mine.grad

    results = run_lockstep({"a": 4}, work)
    assert all(torch.equal(rows, x[:, 1:7]) for rows, _ in results)
    expected = torch.tensor([0, 10, 10, 10, 10, 10, 10, 0], dtype=torch.float64).expand(3, 8)
    assert_means([grad for _, grad in results], expected, Layout.parse("S1"), mesh)


class _Counting:
    """A transport that notes what leaves the device."""

    def __init__(self, inner: runtime.Transport, sent: list[int]) -> None:
        self.inner, self.sent = inner, sent

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        self.sent.append(x.numel())
        return self.inner.all_to_all(x, send, receive)


def _sent(shape: tuple[int, ...], kernel: int, stride: int, padding: int, parts: int) -> list[int]:
    """Numbers that each device sends in the forward of a convolution whose height is cut."""
    mesh, x = Mesh.parse(f"a={parts}"), torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(4, shape[1], kernel, kernel, dtype=torch.float64)

    def work(local: runtime.ParallelMesh) -> int:
        sent: list[int] = []
        axis = local["a"]
        counted = replace(axis, transport=_Counting(axis.transport, sent))
        mine = part(x, Layout.parse("S2"), mesh, local.rank)
        y = runtime.halo_convolution(
            mine, weight, sizes=shape[2:], stride=(stride,) * 2, padding=(padding,) * 2, dilation=(1, 1),
            height=(counted,),
        )  # fmt: skip
        whole = F.conv2d(x, weight, None, stride, padding)
        assert torch.allclose(y, part(whole, Layout.parse("S2"), mesh, local.rank), rtol=0, atol=1e-12)
        return sum(sent)

    return run_lockstep({"a": parts}, work)


@pytest.mark.parametrize("rows", [(1, 2), (0, 2)])
def test_rows_are_added_on_the_device_where_they_are(rows: tuple[int, ...]) -> None:
    with FakeTensorMode():  # knows where each tensor is, and refuses to mix devices
        result, piece = (torch.zeros(n, 2, device="cuda") for n in (4, 2))
        halo._add(result, 0, rows, piece)


def test_only_the_rows_at_the_edges_travel() -> None:
    row = 2 * 3 * 8  # of an image (2, 3, 16, 8)
    assert _sent((2, 3, 16, 8), 3, 1, 1, 4) == [row, 2 * row, 2 * row, row]
    assert _sent((2, 3, 16, 8), 5, 1, 2, 2) == [2 * row, 2 * row]
    assert _sent((2, 3, 16, 8), 3, 2, 1, 4) == [row, row, row, 0]  # the row above the first of each shard
    assert _sent((2, 3, 16, 8), 2, 2, 0, 4) == [0, 0, 0, 0]


def test_a_transposed_convolution_fetches_only_what_adds_to_its_rows() -> None:
    mesh, x = Mesh.parse("a=2"), torch.randn(2, 3, 8, 6, dtype=torch.float64)
    weight = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    whole = F.conv_transpose2d(x, weight, None, 1, 2)

    def work(local: runtime.ParallelMesh) -> int:
        sent: list[int] = []
        counted = replace(local["a"], transport=_Counting(local["a"].transport, sent))
        y = runtime.halo_transposed_convolution(
            part(x, Layout.parse("S2"), mesh, local.rank), weight, sizes=(8, 6), stride=(1, 1), padding=(2, 2),
            output_padding=(0, 0), dilation=(1, 1), height=(counted,),
        )  # fmt: skip
        assert torch.allclose(y, part(whole, Layout.parse("S2"), mesh, local.rank), rtol=0, atol=1e-12)
        return sum(sent)

    row = 2 * 3 * 6
    assert run_lockstep({"a": 2}, work) == [2 * row, 2 * row]


@pytest.mark.parametrize(
    ("one", "left_out"),
    [
        (case("aten.conv1d", floats((2, 3, 9), (4, 3, 3), None), stride=(1,), padding=(1,)), "y0@tp"),
        (case("aten.conv1d", floats((2, 3, 16), (4, 3, 12), None), stride=(1,), padding=(0,)), "y0@tp"),
    ],
)
def test_a_cut_that_leaves_a_device_without_rows_is_left_out_with_its_reason(one: object, left_out: str) -> None:
    graph = one_op_graph(one)  # type: ignore[arg-type]
    mesh = Mesh.parse("tp=4")
    known = granularities(graph, mesh)
    reasons = dict(explain(graph, graph.ops[0], mesh, known))
    assert "some device would hold nothing" in reasons[left_out]
    assert "y0" not in {str(s) for s in strategies(graph, graph.ops[0], mesh, known)}


def test_a_patch_embedding_is_cut_without_any_variant() -> None:
    graph = one_op_graph(case("aten.conv2d", floats((2, 3, 16, 8), (4, 3, 4, 4), (4,)), stride=(4, 4), padding=(0, 0)))
    mesh = Mesh.parse("tp=2")
    offered = {str(s): s for s in strategies(graph, graph.ops[0], mesh, granularities(graph, mesh))}
    assert offered["y0"].variant == "" and str(offered["y0"].operands[0]) == "S2"


def spatial(targets: tuple[str, ...]) -> Callable[[Op, Strategy], bool]:
    """Every operator with one of these words in its name must cut height or width."""

    def allowed(op: Op, strategy: Strategy) -> bool:
        cut = any(choice.factor in SPATIAL for choice in strategy.choices)
        return cut or not any(word in op.target for word in targets)

    return allowed


@pytest.mark.parametrize(
    ("name", "mesh", "expected"),
    [
        slow("resnet", "tp=2", {"halo_convolution", "halo_max_pool", "parallel_global_pool"}),
        ("unet", "dp=2,tp=2", {"halo_convolution"}),
        slow("lenet", "tp=3", {"halo_convolution"}),
    ],
)
def test_image_models_with_every_convolution_cut_in_space(name: str, mesh: str, expected: set[str]) -> None:
    functions, largest = check(NAMES[name], mesh, spatial(("conv", "pool")), seeds=(1,))
    assert expected <= functions
    assert 0.0 < largest < 1e-9
