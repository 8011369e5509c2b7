"""The runtime's attention and norms: what they keep, and low precision. `autoshard prove` has the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.costs.variants import variant_collectives
from autoshard.emit import runtime
from autoshard.emit.runtime import Axis, ParallelMesh, attention, attention_ring, redistribution
from autoshard.emit.runtime.attention_ring_kernels import Flash, Part
from autoshard.emit.runtime.zigzag import Zigzag
from autoshard.ir.graph import Op
from autoshard.ir.layout import Layout
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.shards import part

SHAPE = (2, 4, 12, 8)


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(3)]


def shards(local: ParallelMesh, text: str, layout: str, *tensors: Tensor) -> list[Tensor]:
    return [part(t, Layout.parse(layout), Mesh.parse(text), local.rank).requires_grad_() for t in tensors]


def test_gathered_keys_are_freed_after_forward_and_gathered_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = redistribution.gather_whole
    storages: list[StorageWeakRef] = []

    def noted(*args: Any, **options: Any) -> Tensor:
        whole = gather(*args, **options)
        storages.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    monkeypatch.setattr(redistribution, "gather_whole", noted)

    def work(local: ParallelMesh) -> tuple[int, int]:
        axes = (local["a"],)
        q, k, v = shards(local, "a=3", "S2", *operands())
        y = runtime.parallel_attention(q, k, v, queries=axes, keys=axes, rows=12, columns=12, is_causal=True)
        local["a"].transport.barrier()
        alive, gathers = sum(not one.expired() for one in storages), len(storages)
        local["a"].transport.barrier()
        y.sum().backward()
        return alive, gathers

    assert run_lockstep({"a": 3}, work) == [(0, 3)] * 3
    assert len(storages) == 6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_ring_in_low_precision_accumulates_in_float32(causal: bool, masked: bool) -> None:
    """As exact as torch's own attention in bfloat16; a mask that hides nothing takes the other kernels."""
    q, k, v = operands(torch.bfloat16)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*exact, is_causal=causal)
    wanted.sum().backward()

    def work(local: ParallelMesh) -> list[Tensor]:
        axes = (local["a"],)
        leaves = shards(local, "a=4", "S2", q, k, v)
        mask = torch.ones(3, 12, dtype=torch.bool) if masked else None
        y = runtime.ring_attention(*leaves, mask, queries=axes, keys=axes, rows=12, columns=12, is_causal=causal)
        y.sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    results = [torch.cat(pieces, 2).double() for pieces in zip(*run_lockstep({"a": 4}, work), strict=True)]
    for got, expected in zip(results, [wanted.detach(), *(t.grad for t in exact)], strict=True):
        assert (got - expected).abs().max() < 0.03


def test_rings_use_the_fused_kernels_where_they_can() -> None:
    def kinds(local: ParallelMesh) -> list[str]:
        axis = (local["a"],)
        q, _, v = operands()
        whole, mask = attention_ring._Ring(axis, 12, attention.held_range(12, axis), True, 1.0), torch.ones(3, 12)
        crooked = attention_ring._Ring(axis, 11, attention.held_range(12, axis), True, 1.0)
        chosen = [whole.kernels(q, v, None), whole.kernels(q, v, mask), crooked.kernels(q, v, None)]
        return [type(one).__name__ for one in (*chosen, whole.kernels(q, v[..., :4], None))]

    assert run_lockstep({"a": 4}, kinds)[3] == ["Flash", "Plain", "Plain", "Plain"]


