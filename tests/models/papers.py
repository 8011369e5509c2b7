"""Architectures written from their papers with `torch.nn` alone, small: `NAME(batch, ..., loss)`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import CLASSES, VOCABULARY, Built, images, tokens

WIDTH, HEADS = 32, 4


class Judged(nn.Module):
    """A loss on `model`: cross entropy for integer targets, else the mean square error. No target: the output."""

    def __init__(self, model: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *inputs: Tensor) -> Any:
        predicted = self.model(*inputs[: self.inputs])
        if len(inputs) == self.inputs:
            return predicted
        target = inputs[-1]
        if target.is_floating_point():
            return F.mse_loss(predicted, target)
        return F.cross_entropy(predicted.reshape(-1, predicted.shape[-1]), target.reshape(-1))


def _judged(model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, loss: bool) -> Built:
    return Judged(model, len(inputs)), (*inputs, *(target,) * loss)


def _classes(model: nn.Module, batch: int, size: int, loss: bool) -> Built:
    return _judged(model, (images(batch, size),), torch.randint(0, CLASSES, (batch,)), loss)


def _mlp(width: int, ratio: int = 2, out: int | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, ratio * width), nn.GELU(), nn.Linear(ratio * width, out or width))


def _heads(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# --- RetNet (arXiv 2307.08621): retention, in the parallel form -----------------------------------------------------


class Retention(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.g = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.out, self.norm = nn.Linear(width, width, bias=False), nn.GroupNorm(heads, width)
        decay = torch.log(1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float)))
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        mask = torch.where(distance >= 0, torch.exp(distance * decay[:, None, None]), 0.0)
        self.register_buffer("mask", mask / mask.sum(-1, keepdim=True).sqrt())
        angle = torch.arange(length)[:, None] * 10000.0 ** -torch.linspace(0, 1, width // heads // 2)
        self.register_buffer("sin", angle.sin().repeat_interleave(2, -1))
        self.register_buffer("cos", angle.cos().repeat_interleave(2, -1))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * self.cos + pairs * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part(x), self.heads) for part in (self.q, self.k, self.v))
        scores = self.turned(q) @ self.turned(k * k.shape[-1] ** -0.5).transpose(-1, -2) * self.mask
        scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)
        mixed = (scores @ v).transpose(1, 2).flatten(2)
        mixed = self.norm(mixed.flatten(0, 1)).view_as(x)
        return self.out(F.silu(self.g(x)) * mixed)


class RetNet(nn.Module):
    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.retentions = nn.ModuleList([Retention(WIDTH, HEADS, length) for _ in range(layers)])
        self.mlps = nn.ModuleList([_mlp(WIDTH) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2 * layers + 1)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, (retention, mlp) in enumerate(zip(self.retentions, self.mlps, strict=True)):
            x = x + retention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def retnet(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    return _judged(RetNet(layers, sequence), (tokens(batch, sequence),), tokens(batch, sequence), loss)


# --- TabTransformer (arXiv 2012.06678) -------------------------------------------------------------------------------


class TabTransformer(nn.Module):
    """Columns of categories attend to each other; beside normed numbers into an MLP."""

    def __init__(self, sizes: tuple[int, ...], numbers: int, layers: int) -> None:
        super().__init__()
        offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        self.register_buffer("offsets", offsets)
        self.embed, self.column = nn.Embedding(sum(sizes), 24), nn.Parameter(torch.randn(len(sizes), 8))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder, self.norm = nn.TransformerEncoder(layer, layers), nn.LayerNorm(numbers)
        self.mlp = _mlp(len(sizes) * WIDTH + numbers, 1, CLASSES)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        column = self.column.expand(categories.shape[0], -1, -1)
        x = self.encoder(torch.cat((self.embed(categories + self.offsets), column), -1))
        return self.mlp(torch.cat((x.flatten(1), self.norm(numbers)), -1))


def tab_transformer(batch: int = 4, layers: int = 2, loss: bool = True) -> Built:
    sizes = (5, 7, 11, 4)
    categories = torch.stack([torch.randint(0, size, (batch,)) for size in sizes], 1)
    model = TabTransformer(sizes, 6, layers)
    return _judged(model, (categories, torch.randn(batch, 6)), torch.randint(0, CLASSES, (batch,)), loss)


# --- Graphormer (arXiv 2106.05234) -----------------------------------------------------------------------------------


class Graphormer(nn.Module):
    """Embeddings of degrees; scores with a bias for the length of the shortest way; a virtual node is read."""

    def __init__(self, kinds: int, degrees: int, ways: int, layers: int) -> None:
        super().__init__()
        self.atom, self.degree = nn.Embedding(kinds, WIDTH), nn.Embedding(degrees, WIDTH)
        self.bias, self.virtual = nn.Embedding(ways, HEADS), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.virtual_bias = nn.Parameter(torch.zeros(1, HEADS, 1, 1))
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers)])
        self.out = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.mlps = nn.ModuleList([_mlp(WIDTH, 1) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2 * layers)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, atoms: Tensor, degrees: Tensor, ways: Tensor) -> Tensor:
        x = torch.cat((self.virtual.expand(atoms.shape[0], -1, -1), self.atom(atoms) + self.degree(degrees)), 1)
        bias = F.pad(self.bias(ways).permute(0, 3, 1, 2), (1, 0, 1, 0))
        far = torch.ones_like(bias)
        far[:, :, 1:, 1:] = 0
        bias = bias + self.virtual_bias * far
        for i, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlps, strict=True)):
            q, k, v = (_heads(part) for part in qkv(self.norms[2 * i](x)).chunk(3, -1))
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + bias
            x = x + out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x[:, 0])


def graphormer(batch: int = 4, nodes: int = 7, layers: int = 2, loss: bool = True) -> Built:
    inputs = (tokens(batch, nodes, 9), tokens(batch, nodes, 5), torch.randint(0, 6, (batch, nodes, nodes)))
    return _judged(Graphormer(9, 5, 6, layers), inputs, torch.randint(0, CLASSES, (batch,)), loss)


# --- XCiT (arXiv 2106.09681): attention between channels -------------------------------------------------------------


class CrossCovariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 4, 1)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature
        return self.out((scores.softmax(-1) @ v).permute(0, 3, 1, 2).reshape(b, n, c))


class XCiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.attention, self.mlp = CrossCovariance(), _mlp(WIDTH)
        self.near = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.GELU(), nn.BatchNorm2d(WIDTH),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
        )  # fmt: skip
        self.scales = nn.ParameterList([torch.full((WIDTH,), 0.1) for _ in range(3)])

    def forward(self, x: Tensor, side: int) -> Tensor:
        x = x + self.scales[0] * self.attention(self.norms[0](x))
        image = self.norms[1](x).transpose(1, 2).reshape(x.shape[0], WIDTH, side, side)
        x = x + self.scales[1] * self.near(image).flatten(2).transpose(1, 2)
        return x + self.scales[2] * self.mlp(self.norms[2](x))


class XCiT(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.GELU(),
            nn.Conv2d(16, WIDTH, 3, 2, 1, bias=False), nn.BatchNorm2d(WIDTH),
        )  # fmt: skip
        self.blocks = nn.ModuleList([XCiTBlock() for _ in range(layers)])
        self.token, self.norm = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.LayerNorm(WIDTH)
        self.query, self.kv, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        side = x.shape[-1]
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, side)
        x = self.norm(torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1))
        k, v = (_heads(part) for part in self.kv(x).chunk(2, -1))
        read = F.scaled_dot_product_attention(_heads(self.query(x[:, :1])), k, v)
        return self.head(x[:, 0] + read.transpose(1, 2).flatten(1))


def xcit(batch: int = 4, size: int = 16, layers: int = 2, loss: bool = True) -> Built:
    return _classes(XCiT(layers), batch, size, loss)


# --- Twins-SVT (arXiv 2104.13840): windows, then keys of a smaller image ----------------------------------------------


class TwinsAttention(nn.Module):
    """In windows of `window`; with `reduce` every query sees the keys of the image made smaller."""

    def __init__(self, window: int = 0, reduce: int = 0) -> None:
        super().__init__()
        self.window = window
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.small = nn.Conv2d(WIDTH, WIDTH, reduce, reduce) if reduce else None
        self.norm = nn.LayerNorm(WIDTH) if reduce else None

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        if self.small is None:
            n = self.window
            x = x.reshape(b, h // n, n, w // n, n, c).transpose(2, 3).reshape(-1, n * n, c)
            keys = x
        else:
            keys = self.norm(self.small(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2))
            x = x.reshape(b, h * w, c)
        k, v = (_heads(part) for part in self.kv(keys).chunk(2, -1))
        attended = self.out(F.scaled_dot_product_attention(_heads(self.q(x)), k, v).transpose(1, 2).flatten(2))
        if self.small is None:
            n = self.window
            attended = attended.reshape(b, h // n, w // n, n, n, c).transpose(2, 3)
        return attended.reshape(b, h, w, c)


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.attentions = nn.ModuleList([TwinsAttention(window=2), TwinsAttention(reduce=2)])
        self.mlps = nn.ModuleList([_mlp(WIDTH) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(5)])
        self.position, self.head = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, groups=WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
            if i == 0:  # the conditional position encoding stands behind the first block
                x = x + self.position(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.head(self.norms[-1](x).mean((1, 2)))


def twins(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    return _classes(Twins(), batch, size, loss)
