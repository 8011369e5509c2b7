"""Every spelling computes what the operator computes: a gallery of small models, captured, emitted, and run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.case import written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from tests.slow import quick_at

X = torch.linspace(-1.0, 2.0, 4 * 6 * 8).reshape(4, 6, 8)
Y = torch.sin(torch.arange(192.0)).reshape(4, 6, 8)
IMAGE = torch.cos(torch.arange(2 * 3 * 8 * 8.0)).reshape(2, 3, 8, 8)
IDS = torch.arange(24).reshape(4, 6) % 7


class Layers(nn.Module):
    """Calls `function` with its layers and the inputs."""

    def __init__(self, function: Callable[..., object], layers: dict[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers or {})
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        first = inputs[0] * self.scale if inputs[0].is_floating_point() and inputs[0].shape[-1] == 8 else inputs[0]
        return self.function(self.layers, first, *inputs[1:])


class Curve(nn.Module):
    """So many operators that it has a class of its own, which holds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() + x.square().exp().neg() + 1.0).tanh() * x.cos()


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.curve = nn.Linear(8, 8), Curve()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.curve(self.linear(x))


def all_but_the_first(m: nn.ModuleDict, x: Tensor) -> Tensor:
    """A loop over a part of a list; the two steps that are left out are no part of another."""
    steps = list(m["a"])  # type: ignore[call-overload]
    x = steps[0](x.flip(1)).relu()
    for step in steps[1:-1]:
        x = step(x)
    return steps[-1](x.flip(0)).relu()


