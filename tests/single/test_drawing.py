"""Random operators: the same numbers as on one device, whatever the mesh; replicas agree and shards differ."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from autoshard.emit import runtime
from autoshard.emit.runtime.random_tensors import chosen, exact_values, scaled_noise
from autoshard.errors import CaptureError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Op
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.rules import Strategy
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.forced import check
from tests.shards import part
from tests.slow import slow
from tests.small_models import spec


def cut_draws(op: Op, strategy: Strategy) -> bool:
    """What is made from nothing is cut on some axis where it can be."""
    return op.target != "autoshard.random" or any(choice.kind == "factor" for choice in strategy.choices)


@pytest.mark.parametrize("mesh", ["tp=2", slow("dp=2,tp=2")])
def test_every_way_to_draw(mesh: str) -> None:
    functions, largest = check(spec("draws"), mesh, cut_draws, (1, 2))
    drawn = {"random_tensor", "random_bernoulli", "random_multinomial", "random_noise", "random_dropout"}
    assert drawn <= functions
    assert largest < 1e-9


@pytest.mark.slow
def test_images() -> None:
    functions, largest = check(spec("resized"), "dp=2,tp=2", lambda op, strategy: True, (1, 2, 3))
    assert "random_noise" in functions
    assert largest < 1e-9


@pytest.mark.parametrize(
    ("kind", "first", "second", "mean", "deviation"),
    [
        ("uniform", -1.0, 3.0, 1.0, 4 / math.sqrt(12)),
        ("normal", 0.5, 2.0, 0.5, 2.0),
        ("exponential", 2.0, 0.0, 0.5, 0.5),
        ("integers", 3, 8, 5.0, math.sqrt(2)),
        ("bernoulli", 0.3, 0.0, 0.3, math.sqrt(0.21)),
    ],
)
def test_the_distributions(kind: str, first: float, second: float, mean: float, deviation: float) -> None:
    values = exact_values(1, 2, 3, (400, 500), kind, first, second).double()
    assert values.mean().item() == pytest.approx(mean, abs=0.01)
    assert values.std().item() == pytest.approx(deviation, rel=0.01)
    assert torch.corrcoef(torch.stack([values.flatten()[:-1], values.flatten()[1:]]))[0, 1].abs() < 0.01


# Verification substitutes the functions below on both sides: what they do wrong, it can't see.


def test_what_uniform_numbers_choose_by_weights() -> None:
    """Of weights 1, 0, 3 (need not sum to 1), drawn with repetition: a quarter is the first's, none the second's."""
    uniform = torch.tensor([[0.0, 0.249, 0.251, 0.999], [0.5, 0.3, 0.1, 0.2]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 2.0]], dtype=torch.float64)
    assert chosen(weights, uniform, 4, True).tolist() == [[0, 0, 2, 2], [2, 1, 1, 1]]


@pytest.mark.parametrize("replacement", [True, False])
def test_categories_are_drawn_at_their_rates(replacement: bool) -> None:
    """The first and the last of 40,000 draws. Without repetition the last is drawn by what the others leave."""
    weights = torch.tensor([5.0, 0.0, 2.0, 1.0, 2.0], dtype=torch.float64)
    shape = (40_000, 4 if replacement else 5)
    uniform = exact_values(0, 0, 1, shape, "uniform", 0.0, 1.0)
    drawn = chosen(weights.expand(40_000, 5), uniform, 4, replacement)
    assert drawn.shape == (40_000, 4)
    first, last = (drawn[:, i].bincount(minlength=5) / 40_000 for i in (0, -1))
    torch.testing.assert_close(first, weights.float() / 10, atol=0.01, rtol=0)
    if replacement:
        torch.testing.assert_close(last, weights.float() / 10, atol=0.01, rtol=0)
    else:
        assert (drawn.sort(-1).values == torch.tensor([0, 2, 3, 4])).all(), "each at most once, that of weight 0 never"
        torch.testing.assert_close(last, _last_of([5.0, 0.0, 2.0, 1.0, 2.0]), atol=0.01, rtol=0)


def _last_of(weights: list[float]) -> Tensor:
    """The probability of each to be drawn last, over all orders in which one after another is drawn."""
    chances = torch.zeros(len(weights))
    held = [i for i, weight in enumerate(weights) if weight]
    for order in itertools.permutations(held):
        left = [sum(weights[i] for i in order[n:]) for n in range(len(order))]
        chances[order[-1]] += math.prod(weights[i] / total for i, total in zip(order, left, strict=True))
    return chances


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_alpha_dropout_keeps_mean_and_variance(p: float) -> None:
    x = exact_values(0, 0, 1, (400_000,), "normal", 0.0, 1.0)
    noise = exact_values(0, 0, 2, (400_000,), "bernoulli", 1 - p, 0.0)
    scale, offset = scaled_noise(noise, p)
    dropped = x * scale + offset
    assert dropped[noise == 0].unique().numel() == 1
    assert dropped.mean().item() == pytest.approx(0, abs=0.01) and dropped.std().item() == pytest.approx(1, abs=0.01)


def test_production_numbers_agree_on_replicas_differ_on_shards_and_do_not_depend_on_the_mesh() -> None:
    def drawn(mesh: str, layout: str) -> list[Tensor]:
        by_rank: dict[int, Tensor] = {}

        def work(local: runtime.ParallelMesh, rank: int) -> None:
            if local.rank == rank:  # one at a time: the default generator belongs to the process
                local.random.exact = False
                values = {"kind": "normal", "first": 0.0, "second": 1.0, "dtype": torch.float32}
                by_rank[rank] = runtime.random_tensor(local.random, **values, index=3, shape=(8, 6), layout=layout)

        axes = dict(Mesh.parse(mesh).axes)
        for rank in range(Mesh.parse(mesh).size):
            run_lockstep(axes, lambda local, rank=rank: work(local, rank))
        return [by_rank[rank] for rank in sorted(by_rank)]

    whole = drawn("a=1", "R")[0]
    assert all(torch.equal(one, whole) for one in drawn("a=2,b=2", "R R"))
    first, second, third, fourth = drawn("a=2,b=2", "S0 R")
    assert first.shape == (4, 6)
    assert torch.equal(first, second) and torch.equal(third, fourth) and not torch.equal(first, third)


def test_exact_numbers_are_parts_of_the_whole() -> None:
    whole = exact_values(0, 0, 5, (4, 9), "normal", 1.0, 2.0)
    for text, layout in (("a=2", "S1"), ("a=2,b=2", "S0 S1"), ("a=3,b=2", "S1/3 R")):
        mesh = Mesh.parse(text)

        def work(local: runtime.ParallelMesh, layout: str = layout) -> Tensor:
            values = {"kind": "normal", "first": 1.0, "second": 2.0, "dtype": torch.float64}
            return runtime.random_tensor(local.random, **values, index=5, shape=(4, 9), layout=layout)

        for rank, shard in enumerate(run_lockstep(dict(mesh.axes), work)):
            assert torch.equal(shard, part(whole, Layout.parse(layout), mesh, rank))


def test_dropout_inside_a_fused_lstm_is_taken_out_where_it_draws() -> None:
    targets = [op.target for op in capture(spec("layers"), {}).ops]
    assert targets.count("aten.lstm") == 2 and targets.count("aten.dropout") == 1
    for graph in (capture(spec("layers"), {"dropout": 0.0}), capture(spec("layers"), {}, training=False)):
        assert [op.target for op in graph.ops].count("aten.lstm") == 1


def test_other_random_operators_are_refused_with_their_line() -> None:
    with pytest.raises(CaptureError, match=r"aten.rrelu draws random numbers.*small_models.py:\d+"):
        capture(spec("layers"), {"kind": "rrelu"})
