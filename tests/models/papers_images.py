"""Convolutional networks and diffusion transformers written from their papers: `NAME(batch, ..., loss)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import CLASSES, Built, images
from tests.models.papers import HEADS, WIDTH, _classes, _heads, _judged, _mlp


def _conv(inner: int, outer: int, kernel: int, **more: int) -> nn.Sequential:
    more = {"padding": kernel // 2, **more}
    return nn.Sequential(nn.Conv2d(inner, outer, kernel, bias=False, **more), nn.BatchNorm2d(outer), nn.ReLU())


# --- GoogLeNet (arXiv 1409.4842), with batch norm -------------------------------------------------------------------


class Inception(nn.Module):
    def __init__(self, inner: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.one = _conv(inner, one, 1)
        self.three = nn.Sequential(_conv(inner, three[0], 1), _conv(*three, 3))
        self.five = nn.Sequential(_conv(inner, five[0], 1), _conv(*five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), _conv(inner, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x), self.three(x), self.five(x), self.pool(x)), 1)


def googlenet(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    model = nn.Sequential(
        _conv(3, 16, 7, stride=2), nn.MaxPool2d(3, 2, ceil_mode=True), _conv(16, 16, 1), _conv(16, 24, 3),
        Inception(24, 8, (12, 16), (4, 8), 8), nn.MaxPool2d(3, 2, ceil_mode=True),
        Inception(40, 16, (12, 24), (4, 8), 8), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(56, CLASSES),
    )  # fmt: skip
    return _classes(model, batch, size, loss)


# --- DeepLabV3 (arXiv 1706.05587): dilated convolutions side by side ------------------------------------------------


class DeepLab(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(_conv(3, 16, 3, stride=2), _conv(16, WIDTH, 3, stride=2))
        self.branches = nn.ModuleList([_conv(WIDTH, 16, 1), *(_dilated(rate) for rate in (2, 4))])
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), _conv(WIDTH, 16, 1))
        self.project = nn.Sequential(_conv(64, 16, 1), nn.Dropout(0.5), _conv(16, 16, 3), nn.Conv2d(16, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.trunk(x)
        pooled = F.interpolate(self.pooled(seen), size=seen.shape[-2:], mode="bilinear", align_corners=False)
        projected = self.project(torch.cat([*(branch(seen) for branch in self.branches), pooled], 1))
        return F.interpolate(projected, size=x.shape[-2:], mode="bilinear", align_corners=False)


def _dilated(rate: int) -> nn.Sequential:
    return _conv(WIDTH, 16, 3, padding=rate, dilation=rate)


def deeplab_v3(batch: int = 4, size: int = 32, loss: bool = True) -> Built:
    return _judged(DeepLab(), (images(batch, size),), torch.randn(batch, CLASSES, size, size), loss)


# --- MaxViT (arXiv 2204.01697): attention in blocks, then over a grid -----------------------------------------------


class MaxAttention(nn.Module):
    """Among the pixels of a window, or with `grid` among those a window apart; a bias for each offset."""

    def __init__(self, window: int, grid: bool) -> None:
        super().__init__()
        self.window, self.grid = window, grid
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), _mlp(WIDTH))
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, HEADS))
        place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None] + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.window
        shape = (b, n, h // n, n, w // n, c) if self.grid else (b, h // n, n, w // n, n, c)
        order = (0, 2, 4, 1, 3, 5) if self.grid else (0, 1, 3, 2, 4, 5)
        parts = x.reshape(shape).permute(order)
        tokens = self.norm(parts.reshape(-1, n * n, c))
        q, k, v = (_heads(part) for part in self.qkv(tokens).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[self.index].permute(2, 0, 1)[None])
        attended = self.out(attended.transpose(1, 2).flatten(2)).reshape(parts.shape)
        back = [order.index(dim) for dim in range(6)]
        x = x + attended.permute(back).reshape(b, h, w, c)
        return x + self.mlp(x)


class MBConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.BatchNorm2d(WIDTH), _conv(WIDTH, 2 * WIDTH, 1))
        self.deep = _conv(2 * WIDTH, 2 * WIDTH, 3, groups=2 * WIDTH)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2 * WIDTH, 8, 1), nn.SiLU(), nn.Conv2d(8, 64, 1))
        self.out = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.deep(self.wide(x))
        return x + self.out(seen * self.gate(seen).sigmoid())


class MaxViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.near = nn.Conv2d(3, WIDTH, 3, 2, 1), MBConv()
        self.block, self.grid = MaxAttention(4, False), MaxAttention(4, True)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.near(self.stem(x)).permute(0, 2, 3, 1)
        return self.head(self.grid(self.block(x)).mean((1, 2)))


def maxvit(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    return _classes(MaxViT(), batch, size, loss)


# --- diffusion transformers ------------------------------------------------------------------------------------------


def _times(t: Tensor, width: int = WIDTH) -> Tensor:
    angle = t[:, None] * torch.exp(torch.arange(width // 2, device=t.device) * (-9.0 / (width // 2)))
    return torch.cat((angle.cos(), angle.sin()), -1)


def _rotated(x: Tensor, place: Tensor) -> Tensor:
    """Pairs that stand side by side, turned by their place."""
    angle = place[:, None] * 100.0 ** -(torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).flatten(-2)


class Joint(nn.Module):
    """FLUX's double block: image and text have weights of their own and attend together."""

    def __init__(self) -> None:
        super().__init__()
        self.mods, self.qkvs, self.outs, self.mlps = (
            nn.ModuleList([make() for _ in range(2)])
            for make in (
                lambda: nn.Linear(WIDTH, 6 * WIDTH), lambda: nn.Linear(WIDTH, 3 * WIDTH),
                lambda: nn.Linear(WIDTH, WIDTH), lambda: _mlp(WIDTH),
            )
        )  # fmt: skip
        self.q, self.k = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)

    def forward(self, streams: list[Tensor], c: Tensor, place: Tensor) -> list[Tensor]:
        mods = [mod(F.silu(c))[:, None].chunk(6, -1) for mod in self.mods]
        parts = []
        for x, mod, qkv in zip(streams, mods, self.qkvs, strict=True):
            seen = F.layer_norm(x, (WIDTH,)) * (1 + mod[1]) + mod[0]
            parts.append([_heads(part) for part in qkv(seen).chunk(3, -1)])
        q, k, v = (torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
        read = F.scaled_dot_product_attention(_rotated(self.q(q), place), _rotated(self.k(k), place), v)
        reads = read.transpose(1, 2).flatten(2).split([x.shape[1] for x in streams], 1)
        result = []
        for x, mod, out, mlp, seen in zip(streams, mods, self.outs, self.mlps, reads, strict=True):
            x = x + mod[2] * out(seen)
            result.append(x + mod[5] * mlp(F.layer_norm(x, (WIDTH,)) * (1 + mod[4]) + mod[3]))
        return result


class Single(nn.Module):
    """FLUX's single block: attention and MLP from one projection into one."""

    def __init__(self) -> None:
        super().__init__()
        self.mod, self.wide, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 5 * WIDTH),
            nn.Linear(3 * WIDTH, WIDTH),
        )
        self.q, self.k = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: Tensor, c: Tensor, place: Tensor) -> Tensor:
        shift, scale, gate = self.mod(F.silu(c))[:, None].chunk(3, -1)
        qkv, inner = self.wide(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift).split((3 * WIDTH, 2 * WIDTH), -1)
        q, k, v = (_heads(part) for part in qkv.chunk(3, -1))
        read = F.scaled_dot_product_attention(_rotated(self.q(q), place), _rotated(self.k(k), place), v)
        inner = F.gelu(inner, approximate="tanh")
        return x + gate * self.out(torch.cat((read.transpose(1, 2).flatten(2), inner), -1))


