"""The runtime's operators whose shards talk, in lock-step against torch on the whole tensors: value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.emit import runtime
from autoshard.emit.runtime import ParallelMesh
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.shards import assert_means, part

MESHES = ["rows=2,v=2", "v=4", "rows=3", "v=2,w=2", "rows=2,v=2,w=2", "v=5"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_gradient(loss: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = loss(x)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad


def axes(mesh: ParallelMesh, names: str) -> list[runtime.Axis]:
    return [mesh[name] for name in mesh.axes if name[0] in names]


@pytest.mark.parametrize("text", MESHES)
@pytest.mark.parametrize("classes", [11, 16, 6])  # uneven, even, with empty shards over 5 and over 2x2
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(text: str, classes: int, smoothing: float) -> None:
    mesh = Mesh.parse(text)
    logits, target = random(7, classes) * 5, torch.arange(7) * 3 % classes
    target[2] = target[5] = -100
    expected, gradient = whole_gradient(lambda x: F.cross_entropy(x, target, label_smoothing=smoothing), logits)
    layout = Layout.parse(" ".join("S0" if name == "rows" else "S1" for name in mesh.names))
    label_layout = Layout.parse(" ".join("S0" if name == "rows" else "R" for name in mesh.names))

    def work(local: ParallelMesh) -> tuple[Tensor, Tensor]:
        x = part(logits, layout, mesh, local.rank).requires_grad_()
        labels = part(target, label_layout, mesh, local.rank)
        loss = runtime.parallel_cross_entropy(
            x, labels, rows=axes(local, "r"), vocabulary=axes(local, "vw"), size=classes, label_smoothing=smoothing
        )
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    results = run_lockstep(dict(mesh.axes), work)
    assert_means(
        [y for y, _ in results], expected, Layout.parse(" ".join("P" if n == "rows" else "R" for n in mesh.names)), mesh
    )
    assert_means([g for _, g in results], gradient, layout, mesh, gradient=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_whole_classes_is_by_torch(reduction: str, weighted: bool) -> None:
    """Rows are cut unevenly, one device's labels are all ignored; the mean is over those of all devices."""
    logits, target = random(5, 6, 3), torch.arange(15).view(5, 3) % 6
    target[0, 1] = target[3] = target[4] = -100
    weight = random(6).abs() if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
    mesh = Mesh.parse("r=2")

    def work(local: ParallelMesh) -> tuple[Tensor, Tensor, str]:
        x = part(logits, Layout.parse("S0"), mesh, local.rank).requires_grad_()
        labels = part(target, Layout.parse("S0"), mesh, local.rank)
        loss = runtime.parallel_cross_entropy(x, labels, weight, rows=[local["r"]], size=6, **options)
        loss.sum().backward()
        assert x.grad is not None and loss.grad_fn is not None
        return loss.detach(), x.grad, loss.grad_fn.name()

    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, weight, **options)
    expected.sum().backward()
    results = run_lockstep({"r": 2}, work)
    losses = [y for y, *_ in results]
    torch.testing.assert_close(torch.cat(losses) if reduction == "none" else losses[0] + losses[1], expected.detach())
    torch.testing.assert_close(torch.cat([g for _, g, _ in results]), whole.grad)
    assert all("_CrossEntropy" not in name for *_, name in results)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_of_more_dims(reduction: str) -> None:
    logits, target = random(4, 6, 3), torch.arange(12).view(4, 3) % 6
    expected, gradient = whole_gradient(lambda x: F.cross_entropy(x, target, reduction=reduction), logits)
    mesh = Mesh.parse("r=2,v=2")
    layout = Layout.parse("S0 S1")

    def work(local: ParallelMesh) -> tuple[Tensor, Tensor]:
        x = part(logits, layout, mesh, local.rank).requires_grad_()
        labels = part(target, Layout.parse("S0 R"), mesh, local.rank)
        loss = runtime.parallel_cross_entropy(
            x, labels, rows=[local["r"]], vocabulary=[local["v"]], size=6, reduction=reduction
        )
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    results = run_lockstep({"r": 2, "v": 2}, work)
    assert_means([y for y, _ in results], expected, Layout.parse("P R"), mesh)
    assert_means([g for _, g in results], gradient, layout, mesh, gradient=True)


