"""Models that are right and once were called wrong: each passes under random plans on an uneven mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.program_check import check
from autoshard.search.fixed_styles import random_plan
from autoshard.verification import Case, check_files, make_case
from tests.slow import slow

Built = tuple[nn.Module, tuple[Tensor, ...]]


class Between(nn.Module):
    """`f` between two linear layers, and a mean squared error."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.f = nn.Linear(8, 8), nn.Linear(8, 8), f

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.second(self.f(self.first(x))), target)


def between(f: Callable[[Tensor], Tensor]) -> Built:
    return Between(f), (torch.randn(4, 8), torch.randn(4, 8))


def recomputed() -> Built:
    """Dropout inside activation checkpoints, which draw it again in backward."""
    once = partial(checkpoint, _dropped, use_reentrant=False)
    return between(lambda y: once(once(functional.dropout(y, 0.5))))


def _dropped(y: Tensor) -> Tensor:
    return functional.dropout(functional.gelu(y), 0.3) * torch.rand_like(y)


def assigned() -> Built:
    """Numbers in the code that float32 rounds."""

    def f(y: Tensor) -> Tensor:
        y = y.clone()
        y[:, 1:3] = 0.3
        y[y > 0.7] = 0.1
        y = y * torch.tensor(8**0.5, dtype=y.dtype)
        return y * torch.tensor(0.3) + y.new_tensor([0.1] * 8) + torch.tensor([0.7] * 8, dtype=torch.float64).float()

    return between(f)


class Invariant(nn.Module):
    """Biases that nothing sees: before a normalisation, and of the keys of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.key, self.last = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return ((self.last(torch.softmax(h @ self.key(h).T * 3, -1) @ h) - target) ** 2).sum() * 1000


def invariant() -> Built:
    return Invariant(), (torch.randn(32, 32) * 10, torch.randn(32, 4))


class Images(nn.Module):
    """As many places for an image as there are image tokens: other token ids have no meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.eye, self.head = nn.Embedding(20, 8), nn.Linear(6, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        places = (ids == 19).unsqueeze(-1)
        assert torch.compiler.is_compiling() or int(places.sum()) == image.shape[0] * image.shape[1]
        x = self.table(ids).masked_scatter(places, self.eye(image))
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def images() -> Built:
    ids = torch.randint(0, 19, (4, 9))
    ids[:, 2:5] = 19
    return Images(), (ids, torch.randn(4, 3, 6))


class Level(nn.Module):
    """Numbers only where its parameter is as it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.layer = nn.Parameter(torch.linspace(0.5, 2.0, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.layer(x) * self.level.log(), target)


def level() -> Built:
    return Level(), (torch.randn(4, 8), torch.randn(4, 8))


def verified(name: str, mesh: str = "dp=2,tp=2", seeds: int = 2) -> Case:
    spec = f"{__file__}:{name}"
    graph = capture(spec, {})
    case = make_case(spec, {}, graph)
    for seed in range(seeds):
        plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("a100-80g-sxm")), seed)
        program = lower(plan, graph)
        check(program, graph, chosen_strategies(plan, graph))
        proof = check_files(case, program, emit(program, plan, graph))
        assert proof.passed, f"seed {seed}: {proof.failure}"
    return case


@pytest.mark.parametrize("name", ["recomputed", slow("assigned"), slow("invariant"), slow("images")])
def test_what_is_right_passes(name: str) -> None:
    assert verified(name, "tp=3" if name == "invariant" else "dp=2,tp=2").notes == ()


def test_a_model_that_takes_no_other_parameters_says_so() -> None:
    (note,) = verified("level", seeds=1).notes
    assert "near those of the constructor" in note


class Odd(nn.Module):
    """A parameter and a buffer without elements, and a reentrant checkpoint, whose input requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(8, 8), nn.Parameter(torch.empty(0, 8))
        self.register_buffer("none", torch.empty(0, 8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = torch.cat((checkpoint(self.layer, x, use_reentrant=True), self.empty, cast(Tensor, self.none)))
        return functional.mse_loss(y, target)


def odd() -> Built:
    return Odd(), (torch.randn(4, 8, requires_grad=True), torch.randn(4, 8))


def test_tensors_without_elements_and_inputs_with_a_gradient() -> None:
    case = verified("odd")
    assert not isinstance(case.native_step, str), case.native_step
