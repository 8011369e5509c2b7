"""Small models whose inputs have dynamic sizes, and those that fix one; `capture(spec("name"), {}, dynamic=...)`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Symbol, set_inputs

Built = tuple[nn.Module, tuple[Tensor, ...]]
WIDTH, WORDS = 16, 23


def spec(name: str) -> str:
    return f"{Path(__file__)}:{name}"


class Words(nn.Module):
    """A decoder: positions by a table, causal attention, labels shifted by one."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)})
                                    for _ in range(2))  # fmt: skip
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.table(ids) + self.places(torch.arange(length, device=ids.device))
        for block in self.blocks:
            q, k, v = block["qkv"](x).reshape(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind()
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, WIDTH)
            x = x + F.dropout(block["out"](y), self.dropout, self.training)
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.reshape(batch * (length - 1), WORDS), labels[:, 1:].reshape(-1))


def words(batch: int = 4, length: int = 8, dropout: float = 0.1) -> Built:
    ids = torch.randint(0, WORDS, (batch, length))
    return Words(dropout), (ids, ids.clone())


class Wide(nn.Module):
    """Much to sum over devices, little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels)


def wide() -> Built:
    return Wide(), (torch.randn(32, 64), torch.randint(0, 8, (32,)))


class Image(nn.Module):
    """Patches with a class token, two rows of sizes that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, 5)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return F.cross_entropy(self.head(self.encoder(x)[:, 0]), labels)


def image(batch: int = 4) -> Built:
    return Image(), (torch.randn(batch, 3, 16, 16), torch.randint(0, 5, (batch,)))


class Two(nn.Module):
    """What an encoder of one length tells a decoder of another."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.table(source), self.table(target)
        y = y + F.scaled_dot_product_attention(y, x, x)
        return F.cross_entropy(self.head(y).flatten(0, 1), target.flatten())


def two() -> Built:
    return Two(), (torch.randint(0, WORDS, (4, 12)), torch.randint(0, WORDS, (4, 6)))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x).relu()), labels)


def declared(batch: int = 8) -> Built:
    """Its own code says what is dynamic."""
    size = Symbol(max=64, divisor=4)
    return set_inputs(Products(), (size, 12), (size,)), (torch.randn(batch, 12), torch.randint(0, 4, (batch,)))


class Branching(nn.Module):
    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(8, 8), most

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if x.shape[0] > self.most:
            x = x * 2
        return x.sum()


def branching() -> Built:
    return Branching(), (torch.randn(4, 8),)


class Comparing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if x.shape[0] > x.shape[1]:
            x = x * 2
        return x.sum()


def comparing() -> Built:
    return Comparing(), (torch.randn(4, 6, 8),)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("places", torch.randn(6, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.layer(x) + self.places - y) ** 2).mean()


def fixed() -> Built:
    return Fixed(), (torch.randn(4, 6, 8), torch.randn(4, 6, 8))


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def halving() -> Built:
    return Halving(), (torch.randn(4, 3, 16, 16),)


class Scaling(nn.Linear):
    """A float of a size, which no graph at other sizes could follow."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * x.shape[1] ** -0.5).square().mean()


def scaling() -> Built:
    return Scaling(8, 8), (torch.randn(4, 16, 8),)


class Counting(nn.Module):
    """Its samples by `len`: a token for each, a mean over them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.token = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.layer(x)], 1)
        return x.square().sum() / len(x)


def counting() -> Built:
    return Counting(), (torch.randn(4, 6, 8),)


class Recurrent(nn.Module):
    """Two layers of one kind over sequences, both ways; the name of its input is one that fx renames."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(8, 8, 2, batch_first=True, bidirectional=True)

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.layers(input)[0]
        return out.square().mean()


def lstm() -> Built:
    return Recurrent(nn.LSTM), (torch.randn(4, 6, 8),)


def gru() -> Built:
    return Recurrent(nn.GRU), (torch.randn(4, 6, 8),)


class Placed(nn.Module):
    """Places as stored for images of 16 x 16, and by interpolation for others, or where it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.places = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 8, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        if not torch.jit.is_tracing() and x.shape[2:] == (4, 4):
            return (x + self.places).square().mean()
        return (x + F.interpolate(self.places, size=x.shape[2:], mode="bicubic")).square().mean()


def placed() -> Built:
    return Placed(), (torch.randn(4, 3, 24, 24),)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x + x.sum(1, keepdim=True) / x.shape[1]


class Mapped(nn.Module):
    """Equal modules over two lengths, which may be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.reading, self.writing = Deep(), Deep()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.reading(self.table(source)), self.writing(self.table(target))
        y = y + F.scaled_dot_product_attention(y, x, x)
        return F.cross_entropy(self.head(y).flatten(0, 1), target.flatten())


def mapped() -> Built:
    return Mapped(), (torch.randint(0, WORDS, (4, 12)), torch.randint(0, WORDS, (4, 8)))