@pytest.mark.parametrize("name", ["ring_attention", "parallel_attention"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_a_scale_that_is_not_the_usual_one_and_shared_heads(name: str, masked: bool, key_heads: int) -> None:
    """Value and gradients; a mask that hides nothing takes the other kernels."""
    q, k, v = operands()
    tensors = [t.clone().requires_grad_() for t in (q, k[:, :key_heads], v[:, :key_heads])]
    options = {"scale": 0.7, "enable_gqa": key_heads < 4}
    wanted = F.scaled_dot_product_attention(*tensors, **options)
    wanted.square().sum().backward()

    def work(local: ParallelMesh) -> list[Tensor]:
        axes = (local["a"],)
        leaves = shards(local, "a=2", "S2", *(t.detach() for t in tensors))
        mask = torch.ones(6, 12, dtype=torch.bool) if masked else None
        y = getattr(runtime, name)(*leaves, mask, queries=axes, keys=axes, rows=12, columns=12, **options)
        y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    results = [torch.cat(pieces, 2) for pieces in zip(*run_lockstep({"a": 2}, work), strict=True)]
    for got, expected in zip(results, [wanted.detach(), *(t.grad for t in tensors)], strict=True):
        assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("text", "length"), [("a=2", 12), ("a=4", 12), ("a=3", 7), ("a=4", 5), ("a=2,b=2", 11)])
@pytest.mark.parametrize("width", [8, 5])
def test_a_balanced_ring_is_attention_under_a_causal_mask(text: str, length: int, width: int) -> None:
    """Value and gradients, in the order of the sequence, of shards of any lengths; values of another width than the
    keys' take the other kernels."""
    axes, generator = Mesh.parse(text), torch.Generator().manual_seed(0)
    shapes = [(2, 4, length, 8), (2, 2, length, 8), (2, 2, length, width)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    wanted = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    wanted.square().sum().backward()

    def work(local: ParallelMesh) -> list[Tensor]:
        cut = [local[name] for name in axes.names]
        leaves = shards(local, text, " ".join(["S2"] * len(cut)), *(t.detach() for t in tensors))
        y = runtime.balanced_ring_attention(
            *leaves, queries=cut, keys=cut, rows=length, columns=length, is_causal=True, enable_gqa=True
        )
        y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    results = [torch.cat(pieces, 2) for pieces in zip(*run_lockstep(dict(axes.axes), work), strict=True)]
    for got, expected in zip(results, [wanted.detach(), *(t.grad for t in tensors)], strict=True):
        assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [{"a": 4}, {"a": 2, "b": 3}, {"a": 3, "b": 2}])
def test_a_ring_sends_along_each_axis_what_it_is_priced_by(sizes: dict[str, int]) -> None:
    """Blocks go round the inner axis before each step along the outer one, whose links may be slow."""
    mesh, count, shape = Mesh(tuple(sizes.items())), 12, (2, 4, 12 // math.prod(sizes.values()), 8)

    def work(local: ParallelMesh) -> list[tuple[str, int]]:
        axes, sent = tuple(local[name] for name in sizes), list[tuple[str, int]]()

        def counted(axis: Axis, shift: Callable[..., Callable[[], Tensor]]) -> Callable[..., Callable[[], Tensor]]:
            def noted(x: Tensor, *args: int) -> Callable[[], Tensor]:
                sent.append((axis.name, x.nbytes))
                return shift(x, *args)

            return noted

        for axis in axes:
            axis.transport.shift = counted(axis, axis.transport.shift)  # type: ignore[method-assign]
        q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
        y = runtime.ring_attention(q, k, v, queries=axes, keys=axes, rows=count, columns=count)
        sent.append(("", 0))
        y.sum().backward()
        return sent

    here, layout = run_lockstep(sizes, work)[0], Layout.parse(" ".join(["S2"] * len(sizes)))
    block = LocalTensor(shape, "float32", True)
    op = Op("y", "aten.scaled_dot_product_attention", (), (), ())
    inside = variant_collectives(mesh, op, "ring_attention", (block,) * 3, (layout,) * 3)
    turn = here.index(("", 0))
    for calls, messages in ((inside.forward, here[:turn]), (inside.backward, here[turn:])):
        for number, (name, size) in enumerate(mesh.axes):
            priced = sum(full * (size - 1) / size for axis, _, full in calls if axis == number)
            assert sum(size_bytes for axis, size_bytes in messages if axis == name) == pytest.approx(priced)


def test_a_balanced_ring_has_the_same_work_for_all() -> None:
    """Scores that a device computes, half of those of a diagonal block. In the order of the sequence the last of four
    devices has seven times those of the first."""

    def scores(local: ParallelMesh) -> tuple[int, int]:
        axis = (local["a"],)
        places = Zigzag(axis, 64)
        rows = attention.held_range(64, axis)
        balanced, plain = attention_ring._BalancedRing(places, 1.0), attention_ring._Ring(axis, 64, rows, True, 1)
        totals = []
        for order in (balanced, plain):
            parts = [order.part([owner]) for owner in range(4)]
            sizes = [(16 - p.first_row) * p.columns // (1 if p.shift is None else 2) for p in parts if p is not None]
            totals.append(sum(sizes))
        return totals[0], totals[1]

    per_rank = run_lockstep({"a": 4}, scores)
    assert [pair[0] for pair in per_rank] == [64 * 64 // 2 // 4] * 4
    assert [pair[1] for pair in per_rank] == [128, 384, 640, 896]


@pytest.mark.parametrize("rows", [(0, 8), (8, 16)])
def test_the_kernels_of_cuda_take_what_a_ring_gives_them(rows: tuple[int, int]) -> None:
    """Without a device: tensors of no values, by the operators' own schemas and shapes. Two query heads share a key's;
    a block of the keys may be shorter than that of the queries."""

    def work(local: ParallelMesh) -> list[list[tuple[int, ...]]]:
        grad_shapes = []
        with FakeTensorMode():
            q = torch.empty(2, 3, 2, 8, 16, dtype=torch.bfloat16, device="cuda")
            ring = attention_ring._Ring((local["a"],), 16, rows, False, 0.25)
            for length in (8, 5):
                k, v = (torch.empty(2, 3, 1, length, 16, dtype=q.dtype, device="cuda") for _ in range(2))
                kernels = ring.kernels(q, v, None)
                assert isinstance(kernels, Flash)
                part = Part(0, length)
                out, sums = kernels.forward(k, v, part)
                assert out.dtype == sums.dtype == torch.float32 and sums.shape == (2, 3, 2, 8, 1)
                back, arguments = kernels.back, dict[str, Any]()

                def noted(*args: Any, back: Any = back, arguments: dict[str, Any] = arguments, **options: Any) -> Any:
                    arguments |= options | dict(zip([a.name for a in back._schema.arguments], args, strict=False))
                    return back(*args, **options)

                kernels.back = noted
                grads = kernels.backward(k, v, part, q, out.to(q.dtype), sums)
                shapes = {name: tuple(x.shape) for name, x in arguments.items() if isinstance(x, Tensor)}
                assert shapes == {
                    **dict.fromkeys(("grad_out", "query", "out"), (1, 12, 8, 16)),
                    **dict.fromkeys(("key", "value"), (1, 12, length, 16)),
                    **dict.fromkeys(("philox_seed", "philox_offset"), ()),
                    "logsumexp": (1, 12, 8),
                }
                assert arguments["philox_seed"].is_cuda and arguments["philox_seed"].dtype == torch.uint64
                assert (arguments["max_q"], arguments["max_k"]) == (8, length)
                assert (arguments["dropout_p"], arguments["is_causal"], arguments["scale"]) == (0.0, False, 0.25)
                assert {grad.dtype for grad in grads} == {q.dtype} and out.shape == q.shape
                grad_shapes.append([tuple(grad.shape) for grad in grads])
        return grad_shapes

    for grad_shapes in run_lockstep({"a": 2}, work):
        assert grad_shapes == [[(2, 3, 2, 8, 16), *[(2, 3, 1, length, 16)] * 2] for length in (8, 5)]


@pytest.mark.parametrize("size", [16, 13, 5])
@pytest.mark.parametrize("text", ["a=4", "a=2,b=3", "a=3,b=2", "a=2,b=2,c=2"])
def test_the_rows_that_a_device_holds(size: int, text: str) -> None:
    """Each axis cuts what the last one left, as shards of a tensor lie; for this device and for any other."""
    mesh, whole = Mesh.parse(text), torch.arange(size)
    cut = Layout.parse(" ".join(["S0"] * len(mesh.axes)))

    def work(local: ParallelMesh) -> list[tuple[int, int]]:
        axes = [local[name] for name in mesh.names]
        places = [mesh.coordinates(rank) for rank in range(mesh.size)]
        return [attention.held_range(size, axes), *(attention.held_range(size, axes, at) for at in places)]

    held = [part(whole, cut, mesh, rank).tolist() for rank in range(mesh.size)]
    for rank, ranges in enumerate(run_lockstep(dict(mesh.axes), work)):
        assert ranges[0] == ranges[1 + rank]
        assert [list(range(*bounds)) for bounds in ranges[1:]] == held


@pytest.mark.parametrize(
    ("whole", "cut", "layout"),
    [
        (
            lambda x: F.layer_norm(x, x.shape[-1:]),
            lambda x, axes: runtime.parallel_layer_norm(x, dims=1, count=8, eps=1e-5, features=axes),
            "S3",
        ),
        (
            lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5),
            lambda x, axes: runtime.parallel_rms_norm(x, dims=1, count=8, eps=1e-5, features=axes),
            "S3",
        ),
        (lambda x: F.softmax(x, 2), lambda x, axes: runtime.parallel_softmax(x, dim=2, classes=axes), "S2"),
        (
            lambda x: F.batch_norm(x, None, None, training=True),
            lambda x, axes: runtime.synchronised_batch_norm(x, count=192, momentum=0.1, eps=1e-5, batch=axes),
            "S2",
        ),
    ],
)
def test_norms_in_low_precision_accumulate_in_float32(
    whole: Callable[[Tensor], Tensor], cut: Callable[..., Tensor], layout: str
) -> None:
    """Far from zero, where sums of squares in bfloat16 (or their difference in float32) would be lost."""
    x, weights = operands(torch.bfloat16)[0] + 30, operands()[1]
    exact = x.double().requires_grad_()
    wanted = whole(exact)
    (wanted * weights).sum().backward()

    def work(local: ParallelMesh) -> tuple[Tensor, Tensor]:
        mine, weight = shards(local, "a=2", layout, x, weights)
        y = cut(mine, (local["a"],))
        (y * weight.detach()).sum().backward()
        assert y.dtype == torch.bfloat16 and mine.grad is not None
        return y.detach(), mine.grad

    pieces = zip(*run_lockstep({"a": 2}, work), strict=True)
    for parts, expected in zip(pieces, (wanted.detach(), exact.grad), strict=True):
        assert expected is not None
        result = torch.cat(parts, int(layout[1:])).double()
        assert (result - expected).abs().max() < 0.02 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_the_scale_of_a_norm_is_not_rounded_to_low_precision(name: str) -> None:
    """Each number is, at random; a scale of a row in bfloat16 would turn all of the row by up to 0.4 %."""
    x = (3 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = x.double().requires_grad_()
    wanted = getattr(F, name)(exact, (1024,), eps=1e-5)
    seed = wanted.detach() + 0.1 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)).double()
    wanted.backward(seed)

    def work(local: ParallelMesh) -> tuple[Tensor, Tensor]:
        half = slice(512 * local["a"].index, 512 * local["a"].index + 512)
        mine = x[:, half].clone().requires_grad_()
        y = getattr(runtime, f"parallel_{name}")(mine, dims=1, count=1024, eps=1e-5, features=(local["a"],))
        y.backward(seed[:, half].bfloat16())
        assert mine.grad is not None
        return y.detach(), mine.grad

    outputs, gradients = zip(*run_lockstep({"a": 2}, work), strict=True)
    assert exact.grad is not None
    for parts, right, allowed in ((outputs, wanted.detach(), 1.5e-3), (gradients, exact.grad, 0.02)):
        turned = (torch.cat(parts, 1).double() * right).sum(1) / right.square().sum(1) - 1
        assert turned.abs().max() < allowed, turned