def test_cross_entropy_with_all_labels_ignored_is_what_torch_gives() -> None:
    logits, target = random(4, 6), torch.full((4,), -100)
    expected, gradient = whole_gradient(lambda x: F.cross_entropy(x, target), logits)
    assert math.isnan(expected)

    def work(local: ParallelMesh) -> tuple[Tensor, Tensor]:
        x = part(logits, Layout.parse("S1"), Mesh.parse("v=2"), local.rank).requires_grad_()
        loss = runtime.parallel_cross_entropy(x, target, rows=[], vocabulary=[local["v"]], size=6)
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    for loss, grad in run_lockstep({"v": 2}, work):
        assert math.isnan(loss) and torch.equal(grad, gradient[:, :3])


def test_cross_entropy_in_bfloat16_computes_in_float32_and_saves_one_softmax() -> None:
    logits, target = (random(8, 64) * 3).to(torch.bfloat16), torch.arange(8) * 7
    expected = F.cross_entropy(logits.float(), target)

    def work(local: ParallelMesh) -> tuple[Tensor, list[tuple[int, torch.dtype]]]:
        saved: list[tuple[int, torch.dtype]] = []

        def note(t: Tensor) -> Tensor:
            saved.append((t.numel(), t.dtype))
            return t

        x = part(logits, Layout.parse("S1"), Mesh.parse("v=2"), local.rank).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss = runtime.parallel_cross_entropy(x, target, rows=[], vocabulary=[local["v"]], size=64)
        return loss.detach(), saved

    for loss, saved in run_lockstep({"v": 2}, work):
        assert loss.dtype == torch.bfloat16
        assert loss.float().item() == pytest.approx(expected.item(), rel=2**-8)
        assert [entry for entry in saved if entry[0] > 8] == [(8 * 32, torch.bfloat16)]


@pytest.mark.parametrize("text", ["v=2", "v=4", "v=2,w=2", "v=5"])
@pytest.mark.parametrize("rows", [11, 6])
def test_embedding(text: str, rows: int) -> None:
    mesh = Mesh.parse(text)
    weight, ids, out = random(rows, 3), torch.arange(10).view(2, 5) * 7 % rows, random(2, 5, 3, seed=1)
    _, gradient = whole_gradient(lambda w: (F.embedding(ids, w, padding_idx=1) * out).sum(), weight)
    layout = Layout.parse(" ".join("S0" for _ in mesh.names))

    def work(local: ParallelMesh) -> tuple[Tensor, Tensor]:
        w = part(weight, layout, mesh, local.rank).requires_grad_()
        y = runtime.vocabulary_parallel_embedding(w, ids, size=rows, vocabulary=axes(local, "vw"), padding_idx=1)
        (y * out).sum().backward()
        assert w.grad is not None
        return y.detach(), w.grad

    results = run_lockstep(dict(mesh.axes), work)
    assert_means(
        [y for y, _ in results], F.embedding(ids, weight), Layout.parse(" ".join("P" for _ in mesh.names)), mesh
    )
    assert_means([g for _, g in results], gradient, layout, mesh, gradient=True)