POINTWISE: dict[str, Callable[..., object]] = {
    "add alpha": lambda m, x, y: torch.add(x, y, alpha=2),
    "arithmetic": lambda m, x, y: (1 - x) * 2 / (y + 3) - y * -1.5,
    "powers": lambda m, x, y: x**3 + 2.0 ** (y / 4) + (-x).abs() ** 0.5,
    "rounding": lambda m, x, y: torch.div(x, y + 2, rounding_mode="floor") + x % 0.7,
    "comparisons": lambda m, x, y: ((x > y) & (x < 1.5) | (y == 0)).to(torch.float32) * x,
    "logic": lambda m, x, y: torch.where(~(x >= y), x, 0.5) + torch.where(x != y, 1.0, y),
    "masked_fill": lambda m, x, y: x.masked_fill(y > 0, float("-inf")).exp(),
    "activations": lambda m, x, y: (
        F.gelu(x) + F.gelu(y, approximate="tanh") + F.silu(x) + F.elu(y) + F.leaky_relu(x, 0.2)
    ),
    "more activations": lambda m, x, y: F.softplus(x) + F.hardtanh(y) + F.relu6(x) + torch.tanh(y) + torch.sigmoid(x),
    "functions": lambda m, x, y: x.exp().log1p() + torch.rsqrt(y + 4) + torch.erf(x).square() + y.sin().neg(),
    "clamps": lambda m, x, y: x.clamp(-0.5, 1.0) + y.clamp(min=0.0) + torch.minimum(x, y) + torch.maximum(x, y),
    "casts": lambda m, x, y: x.to(torch.bfloat16).float() + y.double().to(torch.float32) + x.type_as(y),
    "lerp": lambda m, x, y: torch.lerp(x, y, 0.3),
}
SHAPES: dict[str, Callable[..., object]] = {
    "views": lambda m, x, y: x.view(4, 48).reshape(4, 6, 8).transpose(1, 2).permute(2, 0, 1).flatten(1).contiguous(),
    "unsqueeze": lambda m, x, y: x.unsqueeze(1).expand(4, 3, 6, 8).squeeze(1) + y.unsqueeze(1),
    "split": lambda m, x, y: sum(x.split(2, dim=1)[1:], y.split([2, 4], 1)[0]) + x.chunk(3, 1)[0],
    "cat": lambda m, x, y: torch.cat([x, y, x], dim=-1).sum(-1) + torch.stack([x, y]).sum((0, 3)),
    "unbind": lambda m, x, y: x.unbind(1)[2] + y.select(1, 3),
    "slices": lambda m, x, y: x[:, 1:5:2] + y[..., 2:].sum() + x[1:, :, -3:].sum() + x[0, :, ::2].sum(),
    "index": lambda m, x, y: x[:, torch.tensor([0, 3])] + y.index_select(1, torch.tensor([1, 2])),
    "roll": lambda m, x, y: x.roll(2, 1) + y.flip(0) + x.roll((1, 2), (0, 2)),
    "pad": lambda m, x, y: F.pad(x, (1, 2)) + F.pad(y, (0, 3, 0, 0), value=2.0),
    "repeat": lambda m, x, y: x.repeat(1, 2, 1) + y.repeat_interleave(2, dim=1),
    "unflatten": lambda m, x, y: x.unflatten(2, (2, 4)).movedim(2, 0).sum(0) + y.narrow(2, 1, 4),
    "triangles": lambda m, x, y: x.tril() + y.triu(1) + torch.diagonal(x, dim1=1, dim2=2).sum(),
    "slice of one": lambda m, x, y: x.split(6, dim=1)[0] + y,
}
REDUCTIONS: dict[str, Callable[..., object]] = {
    "sums": lambda m, x, y: x.sum() + y.sum(1, keepdim=True) + x.mean((0, 2)).sum() + y.mean(),
    "extremes": lambda m, x, y: x.amax(-1) + y.amin((2,)) + x.max(dim=2).values + y.max(),
    "spread": lambda m, x, y: x.var(-1) + y.std(2, unbiased=False) + x.norm(dim=-1) + torch.logsumexp(y, 2),
    "softmax": lambda m, x, y: F.softmax(x, -1) + F.log_softmax(y, dim=1) + x.cumsum(1) + y.cumprod(2),
    "choice": lambda m, x, y: (
        x.topk(3, dim=-1)[0] + y.sort(-1, descending=True)[0][..., :3] + x.argmax(-1, keepdim=True)
    ),
    "any": lambda m, x, y: ((x > 1).any(-1) | (y < 0).all(-1)).float() * x.sum(-1),
    "gather": lambda m, x, y: (
        x.gather(1, (y[:, :2] > 0).long()) + torch.zeros(4, 2, 8).scatter_add(1, (y > 0).long(), x)
    ),
    "products": lambda m, x, y: torch.einsum("bij,bkj->bik", x, y) + x @ y.transpose(1, 2) + torch.bmm(x, y.mT),
}
CREATION: dict[str, Callable[..., object]] = {
    "arange": lambda m, x, y: x + torch.arange(8) + torch.arange(0, 16, 2) + torch.arange(8, dtype=torch.float32),
    "full": lambda m, x, y: x * torch.full((6, 8), 2.5) + torch.ones_like(y) + torch.zeros(8) + y.new_ones(8),
    "causal": lambda m, x, y: x @ y.mT + torch.full((6, 6), float("-inf")).triu(1).exp(),
    "one": lambda m, x, y: x + torch.tensor(2.0) * y,
}


def write_into(layers: object, x: Tensor, y: Tensor) -> Tensor:
    """Functionalised to slice_scatter, select_scatter, fill, scatter and index_add."""
    output = x.clone()
    output[:, 1:3] = y[:, 2:4]
    output[..., 0] = y[..., 1]
    output[1].fill_(2.0)
    output = output.scatter(2, (y > 0).long()[..., :1], 3.0)
    return output.index_add(1, torch.tensor([1, 1, 4]), y[:, :3], alpha=2)


