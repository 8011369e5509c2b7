"""A gallery of operators, alphabetical: the rule bound to real shapes, and the strategies on one axis of 2 and of 3.

4 over 3 devices would be 2, 2 and nothing (the chunk rule), so it is offered only where nothing is safe.
"""

from __future__ import annotations

import pytest

from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.rules import granularities, instance, strategies
from tests.rule_graphs import one_op

GALLERY: list[tuple[tuple[Graph, Op], str, str, str]] = [
    (one_op("aten.add", [(4, 5), (5,)], [(4, 5)], alpha=1),
     "i0 i1, i1 -> i0 i1 | linear: 0+1", "i0; i1; =; +; ~0.1", "i1; =; +; ~0.1"),
    (one_op("aten.add", [(4, 5)], [(4, 5)], other=1, alpha=1), "i0 i1 -> i0 i1", "i0; i1; =; +", "i1; =; +"),
    (one_op("aten.addmm", [(3,), (4, 6), (6, 3)], [(4, 3)], beta=1, alpha=1),
     "+n, m k, k n -> m n | sum: k", "n; m; k; =; +", "n; k; =; +"),
    (one_op("aten.amax", [(4, 6)], [(4,)], dim=(1,), keepdim=False), "a b -> a | whole: b", "a; =; +", "=; +"),
    (one_op("aten.bmm", [(4, 5, 6), (4, 6, 3)], [(4, 5, 3)]),
     "b m k, b k n -> b m n | sum: k", "b; m; k; n; =; +", "m; k; n; =; +"),
    (one_op("aten.cat", [(4, 6), (4, 3)], [(4, 9)], dim=1),
     "a (2 b), a b -> a (3 b) | linear: 0+1", "a; b; =; +; ~0.1", "b; =; +; ~0.1"),
    (one_op("aten.conv2d", [(4, 6, 8, 8), (8, 3, 3, 3), (8,)], [(4, 8, 6, 6)], groups=2),
     "b (g c) y0 y1, (g o) c k0 k1, +(g o) -> b (g o) y0 y1 | sum: c | whole: k0 k1 | plain: y0 y1 | resized: y0 y1"
     " | variant: halo_convolution y0 y1", "b; g; c; y0; y1; o; =; +", "c; y0; y1; =; +"),
    (one_op("aten.cross_entropy_loss", [(6, 5), (6,), None], [()], (1,), reduction=1),
     "rows vocabulary, rows, - -> () | sum: rows | joined: vocabulary | empty: vocabulary | plain: vocabulary"
     " | variant: parallel_cross_entropy rows vocabulary", "rows; vocabulary; =; +", "rows; vocabulary; =; +"),
    (one_op("aten.cumsum", [(4, 6)], [(4, 6)], dim=1),
     "a b -> a b | whole: b | linear: 0", "a; =; +; ~0", "=; +; ~0"),
    (one_op("aten.dropout", [(4, 1)], [(4, 1)], p=0.1, train=True),
     "i0 1 -> i0 1 | linear: 0 | variant: random_dropout", "i0; =; +; ~0", "=; +; ~0"),
    (one_op("aten.embedding", [(7, 4), (2, 3)], [(2, 3, 4)], (1,), padding_idx=-1),
     "vocabulary d, i0 i1 -> i0 i1 d | sum: vocabulary | empty: vocabulary | plain: vocabulary"
     " | variant: vocabulary_parallel_embedding vocabulary", "vocabulary; d; i0; i1; =; +", "vocabulary; i1; =; +"),
    (one_op("aten.expand", [(1, 6)], [(4, 6)], size=(4, -1)),
     "1 b -> a b | linear: 0", "b; a; =; +; ~0", "b; =; +; ~0"),
    (one_op("aten.gather", [(4, 7), (4, 3)], [(4, 3)], (1,), dim=1),
     "a 7, a b -> a b | linear: 0", "a; b; =; +; ~0", "b; =; +; ~0"),
    (one_op("aten.index", [(4, 7), None, (5,)], [(4, 5)], (2,)),
     "x0 7, -, i0 -> x0 i0 | linear: 0", "x0; i0; =; +; ~0", "i0; =; +; ~0"),
    (one_op("aten.layer_norm", [(4, 5, 6), (6,), (6,)], [(4, 5, 6)], normalized_shape=(6,), eps=1e-5),
     "i0 i1 d, d, d -> i0 i1 d | plain: d | variant: parallel_layer_norm d", "i0; i1; d; =; +", "i1; d; =; +"),
    (one_op("aten.linear", [(4, 5, 6), (8, 6), (8,)], [(4, 5, 8)]),
     "i0 i1 m, n m, +n -> i0 i1 n | sum: m", "i0; i1; m; n; =; +", "i1; m; n; =; +"),
    (one_op("aten.matmul", [(2, 4, 6), (6, 3)], [(2, 4, 3)]),
     "i0 m k, k n -> i0 m n | sum: k", "i0; m; k; n; =; +", "k; n; =; +"),
    (one_op("aten.max_pool2d", [(4, 3, 8, 8)], [(4, 3, 4, 4)], kernel_size=(2, 2)),
     "i0 i1 (y0 2) (y1 2) -> i0 i1 y0 y1", "i0; i1; y0; y1; =; +", "i1; =; +"),
    (one_op("aten.mean", [(4, 6)], [(4, 1)], dim=(1,), keepdim=True),
     "a b -> a 1 | sum: b | linear: 0 | variant: parallel_mean b", "a; b; =; +; ~0", "b; =; +; ~0"),
    (one_op("aten.mse_loss", [(4, 6), (4, 6)], [()], reduction=1),
     "i0 i1, i0 i1 -> () | sum: i0 i1 | variant: parallel_mse_loss i0 i1", "i0; i1; =; +", "i1; =; +"),
    (one_op("aten.mul", [(4,), (4,)], [(4,)]), "i0, i0 -> i0 | linear: 0, 1", "i0; =; +; ~0; ~1", "=; +; ~0; ~1"),
    (one_op("aten.pad", [(4, 6)], [(4, 8)], pad=(1, 1), mode="constant", value=0.0),
     "a 6 -> a 8 | linear: 0", "a; =; +; ~0", "=; +; ~0"),
    (one_op("aten.pad", [(4, 6)], [(4, 8)], pad=(1, 1), mode="constant", value=1.0),
     "a 6 -> a 8", "a; =; +", "=; +"),
    (one_op("aten.permute", [(4, 5, 6)], [(6, 4, 5)], dims=(2, 0, 1)),
     "a b c -> c a b | linear: 0", "a; b; c; =; +; ~0", "b; c; =; +; ~0"),
    (one_op("aten.reshape", [(4, 6, 10)], [(24, 2, 5)], shape=(24, 2, 5)),
     "a b (c d) -> (a b) c d | linear: 0", "a; b; c; d; =; +; ~0", "b; d; =; +; ~0"),
    (one_op("aten.reshape", [(6, 4, 2)], [(4, 6, 2)], shape=(4, 6, 2)),
     "6 4 a -> 4 6 a | linear: 0", "a; =; +; ~0", "=; +; ~0"),
    (one_op("aten.scaled_dot_product_attention", [(4, 6, 5, 2), (4, 3, 7, 2), (4, 3, 7, 8), (5, 7)], [(4, 6, 5, 8)],
            dropout_p=0.0, is_causal=False, enable_gqa=True),
     "b (g r) s d, b g t d, b g t e, s 7 -> b (g r) s e | whole: t d | plain: s | together: ring s+t ring_attention, "
     "gather s+t parallel_attention, heads g*r parallel_attention",
     "b; g; r; s; e; ring; gather; heads; =; +", "g; s; e; ring; gather; =; +"),
    (one_op("aten.slice", [(4, 6)], [(4, 5)], dim=1, start=1, end=6, step=1),
     "a 6 -> a 5 | linear: 0", "a; =; +; ~0", "=; +; ~0"),
    (one_op("aten.softmax", [(4, 6)], [(4, 6)], dim=-1),
     "a b -> a b | plain: b | variant: parallel_softmax b", "a; b; =; +", "b; =; +"),
    (one_op("aten.split", [(4, 12)], [(4, 4)] * 3, split_size=(4, 4, 4), dim=1),
     "a (3 b) -> a b, a b, a b | linear: 0", "a; b; =; +; ~0", "=; +; ~0"),
    (one_op("aten.split", [(4, 12)], [(4, 6), (4, 3), (4, 3)], split_size=(6, 3, 3), dim=1),
     "a (4 b) -> a (2 b), a b, a b | linear: 0", "a; b; =; +; ~0", "b; =; +; ~0"),
    (one_op("aten.stack", [(4, 6), (4, 6)], [(4, 2, 6)], dim=1),
     "a b, a b -> a 2 b | linear: 0+1", "a; b; =; +; ~0.1", "b; =; +; ~0.1"),
    (one_op("aten.sum", [(4, 6)], [()]), "a b -> () | sum: a b | linear: 0", "a; b; =; +; ~0", "b; =; +; ~0"),
    (one_op("aten.unbind", [(4, 2)], [(4,), (4,)], dim=1), "a 2 -> a, a | linear: 0", "a; =; +; ~0", "=; +; ~0"),
    (one_op("autoshard.linear_in_out", [(4, 6), (6, 8), None], [(4, 8)]),
     "i0 m, m n, - -> i0 n | sum: m", "i0; m; n; =; +", "m; n; =; +"),
]  # fmt: skip


def test_the_gallery_is_alphabetical() -> None:
    targets = [op.target for (_, op), *_ in GALLERY]
    assert targets == sorted(targets)


@pytest.mark.parametrize(("built", "rule", "by_two", "by_three"), GALLERY, ids=lambda value: "")
def test_rule_and_strategies(built: tuple[Graph, Op], rule: str, by_two: str, by_three: str) -> None:
    graph, op = built
    assert str(instance(graph, op)) == rule
    for text, expected in (("tp=2", by_two), ("tp=3", by_three)):
        mesh = Mesh.parse(text)
        assert "; ".join(str(s) for s in strategies(graph, op, mesh, granularities(graph, mesh))) == expected