@pytest.mark.parametrize("kind", ["embedding", "bags", "cross entropy", "negative log-likelihood"])
@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_that_no_device_has_is_an_error_as_on_one_device(kind: str, index: int) -> None:
    def work(local: ParallelMesh) -> Tensor:
        ids, options = torch.tensor([[2, index]]), {"size": 6, "vocabulary": axes(local, "v")}
        if kind == "embedding":
            return runtime.vocabulary_parallel_embedding(random(3, 4), ids, **options)
        if kind == "bags":
            return runtime.parallel_embedding_bag(random(3, 4), ids, mode="sum", **options)
        loss = runtime.parallel_cross_entropy if kind == "cross entropy" else runtime.parallel_nll_loss
        return loss(random(2, 3), ids[0], **options)

    with pytest.raises(Exception, match=r"out of (range|bounds)|valid range|num_embeddings"):
        run_lockstep({"v": 2}, work)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_means(parts: int) -> None:
    mesh, layout = Mesh((("r", parts),)), Layout.parse("S0")
    x, y = random(5, 4), random(5, 4, seed=1)
    mse, mse_gradient = whole_gradient(lambda t: F.mse_loss(t, y), x)
    weights = random(4, seed=2)
    _, mean_gradient = whole_gradient(lambda t: (t.mean(0) * weights).sum(), x)

    def work(local: ParallelMesh) -> tuple[Tensor, ...]:
        mine = part(x, layout, mesh, local.rank).requires_grad_()
        loss = runtime.parallel_mse_loss(mine, part(y, layout, mesh, local.rank), count=20)
        (first,) = torch.autograd.grad(loss, mine)
        mean = runtime.parallel_mean(mine, dim=[0], count=5)
        (second,) = torch.autograd.grad((mean * weights).sum(), mine)
        total = runtime.parallel_mean(mine, dim=None, keepdim=True, count=20)
        return loss.detach(), first, mean.detach(), second, total.detach()

    columns = list(zip(*run_lockstep({"r": parts}, work), strict=True))
    for column, expected in zip(columns[::2], (mse, x.mean(0), x.mean((0, 1), keepdim=True)), strict=True):
        assert_means(list(column), expected, Layout.parse("P"), mesh)
    for column, expected in zip(columns[1::2], (mse_gradient, mean_gradient), strict=True):
        assert_means(list(column), expected, layout, mesh, gradient=True)


# --- randomness ---


def test_dropout_masks_do_not_depend_on_the_mesh() -> None:
    shape = (6, 10, 4)
    keep = runtime.dropout_mask(3, 5, 17, shape, 0.3)
    for text, layout in (
        ("a=2", "S0"),
        ("a=4", "S1"),
        ("a=2,b=2", "S1/2 S0"),
        ("a=2,b=2", "S1 S1"),
        ("a=3,b=2", "R S1*5"),
    ):
        mesh = Mesh.parse(text)

        def work(local: ParallelMesh, layout: str = layout) -> Tensor:
            local.random.seed, local.random.step = 3, 5
            return local.random.keep(17, shape, layout, 0.3)

        for rank, mask in enumerate(run_lockstep(dict(mesh.axes), work)):
            assert torch.equal(mask, part(keep, Layout.parse(layout), mesh, rank)), (text, layout, rank)