@torch.library.custom_op("autoshard_test::two_lists", mutates_args=())
def two_lists(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    return [first[0] - second[0], second[0] * 2 - second[-1]]


@two_lists.register_fake
def _(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(first[0]), torch.empty_like(second[0])]


def _two_lists_backward(ctx: object, grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    first, second = grads
    return [first], [second * 2 - first, -second]


two_lists.register_autograd(_two_lists_backward)


def cells(layers: nn.ModuleDict, x: Tensor) -> object:
    """One step of each recurrent cell on rows of images."""
    rows = x[:, 0, 0]
    state = layers["lstm"](rows)
    return layers["gru"](state[0], rows).sum() + state[1], layers["rnn"](rows, state[1][:, :5])


LAYERS: dict[str, tuple[Callable[..., object], dict[str, nn.Module], tuple[Tensor, ...]]] = {
    "linear": (lambda m, x: m["a"](x) + m["b"](x), {"a": nn.Linear(8, 5), "b": nn.Linear(8, 5, bias=False)}, (X,)),
    "norms": (lambda m, x: m["a"](x) + m["b"](x), {"a": nn.LayerNorm(8, eps=1e-3), "b": nn.RMSNorm(8)}, (X,)),
    "plain norm": (lambda m, x: m["a"](x), {"a": nn.LayerNorm((6, 8), elementwise_affine=False)}, (X,)),
    "group norm": (lambda m, x: m["a"](x), {"a": nn.GroupNorm(3, 6)}, (X,)),
    "batch norm": (lambda m, x: m["a"](x), {"a": nn.BatchNorm2d(3)}, (IMAGE,)),
    "conv": (
        lambda m, x: m["b"](F.relu(m["a"](x))).sum() + m["c"](x),
        {
            "a": nn.Conv2d(3, 4, 3, padding=1),
            "b": nn.Conv2d(4, 2, 2, stride=2, bias=False),
            "c": nn.Conv2d(3, 6, 3, groups=3),
        },
        (IMAGE,),
    ),
    "conv1d": (
        lambda m, x: m["a"](x) + m["b"](x),
        {"a": nn.Conv1d(6, 3, 1), "b": nn.Conv1d(6, 3, 3, padding="same")},
        (X,),
    ),
    "transposed": (lambda m, x: m["a"](x), {"a": nn.ConvTranspose2d(3, 2, 3, stride=2)}, (IMAGE,)),
    "transposed in groups": (
        lambda m, x: m["a"](x) + m["b"](x).sum(),
        {
            "a": nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, output_padding=1, groups=3, bias=False),
            "b": nn.ConvTranspose2d(3, 2, 2, dilation=2),
        },
        (IMAGE,),
    ),
    "recurrent": (
        lambda m, x: m["a"](x)[0] + m["b"](x.transpose(0, 1))[0].transpose(0, 1) + sum(m["c"](x)),
        {
            "a": nn.LSTM(8, 5, 2, batch_first=True),
            "b": nn.GRU(8, 5),
            "c": nn.RNN(8, 5, batch_first=True, nonlinearity="relu", bias=False),
        },
        (X[:1],),
    ),
    "cells": (
        cells, {"lstm": nn.LSTMCell(8, 6), "gru": nn.GRUCell(6, 8), "rnn": nn.RNNCell(8, 5, bias=False)}, (IMAGE,),
    ),
    "bags": (
        lambda m, i: m["a"](i) + m["b"](i.flatten(), torch.tensor([0, 1, 7, 7])),
        {"a": nn.EmbeddingBag(7, 5), "b": nn.EmbeddingBag(9, 5, padding_idx=2, mode="sum")},
        (IDS,),
    ),
    "writes": (write_into, {}, (X, Y)),
    "attention with one key head": (
        lambda m, x, y: F.scaled_dot_product_attention(x[:, None].expand(4, 3, 6, 8), y[:, None], y[:, None]),
        {},
        (X, Y),
    ),
    "pools": (
        lambda m, x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 3, stride=2, padding=1) + F.adaptive_avg_pool2d(x, 1),
        {},
        (IMAGE,),
    ),
    "resize": (lambda m, x: F.interpolate(x, scale_factor=2, mode="nearest"), {}, (IMAGE,)),
    "embedding": (
        lambda m, i: m["a"](i) + m["b"](i),
        {"a": nn.Embedding(7, 5), "b": nn.Embedding(9, 5, padding_idx=2)},
        (IDS,),
    ),
    "attention": (
        lambda m, x, y: F.scaled_dot_product_attention(x, y, y, is_causal=True)
        + F.scaled_dot_product_attention(x, y, x, attn_mask=y[..., :6] > -0.5, scale=0.3),
        {},
        (X, Y),
    ),
    "grouped attention": (
        lambda m, x, y: F.scaled_dot_product_attention(
            x.view(4, 6, 2, 4).transpose(1, 2),
            y.view(4, 6, 2, 4).transpose(1, 2)[:, :1],
            y[:, None, :, :4],
            enable_gqa=True,
        ),
        {},
        (X, Y),
    ),
    "losses": (
        lambda m, x, i: F.cross_entropy(x.flatten(0, 1), i.flatten(), label_smoothing=0.1, ignore_index=3)
        + F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), i.flatten(), reduction="sum")
        + F.cross_entropy(x.transpose(1, 2), i),
        {},
        (X, IDS),
    ),
    "more losses": (
        lambda m, x, y: F.mse_loss(x, y)
        + F.l1_loss(x, y)
        + F.binary_cross_entropy_with_logits(x, y.abs())
        + F.huber_loss(x, y),
        {},
        (X, Y),
    ),
    "mha": (lambda m, x: m["a"](x, x, x)[0], {"a": nn.MultiheadAttention(8, 2, batch_first=True)}, (X,)),
    "a part of a list": (all_but_the_first, {"a": nn.ModuleList([Step() for _ in range(5)])}, (X,)),
    "numbered": (lambda m, x: m["0"](x), {"0": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))}, (X,)),
}  # fmt: skip
ROWS = torch.tensor([0, 3, 3])
SORTED = torch.linspace(-1.0, 2.0, 6)
# Calls that only their schemas tell: lists of tensors, overloads, arguments by keyword, numbers for words.
BY_SCHEMA: dict[str, Callable[..., object]] = {
    "embedding_bag": lambda m, x, y: (
        F.embedding_bag((y[:, :3, 0] > 0).long() * 3, x[0], mode="sum", per_sample_weights=y[:, :3, 1])
        + F.embedding_bag(ROWS, x[1], torch.tensor([0, 1, 1, 2]), mode="max")
        + F.embedding_bag(ROWS, y[1], torch.tensor([0, 1, 1, 3]), include_last_offset=True, padding_idx=0).sum()
    ),
    "index_fill": lambda m, x, y: x.index_fill(1, ROWS, 2.0) + y.index_fill(-1, ROWS, y.sum()),
    "scatter_reduce": lambda m, x, y: (
        x.scatter_reduce(1, (y > 0).long(), y, "amax", include_self=False)
        + x.scatter_reduce(2, (y > 0).long(), y, "prod")
    ),
    "index_reduce": lambda m, x, y: x.index_reduce(1, ROWS, y[:, :3], "mean", include_self=False),
    "multi_margin_loss": lambda m, x, y: F.multi_margin_loss(
        x.flatten(0, 1), ROWS.repeat(8), p=2, weight=torch.arange(1.0, 9.0)
    ),
    "stacks": lambda m, x, y: torch.hstack([x, y]).sum() + torch.dstack([x, y]).sum() + torch.vstack([x, y])[1:5],
    "block_diag": lambda m, x, y: torch.block_diag(x[0], y[0, :1], x[1]),
    "cartesian_prod": lambda m, x, y: torch.cartesian_prod(x[0, 0], y[0, 0], x[1, 1, :2]),
    "multi_dot": lambda m, x, y: torch.linalg.multi_dot([x[0], y[0].t(), x[1], y[1].t()]),
    "meshgrid": lambda m, x, y: torch.meshgrid(x[0, 0], y[0, :, 0], indexing="xy")[1] + x[0],
    "searchsorted": lambda m, x, y: torch.searchsorted(SORTED, x, right=True) + torch.searchsorted(SORTED, 0.5) + y,
    "torch.gradient": lambda m, x, y: (
        sum(torch.gradient(x, spacing=2.0))
        + torch.gradient(y, spacing=(SORTED,), dim=1)[0]
        + torch.gradient(x, dim=(0, 2), edge_order=2)[1]
    ),
    "sums of dims": lambda m, x, y: x.var(dim=(0, 2), unbiased=False) + y.nansum((-1, 0)) + torch.std_mean(x)[0],
    "losses": lambda m, x, y: (
        F.smooth_l1_loss(x, y, beta=0.5)
        + F.soft_margin_loss(x, y.sign(), reduction="sum")
        + F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=y.exp())
        + F.kl_div(F.log_softmax(x, -1), F.log_softmax(y, -1), log_target=True, reduction="batchmean")
        + F.triplet_margin_loss(x, y, x.flip(0), margin=0.3, swap=True)
        + F.cosine_embedding_loss(x[0], y[0], torch.ones(6), margin=0.2)
    ),
    "lists": lambda m, x, y: torch.ops.autoshard_test.two_lists([x], [y, x])[1] + x,
}
# Dims that count in another tensor than the first, and arguments called `dims` that are none.
DIMS: dict[str, Callable[..., object]] = {
    "diag_embed": lambda m, x, y: torch.diag_embed(x).sum(0) + torch.diag_embed(y, 0, -3, -1).sum(),
    "tile": lambda m, x, y: x[0].tile((3,)) + y[0].tile((1, 3)),
    "cosine_similarity of a broadcast": lambda m, x, y: (
        F.cosine_similarity(x[0, 0], y, dim=1).sum() + F.cosine_similarity(x[0], y, dim=-3)
    ),
    "last dims": lambda m, x, y: (
        x.diagonal(0, -2, -1).sum() + y.unsqueeze(-1).flatten(-2) + torch.stack([x, y], -1).sum(-1) + x.cummax(-1)[0]
    ),
    "cat after nothing": lambda m, x, y: torch.cat([torch.zeros(0), x, y], -1),
    "quantile": lambda m, x, y: torch.quantile(x, torch.tensor([0.2, 0.5]), dim=-1)[1] + y.median(-1).values,
    "rotated": lambda m, x, y: torch.rot90(x, 1, (-1, -2)).sum() + y.unfold(-1, 6, 2),
    "cross": lambda m, x, y: torch.linalg.cross(x[:3], y[0, 0].expand(3, 6, 8), dim=-3) + x[0, 0],
}
FUNCTIONS = POINTWISE | SHAPES | REDUCTIONS | CREATION | BY_SCHEMA | DIMS
GALLERY = {**{name: (function, {}, (X, Y)) for name, function in FUNCTIONS.items()}, **LAYERS}


