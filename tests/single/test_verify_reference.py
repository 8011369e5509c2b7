"""The reference run against plain training loops, and its dropout against masks written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoshard.emit.runtime.randomness import dropout_mask
from autoshard.errors import CaptureError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Parameter
from autoshard.ir.graph import Tensor as Info
from autoshard.verification.case import make_case
from autoshard.verification.original.random_draws import exact_dropout
from autoshard.verification.original.reference import run_reference

SEED = 7


class Net(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.p = nn.Linear(4, 6), nn.Linear(6, 3), nn.BatchNorm1d(6), p

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        hidden = functional.dropout(self.norm(self.first(x).float()), self.p, self.training)
        return {"loss": functional.cross_entropy(self.second(hidden).float(), labels), "hidden": hidden}


def graph_of(model: nn.Module) -> Graph:
    """Only what the reference reads: outputs, loss and mode."""
    paths = [name for name, _ in model.named_parameters()]
    inputs = (Info("x", (5, 4), "float64", False), Info("labels", (5,), "int64", False))
    outputs = (Info("loss", (), "float32", True), Info("hidden", (5, 6), "float32", True))
    parameters = tuple(Parameter(name, name) for name in paths)
    return Graph("net", (*inputs, *outputs), ("x", "labels"), parameters, (), (), ("loss", "hidden"), "loss")


def batches(count: int) -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, -100, 2, 1])] for _ in range(count)]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_equals_a_plain_loop_without_dropout() -> None:
    torch.manual_seed(0)
    model = Net(0.0).double()
    twin = Net(0.0).double()
    twin.load_state_dict(model.state_dict())
    data = batches(3)
    reference = run_reference(model, graph_of(model), data, adamw, SEED)

    optimizer = adamw(list(twin.parameters()))
    assert [step.clipped for step in reference.steps] == [True, False, True]
    for number, (x, labels) in enumerate(data):
        optimizer.zero_grad()
        hidden = twin.norm(twin.first(x))
        loss = functional.cross_entropy(twin.second(hidden), labels)
        loss.backward()
        if number == 0:
            for name, parameter in twin.named_parameters():
                assert torch.allclose(reference.gradients[name], parameter.grad, rtol=0, atol=1e-14), name
        norm = nn.utils.clip_grad_norm_(twin.parameters(), reference.steps[number].max_norm)
        optimizer.step()
        step = reference.steps[number]
        assert step.norm == pytest.approx(float(norm), rel=1e-12)
        assert torch.allclose(step.outputs[0], loss.detach(), rtol=0, atol=1e-13)
        assert torch.allclose(step.outputs[1], hidden.detach(), rtol=0, atol=1e-13)
        for name, value in (*twin.named_parameters(), *twin.named_buffers()):
            have = step.parameters.get(name, step.buffers.get(name))
            assert torch.allclose(have.double(), value.detach().double(), rtol=0, atol=1e-12), name


def test_dropout_takes_the_mask_of_its_ordinal_and_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    with exact_dropout(SEED, 2) as mode:
        first = functional.dropout(x, 0.25)
        functional.dropout(x, 0.5, training=False)
        functional.dropout(x, 0.0)
        second = nn.Dropout(0.25)(x)
    assert mode.drawn == 2
    for index, dropped in enumerate((first, second)):
        mask = dropout_mask(SEED, 2, index, x.shape, 0.25)
        assert 0.5 < mask.double().mean() < 0.95
        assert torch.allclose(dropped, x * mask / 0.75, rtol=1e-15, atol=0)
    assert not torch.equal(first, second)


def attention(q: Tensor, k: Tensor, v: Tensor, index: int, p: float) -> Tensor:
    """Causal attention written out."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) * dropout_mask(SEED, 0, index, scores.shape, p) / (1 - p) @ v


def test_attention_with_dropout_and_its_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with exact_dropout(SEED, 0):
        functional.dropout(q, 0.5)
        output = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
    expected = attention(q, k, v, 1, 0.3)
    assert torch.allclose(output, expected, rtol=0, atol=1e-14)
    weights = torch.randn_like(output)
    gradients = (torch.autograd.grad(result, (q, k, v), weights) for result in (output, expected))
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


def test_attention_inside_a_library_module() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    with exact_dropout(SEED, 0) as mode:
        first = module(x, x, x)[0]
    with exact_dropout(SEED, 0):
        second = module(x, x, x)[0]
    assert mode.drawn == 1
    assert torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_masks_again(reentrant: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return functional.dropout(functional.gelu(x), 0.3) + torch.randn_like(x) * x

    results = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        with exact_dropout(SEED, 0) as mode:
            (loss,) = [functional.dropout(run(run(functional.dropout(x, 0.5))), 0.5).square().sum()]
            results.append((loss.detach(), *torch.autograd.grad(loss, x)) if not reentrant else _backward(loss, x))
        assert mode.drawn == 6
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _backward(loss: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The older kind of checkpoint knows only this way."""
    x.grad = None
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def test_other_randomness_is_refused() -> None:
    with pytest.raises(UsageError, match="random numbers"), exact_dropout(SEED, 0):
        torch.randperm(3)


class Beyond(nn.Module):
    """Positions of a table that is too short, which no trace can know."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(torch.arange(x.shape[1])) * x[..., None]).square().mean()


def build_beyond() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Beyond(), (torch.randn(2, 5),)


def test_a_model_that_fails_by_itself_is_told_from_a_fault_of_verification() -> None:
    spec = f"{__file__}:build_beyond"
    graph = capture(spec, {})
    with pytest.raises(CaptureError, match=r"model itself fails.*self.table\(torch.arange.*IndexError: index out of"):
        make_case(spec, {}, graph, steps=1, micro_batches=2)
