"""The random numbers of compiled graphs: their rate, what they depend on, and that the step is no constant of a graph.

A graph that is replayed as it was recorded (CUDA's) draws anew only if the step is one of its inputs, and nothing but
operators on tensors stands in it.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from autoshard.emit.runtime import ParallelMesh, random_dropout
from autoshard.emit.runtime.attention import random_attention
from autoshard.emit.runtime.compiling import _versions, compile_blocks
from autoshard.emit.runtime.random_tensors import random_bernoulli, random_multinomial, random_noise, random_tensor
from autoshard.emit.runtime.randomness import Random
from autoshard.emit.runtime.recompute import recomputed
from tests.single.test_production_randomness import wrong_numbers
from tests.slow import quick_at

P, ROWS, WIDTH, LAYERS, STEPS = 0.25, 64, 96, 3, 3
Draw = Callable[[Random, int], Tensor]  # of a layer: its own rows
PLACED: dict[str, Any] = {"shape": (2 * ROWS, WIDTH), "layout": "S0 R"}


def mesh_of(rank: int) -> ParallelMesh:
    return ParallelMesh({"dp": 2, "tp": 2}, rank, lambda *_: cast(Any, None), torch.device("cpu"))


def tensor(kind: str, first: float, second: float) -> Draw:
    return lambda random, index: random_tensor(
        random, kind=kind, first=first, second=second, dtype=torch.float32, index=index, **PLACED
    )


def attention(random: Random, index: int) -> Tensor:
    """Of equal scores, with the identity as values: the mask itself, times how many there are."""
    q, eye = torch.zeros(1, 1, ROWS, 8), torch.eye(WIDTH)[None, None]
    shape, k = (2, 1, ROWS, WIDTH), torch.zeros(1, 1, WIDTH, 8)
    return random_attention(q, k, eye, None, random, dropout_p=P, index=index, shape=shape, layout="S0 R")[0, 0] * WIDTH


BERNOULLI = (1 - P, math.sqrt(P * (1 - P)))
DROPPED = (1.0, math.sqrt(P / (1 - P)))
# kind -> what a layer draws, mean and deviation
KINDS: dict[str, tuple[Draw, tuple[float, float]]] = {
    "dropout": (lambda r, i: random_dropout(torch.ones(ROWS, WIDTH), r, p=P, index=i, **PLACED), DROPPED),
    "attention": (attention, DROPPED),
    "features": (lambda r, i: random_noise(torch.ones(ROWS, WIDTH), r, p=P, alpha=False, index=i, **PLACED), DROPPED),
    "bernoulli": (lambda r, i: random_bernoulli(torch.full((ROWS, WIDTH), 1 - P), r, index=i, **PLACED), BERNOULLI),
    "ones": (tensor("bernoulli", 1 - P, 0.0), BERNOULLI),
    "uniform": (tensor("uniform", -1.0, 3.0), (1.0, 4 / math.sqrt(12))),
    "integers": (tensor("integers", 2.0, 9.0), (5.0, 2.0)),
    "normal": (tensor("normal", 1.5, 2.0), (1.5, 2.0)),
    "exponential": (tensor("exponential", 2.0, 0.0), (0.5, 0.5)),
    "multinomial": (
        lambda r, i: random_multinomial(
            torch.tensor([0.5, 0.25, 0.25]).expand(ROWS, 3), r, num_samples=WIDTH, replacement=True, index=i, **PLACED
        ).float(),
        (0.75, math.sqrt(0.6875)),
    ),
}  # fmt: skip


def compiled(draw: Callable[[], Any], graphs: list[torch.fx.GraphModule]) -> Callable[[], Any]:
    def kept(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    return cast(Callable[[], Any], torch.compile(draw, fullgraph=True, backend=kept))


def drawn(draw: Draw, rank: int, done: int = 0, seed: int = 0) -> list[list[Tensor]]:
    """Of each step after the first `done`, of each layer; by one graph without a node that is not torch's own."""
    random, graphs = mesh_of(rank).random, []
    random.seed = seed
    layers = compiled(lambda: [draw(random, index) for index in range(LAYERS)], graphs)
    numbers = []
    for step in range(done, STEPS):
        random.step = step
        numbers.append(layers())
    (graph,) = graphs
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert len(inputs) == 1, "the key of the step is the only input"
    assert not any(isinstance(node.target, torch._ops.OpOverloadPacket) for node in graph.graph.nodes)
    return numbers


@pytest.mark.parametrize("kind", quick_at(KINDS, 4))
def test_compiled_numbers(kind: str) -> None:
    draw, (mean, deviation) = KINDS[kind]
    by_rank = [drawn(draw, rank) for rank in (0, 2)]
    shards = itertools.product(range(2), range(STEPS), range(LAYERS))
    assert wrong_numbers({(s, t, n): by_rank[s][t][n].double() for s, t, n in shards}, mean, deviation) == ""
    assert all(map(torch.equal, by_rank[0][2], drawn(draw, 1, done=2)[0])), "replicas, and a resumed run, draw the same"
    assert not torch.equal(by_rank[0][2][0], drawn(draw, 0, done=2, seed=1)[0][0])


def test_two_graphs_draw_the_same_and_micro_batches_others() -> None:
    random, graphs = mesh_of(0).random, []
    draw = KINDS["dropout"][0]
    layer = compiled(lambda: draw(random, 1), graphs)
    first = layer()
    with random.mesh.micro_batch(1):
        second = layer()
    assert not torch.equal(first, second) and torch.equal(first, layer())
    assert torch.equal(first, compiled(lambda: draw(random, 1), [])())


def test_a_block_is_recomputed_as_it_was_after_the_next_micro_batch_began() -> None:
    random = mesh_of(0).random
    draw = KINDS["dropout"][0]
    block = torch.nn.Module()
    block.forward = torch.compile(lambda x: x * draw(random, 1), fullgraph=True, backend="aot_eager")
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    random.step = 5
    with random.mesh.micro_batch(1):
        y = recomputed(block, random, x)
    with random.mesh.micro_batch(2):
        block(x)
        y.sum().backward()
    assert torch.equal(x.grad, y)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_draws_what_the_graph_says() -> None:
    random = mesh_of(0).random

    def layers() -> list[Tensor]:
        return [draw(random, index) for index, (draw, _) in enumerate(KINDS.values())]

    said = compiled(layers, [])()
    for one, other in zip(torch.compile(layers, fullgraph=True, backend="inductor")(), said, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_each_block_may_have_as_many_versions_as_a_function_however_often_models_are_compiled() -> None:
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({name: _versions(name)}):
        for count in (5, 5, 2):
            compile_blocks(nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(count))), "eager")
            assert getattr(torch._dynamo.config, name) == 5 * _versions(name)
