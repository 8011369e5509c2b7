"""Random whole steps: buffers that are read and rewritten, losses over labels in larger expressions, tensors without
elements and without dims, frozen parts, micro-batches and stages. A seed gives always the same one.

`build(seed)` is what `autoshard plan tests/random_steps.py:build` takes, `step(seed)` the mesh and step it is for.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.constraints.step_request import StepRequest
from tests.label_models import LOSSES

MESHES = ("dp=2", "tp=2", "tp=3", "dp=2,tp=2", "dp=3")
STAGED = 25  # every so many models stand on two stages, in processes
BATCH, LENGTH = 4, 3
SIDES = ("parameter", "buffer", "slice", "scalar", "scalar buffer", "count")


def step(seed: int) -> tuple[str, StepRequest]:
    """The mesh, and what the step is made of."""
    rng = random.Random(f"step {seed}")
    if seed % STAGED == STAGED - 1:
        return rng.choice(("dp=1", "tp=2")), StepRequest(micro_batches=2, stages=2)
    recompute = rng.choice((None, None, "full", "selective"))
    return rng.choice(MESHES), StepRequest(micro_batches=rng.choice((1, 1, 2, 3)), recompute=recompute)


class Residual(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.drop = nn.LayerNorm(width) if norm else nn.Identity(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)))
        return x + self.down(F.dropout(y, self.drop, self.training) if self.drop else y)


class Kept(nn.Module):
    """A buffer that multiplies (`scale`), is a weight (`weight`), or is compared with (`bank`), and is rewritten."""

    WRITES = ("copy", "mul", "lerp", "rows", "assign", "none")

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.kind, self.write = rng.choice(("scale", "weight", "bank")), rng.choice(self.WRITES)
        self.first, self.plain = rng.random() < 0.2, rng.random() < 0.5
        shape = {"scale": (width,), "weight": (width, width), "bank": (7, width)}[self.kind]
        self.register_buffer("kept", torch.randn(shape) * 0.5 + 1, persistent=rng.random() < 0.8)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self._rewrite(x)
            return self._read(x, self.kept)
        aside = self.write in ("assign", "none") and self.plain  # else autograd would miss what it keeps
        y = self._read(x, self.kept if aside else self.kept.clone())
        self._rewrite(y)
        return y

    def _read(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.kind == "scale":
            return x * weight
        if self.kind == "weight":
            return F.linear(x, weight) / 3
        return torch.softmax(x @ weight.t(), -1) @ weight + x

    @torch.no_grad()
    def _rewrite(self, x: Tensor) -> None:
        new = x.detach().abs().mean((0, 1)).expand_as(self.kept)
        if self.write == "copy":
            self.kept.copy_(self.kept * 0.9 + new * 0.1)
        elif self.write == "mul":
            self.kept.mul_(0.9)
        elif self.write == "lerp":
            self.kept.lerp_(new, 0.1)
        elif self.write == "rows":
            self.kept[:2] = new[:2]
        elif self.write == "assign":
            self.kept = self.kept * 0.5 + 0.5 * new


class RandomStep(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        width = rng.choice((4, 6, 8))
        self.words, norm = nn.Embedding(11, width), rng.random() < 0.5
        self.blocks = nn.ModuleList(Residual(width, norm) for _ in range(rng.choice((2, 3, 4))))
        self.kept = nn.ModuleList(Kept(width, rng) for _ in range(rng.choice((0, 1, 1, 2))))
        self.places = [rng.randrange(len(self.blocks)) for _ in self.kept]
        self.first, self.second = nn.Linear(width, 5), nn.Linear(width, 7)
        self.name = rng.choice([*LOSSES])
        self.sides = rng.sample(SIDES, rng.choice((0, 1, 2)))
        self._sides(width)
        self._freeze(rng)

    def _sides(self, width: int) -> None:
        makers: dict[str, Callable[[], None]] = {
            "parameter": lambda: self.register_parameter("empty", nn.Parameter(torch.empty(0, width))),
            "buffer": lambda: self.register_buffer("none", torch.empty(0, width)),
            "scalar": lambda: self.register_parameter("heat", nn.Parameter(torch.tensor(0.7))),
            "scalar buffer": lambda: self.register_buffer("share", torch.tensor(0.5)),
            "count": lambda: self.register_buffer("count", torch.tensor(0)),
        }
        for side in self.sides:
            makers.get(side, lambda: None)()

    def _freeze(self, rng: random.Random) -> None:
        parts: list[nn.Module] = [self.words, *self.blocks, self.first, self.second]
        how, cut = rng.choice(("none", "none", "start", "end", "any")), rng.randrange(1, len(parts))
        frozen = {"none": [], "start": parts[:cut], "end": parts[cut:], "any": rng.sample(parts, cut)}[how]
        for part in frozen:
            part.requires_grad_(False)

    def forward(self, ids: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x = self.words(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            for place, module in zip(self.places, self.kept, strict=True):
                x = module(x) if place == number else x
        x = x.flatten(0, 1)
        x = torch.cat((x, self.empty)) if "parameter" in self.sides else x
        x = torch.cat((self.none, x)) if "buffer" in self.sides else x
        first = self.first(x)
        second = self.second(x)
        first = first * self.heat if "scalar" in self.sides else first
        loss = LOSSES[self.name](first, second, y.flatten(), z.flatten())
        loss = loss + x[:, :0].sum() if "slice" in self.sides else loss
        if "scalar buffer" in self.sides:
            loss = loss * self.share.clone()
            self.share.mul_(0.9)
        if "count" in self.sides:
            self.count += 1
        return loss


def build(seed: int = 0, trained: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of this seed and its inputs, built for real whatever the default device is.

    `trained`: to be trained, saved and resumed, in float64, with dropout in every other model. A buffer that changes is
    saved: torch itself goes on without one that is not."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        labels = torch.randint(0, 5, (BATCH, LENGTH)), torch.randint(0, 7, (BATCH, LENGTH))
        model = RandomStep(seed).double() if trained else RandomStep(seed)
        for module in model.modules() if trained else ():
            if isinstance(module, Kept):
                module._non_persistent_buffers_set.clear()
            if isinstance(module, Residual) and seed % 2:
                module.drop = 0.1
        return model, (torch.randint(0, 11, (BATCH, LENGTH)), *labels)