def leaves(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]


def backward(outputs: object, inputs: list[Tensor]) -> list[Tensor | None]:
    """The gradients of the inputs, of the sum of all that has one."""
    total = sum(x.sum() for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad)
    if isinstance(total, Tensor):
        total.backward()
    return [x.grad for x in inputs]


def run_emitted(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[object, object, dict[str, Tensor], str]:
    """The outputs, the inputs' gradients and the state afterwards of the emitted model on a mesh of one; its source."""
    graph = capture_model(model, inputs)
    plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse("dp=1")))
    files = emit(lower(plan, graph), plan, graph)
    with written(files) as folder:
        package = load_package(folder)

    def rank(mesh: object) -> tuple[object, object, dict[str, Tensor]]:
        copy = package.model.build_model(mesh)
        package.runtime.load_full_state_dict(copy, model.state_dict())
        tensors = leaves(inputs)
        outputs = copy(*tensors)
        return outputs, backward(outputs, tensors), package.runtime.full_state_dict(copy)

    return *run_lockstep({"dp": 1}, rank)[0], files["model_parallel.py"]


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", quick_at(GALLERY, 48))
def test_the_emitted_operator_computes_the_same(name: str) -> None:
    function, layers, inputs = GALLERY[name]
    torch.manual_seed(0)
    model = Layers(function, layers).train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    outputs, gradients, after, source = run_emitted(model, inputs)
    model.load_state_dict(state)
    tensors = leaves(inputs)
    expected = model(*tensors)
    for ours, theirs in ((outputs, expected), (gradients, backward(expected, tensors))):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda text: f"{text}\n{source}"
        )
    for key, value in model.state_dict().items():
        torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-5)