def test_dropout_masks_are_random() -> None:
    """The right rate, and no relation between elements, operators, steps and seeds."""
    keep = {key: runtime.dropout_mask(*key, (200, 500), 0.25) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    for mask in keep.values():
        assert mask.double().mean().item() == pytest.approx(0.75, abs=5e-3)
        for other in (mask.roll(1, 0), mask.roll(1, 1)):
            assert (mask & other).double().mean().item() == pytest.approx(0.75**2, abs=7e-3)
    first = keep.pop((0, 0, 0))
    for mask in keep.values():
        assert (first & mask).double().mean().item() == pytest.approx(0.75**2, abs=7e-3)
    assert runtime.dropout_mask(0, 0, 0, (50,), 0.0).all() and not runtime.dropout_mask(0, 0, 0, (50,), 1.0).any()


def test_exact_dropout_and_its_gradient() -> None:
    x, keep = random(4, 6), runtime.dropout_mask(0, 2, 1, (4, 6), 0.5)

    def work(local: ParallelMesh) -> Tensor:
        local.random.step = 2
        mine = part(x, Layout.parse("S1"), Mesh.parse("a=2"), local.rank).requires_grad_()
        y = runtime.random_dropout(mine, local.random, p=0.5, index=1, shape=(4, 6), layout="S1")
        y.sum().backward()
        assert mine.grad is not None
        return torch.stack([y.detach(), mine.grad])

    result = torch.cat(run_lockstep({"a": 2}, work), -1)
    assert torch.equal(result, torch.stack([x * keep * 2, keep * 2.0]))


@pytest.mark.parametrize(("causal", "masked", "groups"), [(True, "", 1), (False, "bool", 2), (False, "add", 1)])
@pytest.mark.parametrize("layout", ["S0 S1", "S1 R", "S1 S1"])
def test_exact_attention(causal: bool, masked: str, groups: int, layout: str) -> None:
    """Sharded over batch and heads against one device; without dropout against torch."""
    q, k, v = random(2, 8, 5, 4), random(2, 8 // groups, 6, 4, seed=1), random(2, 8 // groups, 6, 4, seed=2)
    mask = {"": None, "bool": random(5, 6, seed=3) > 0, "add": random(5, 6, seed=3)}[masked]
    if masked == "bool":
        assert mask is not None
        mask[1] = False
    options = {"is_causal": causal, "enable_gqa": groups > 1, "index": 4, "shape": (2, 8, 5, 6)}
    mesh = Mesh.parse("a=2,b=2")

    def attend(local: ParallelMesh, p: float, where: str) -> tuple[Tensor, ...]:
        parts = [part(t, Layout.parse(where), mesh, local.rank).requires_grad_() for t in (q, k, v)]
        y = runtime.random_attention(*parts, mask, local.random, dropout_p=p, layout=where, **options)
        y.square().sum().backward()
        return y.detach(), *[t.grad for t in parts]

    whole = run_lockstep({"a": 2, "b": 2}, lambda local: attend(local, 0.4, "R R"))[0]
    shards = run_lockstep({"a": 2, "b": 2}, lambda local: attend(local, 0.4, layout))
    for position, expected in enumerate(whole):
        assert_means([s[position] for s in shards], expected, Layout.parse(layout), mesh)
    plain = run_lockstep({"a": 2, "b": 2}, lambda local: attend(local, 0.0, "R R"))[0][0]
    reference = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=groups > 1)
    assert torch.allclose(plain, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_keys_of_other_devices_are_gathered_for_backward_again(p: float) -> None:
    """With dropout as without: between the two passes a device keeps its own part of keys and values."""
    q, k, v = random(2, 3, 8, 4), random(2, 3, 8, 4, seed=1), random(2, 3, 8, 4, seed=2)

    def work(local: ParallelMesh) -> tuple[int, int]:
        axis, calls = local["a"], []
        gather = axis.transport.all_gather
        axis.transport.all_gather = lambda *operands: [calls.append("all_gather"), gather(*operands)][1]  # type: ignore[method-assign]
        parts = [part(t, Layout.parse("S2"), Mesh.parse("a=2"), local.rank).requires_grad_() for t in (q, k, v)]
        options = {"queries": (axis,), "keys": (axis,), "rows": 8, "columns": 8, "is_causal": False}
        if p:
            y = runtime.random_attention(
                *parts, None, local.random, dropout_p=p, index=0, shape=(2, 3, 8, 8), layout="S2", **options
            )
        else:
            y = runtime.parallel_attention(*parts, None, **options)
        before = len(calls)
        y.square().sum().backward()
        return before, len(calls) - before

    assert run_lockstep({"a": 2}, work) == [(1, 1), (1, 1)]


def test_production_dropout_is_the_same_on_replicas_only_and_leaves_the_default_generator() -> None:
    def one(coordinates: tuple[int, int]) -> tuple[Tensor, Tensor, bool]:
        rank = coordinates[0] * 2 + coordinates[1]
        results: list[tuple[Tensor, Tensor, bool]] = []

        def work(local: ParallelMesh) -> None:
            if local.rank == rank:  # one at a time: the default generator belongs to the process
                local.random.exact = False
                before = torch.get_rng_state()
                x = torch.ones(4, 50, dtype=torch.float64)
                y = runtime.random_dropout(x, local.random, p=0.5, index=0, shape=(8, 50), layout="S0 R")
                q = torch.ones(1, 2, 8, 4)
                z = runtime.random_attention(
                    q, q, q, None, local.random, dropout_p=0.5, index=1, shape=(2, 2, 8, 4), layout="S0 R"
                )
                results.append((y, z, torch.equal(before, torch.get_rng_state())))

        run_lockstep({"a": 2, "b": 2}, work)
        return results[0]

    (a, b, untouched), (c, d, _), (e, f, _) = one((0, 0)), one((0, 1)), one((1, 0))
    assert untouched
    assert torch.equal(a, c) and torch.equal(b, d)
    assert not torch.equal(a, e) and not torch.equal(b, f)