class Flux(nn.Module):
    def __init__(self, pixels: int, text: int) -> None:
        super().__init__()
        self.image, self.text, self.time = nn.Linear(pixels, WIDTH), nn.Linear(text, WIDTH), _mlp(WIDTH)
        self.joint, self.single = Joint(), Single()
        self.mod, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, pixels)

    def forward(self, image: Tensor, text: Tensor, t: Tensor) -> Tensor:
        c = self.time(_times(t))
        place = torch.arange(text.shape[1] + image.shape[1], device=image.device)
        written, seen = self.joint([self.text(text), self.image(image)], c, place)
        x = self.single(torch.cat((written, seen), 1), c, place)[:, text.shape[1] :]
        shift, scale = self.mod(F.silu(c))[:, None].chunk(2, -1)
        return self.out(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)


def flux(batch: int = 4, patches: int = 8, words: int = 6, loss: bool = True) -> Built:
    inputs = (torch.randn(batch, patches, 16), torch.randn(batch, words, 24), torch.rand(batch))
    return _judged(Flux(16, 24), inputs, torch.randn(batch, patches, 16), loss)


class SanaBlock(nn.Module):
    """Linear attention by ReLU, cross attention to the text, a gated MLP with a depthwise convolution."""

    def __init__(self, text: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, WIDTH) / WIDTH**0.5)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, kdim=text, vdim=text, batch_first=True)
        self.wide, self.narrow = nn.Conv2d(WIDTH, 4 * WIDTH, 1), nn.Conv2d(2 * WIDTH, WIDTH, 1, bias=False)
        self.near = nn.Conv2d(4 * WIDTH, 4 * WIDTH, 3, padding=1, groups=4 * WIDTH)

    def linear(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part) for part in self.qkv(x).chunk(3, -1))
        q, k = F.relu(q), F.relu(k)
        read = q @ (k.transpose(-1, -2) @ F.pad(v, (0, 1), value=1.0))
        return self.out((read[..., :-1] / (read[..., -1:] + 1e-6)).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, text: Tensor, c: Tensor, side: int) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = (self.table[None] + c.unflatten(-1, (6, -1))).chunk(6, 1)
        x = x + gate * self.linear(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)
        x = x + self.cross(x, text, text, need_weights=False)[0]
        seen = (F.layer_norm(x, (WIDTH,)) * (1 + scale2) + shift2).transpose(1, 2).unflatten(-1, (side, side))
        value, open_ = self.near(F.silu(self.wide(seen))).chunk(2, 1)
        return x + gate2 * self.narrow(value * F.silu(open_)).flatten(2).transpose(1, 2)


