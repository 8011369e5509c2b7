"""A model file with a given constructor and forward, and what a forward may name: Functions with own gradients."""

from __future__ import annotations

import textwrap
from pathlib import Path

MODEL = """
import random, time
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.weight, None

class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)

class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * s * (1 + x * (1 - s))

class Product(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x @ w.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x

class Halved(Product):
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, 0.5 * (g.t() @ x)

class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)

class Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.held[0].square(), None

class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), g)
        return x.grad, None

class Aside(Weighed):
    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            (ctx.held[0].square() * g.mean()).sum().backward()
        return 2 * g, None

numbers = random.Random(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        INIT

    def forward(self, x):
        FORWARD

def build():
    return Model(), (torch.randn(4, 6),)
"""
END = "return self.b(h).square().mean()"


def spec_of(folder: Path, init: str, forward: str) -> str:
    path = folder / "mine.py"
    filled = MODEL.replace("FORWARD", textwrap.indent(textwrap.dedent(forward), " " * 8).strip())
    path.write_text(filled.replace("INIT", textwrap.indent(textwrap.dedent(init), " " * 8).strip()))
    return f"{path}:build"