class Sana(nn.Module):
    def __init__(self, text: int, layers: int) -> None:
        super().__init__()
        self.patches, self.time, self.six = nn.Conv2d(4, WIDTH, 1), _mlp(WIDTH), nn.Linear(WIDTH, 6 * WIDTH)
        self.blocks, self.out = nn.ModuleList([SanaBlock(text) for _ in range(layers)]), nn.Linear(WIDTH, 4)
        self.norm = nn.RMSNorm(text)

    def forward(self, image: Tensor, text: Tensor, t: Tensor) -> Tensor:
        side = image.shape[-1]
        x, c, text = (
            self.patches(image).flatten(2).transpose(1, 2),
            self.six(F.silu(self.time(_times(t)))),
            self.norm(text),
        )
        for block in self.blocks:
            x = block(x, text, c, side)
        return self.out(F.layer_norm(x, (WIDTH,))).transpose(1, 2).unflatten(-1, (side, side))


def sana(batch: int = 4, size: int = 4, words: int = 6, layers: int = 2, loss: bool = True) -> Built:
    inputs = (images(batch, size, 4), torch.randn(batch, words, 24), torch.rand(batch))
    return _judged(Sana(24, layers), inputs, images(batch, size, 4), loss)


class WanBlock(nn.Module):
    """Rotary self attention over space and time, cross attention to the text, shifts and gates of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, WIDTH) / WIDTH**0.5)
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.kv, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = _mlp(WIDTH)

    def forward(self, x: Tensor, text: Tensor, c: Tensor, place: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = (self.table + c).chunk(6, 1)
        q, k, v = self.qkv(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift).chunk(3, -1)
        q, k = (_rotated(_heads(part), place) for part in (self.q(q), self.k(k)))
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, _heads(v)).transpose(1, 2).flatten(2))
        k, v = (_heads(part) for part in self.kv(text).chunk(2, -1))
        read = F.scaled_dot_product_attention(_heads(self.query(self.norm(x))), k, v)
        x = x + self.read(read.transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(F.layer_norm(x, (WIDTH,)) * (1 + scale2) + shift2)


class Wan(nn.Module):
    def __init__(self, text: int, layers: int) -> None:
        super().__init__()
        self.patches, self.text = nn.Conv3d(4, WIDTH, (1, 2, 2), (1, 2, 2)), _mlp(text, 1, WIDTH)
        self.time, self.six = _mlp(WIDTH), nn.Linear(WIDTH, 6 * WIDTH)
        self.blocks, self.out = nn.ModuleList([WanBlock() for _ in range(layers)]), nn.Linear(WIDTH, 16)

    def forward(self, video: Tensor, text: Tensor, t: Tensor) -> Tensor:
        x = self.patches(video)
        b, _, f, h, w = x.shape
        x, text = x.flatten(2).transpose(1, 2), self.text(text)
        c = self.six(F.silu(self.time(_times(t)))).unflatten(-1, (6, -1))
        place = torch.arange(f * h * w, device=x.device)
        for block in self.blocks:
            x = block(x, text, c, place)
        patches = self.out(F.layer_norm(x, (WIDTH,))).reshape(b, f, h, w, 2, 2, 4)
        return patches.permute(0, 6, 1, 2, 4, 3, 5).reshape(video.shape)


def wan(batch: int = 4, size: int = 4, frames: int = 2, words: int = 6, layers: int = 2, loss: bool = True) -> Built:
    video = torch.randn(batch, 4, frames, size, size)
    inputs = (video, torch.randn(batch, words, 24), torch.rand(batch))
    return _judged(Wan(24, layers), inputs, torch.randn_like(video), loss)
