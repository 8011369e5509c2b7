"""Random models from the proof cases of the table and from modules that people write: a seed gives always the same one.

`build(seed)` is what `autoshard plan tests/random_models.py:build` takes. A model draws a few pieces. Each piece takes
its operands from earlier values (reshaped, and squashed to where the operator is defined), parameters, and inputs. The
loss weighs every element of every value differently, so that no permuted, repeated or dropped element cancels out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.rules.cases import ALL
from autoshard.rules.operators import OPERATORS
from autoshard.rules.proof.operator_call import call
from autoshard.rules.proof.rule_proof import OpCase, Operand

# Experts are recognised as a whole module, not as an operator; empty_like has no values to compare.
_NOT_ALONE = {"autoshard.experts", "aten.empty_like", "autoshard.random"}
_DRAWN = {target for target, known in OPERATORS.items() if known.draws is not None}
CASES = [case for case in ALL if case.target not in _NOT_ALONE | _DRAWN]
WIDTHS = (4, 5, 6, 8, 12)


@dataclass(frozen=True)
class Wire:
    """Where an operand comes from: ("value", index), ("parameter", index), ("input", index) or ("none", 0)."""

    kind: str
    index: int = 0


@dataclass(frozen=True)
class Piece:
    """An operator of the table on its operands, `cast` to its dtypes where it takes no mixture."""

    case: OpCase
    wires: tuple[Wire, ...]
    cast: bool


def _block(rng: random.Random, width: int, heads: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(width, width, bias=rng.random() < 0.7),
        lambda: nn.LayerNorm(width),
        lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        lambda: Attention(width, heads, rng.random() < 0.5),
        lambda: Gated(width),
        lambda: nn.RMSNorm(width),
    ]
    return rng.choice(kinds)()


class Attention(nn.Module):
    """Fused projections, heads, and the way back; (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = [p.view(batch, length, self.heads, -1).transpose(1, 2) for p in self.qkv(x).split(width, dim=2)]
        y = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gated(nn.Module):
    """SwiGLU with a fused gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Named(nn.Module):
    """Parameters by number, as attributes."""

    def append(self, parameter: nn.Parameter) -> None:
        self.register_parameter(f"weight{len(self)}", parameter)

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, index: int) -> nn.Parameter:
        return getattr(self, f"weight{index}")


class RandomModel(nn.Module):
    """`blocks` over a stream of shape (batch, sequence, width), then `pieces` over a pool of values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = rng = random.Random(seed)
        heads = rng.choice((2, 3, 4))
        width = heads * rng.choice((2, 3, 4))
        self.example: list[Tensor] = []
        self.free = nn.ParameterList() if rng.random() < 0.2 else Named()
        self.free.append(nn.Parameter(torch.randn(3)))
        self.shapes: list[tuple[int, ...]] = []  # of the values in the pool
        self.dtypes: list[torch.dtype] = []
        self.stream = (rng.choice((3, 4, 6)), rng.choice((3, 4, 5)), width)
        style = rng.random()
        self.blocks = nn.ModuleList()
        if style < 0.6:
            count = rng.choice((1, 1, 2, 3))
            state = rng.getstate()
            for _ in range(count):
                if rng.random() < 0.5:
                    rng.setstate(state)  # equal blocks, as in real models
                self.blocks.append(_block(rng, width, heads))
            self._input(torch.randn(self.stream))
            self._pooled([torch.randn(self.stream)])
        self.pieces = [self._piece(rng.choice(CASES)) for _ in range(0 if style < 0.15 else rng.randint(1, 4))]
        self.aside = rng.random() < 0.5  # return the values as well
        self._input(torch.randn(997))

    def _input(self, example: Tensor) -> int:
        self.example.append(example)
        return len(self.example) - 1

    def _piece(self, case: OpCase) -> Piece:
        wires = tuple(self._wire(operand) for operand in case.operands)
        samples = [None if o is None else sample(o, self.rng) for o in case.operands]
        cast, dtypes = False, [self.dtypes[w.index] if w.kind == "value" else None for w in wires]
        try:
            operands = [t if d is None or t is None else t.to(d) for t, d in zip(samples, dtypes, strict=True)]
            results = call(case.target, operands, dict(case.attributes))
        except RuntimeError:  # of two dtypes
            cast, results = True, call(case.target, samples, dict(case.attributes))
        self._pooled(_tensors(results))
        return Piece(case, wires, cast)

    def _pooled(self, results: list[Tensor]) -> None:
        values = [t for t in results if t.is_floating_point()]
        self.shapes += [tuple(t.shape) for t in values]
        self.dtypes += [t.dtype for t in values]

    def _wire(self, operand: Operand | None) -> Wire:
        if operand is None:
            return Wire("none")
        if not operand.dtype.startswith("float") or not operand.gradient:
            return Wire("input", self._input(sample(operand, self.rng)))
        drawn = self.rng.random()
        same = [i for i, shape in enumerate(self.shapes) if shape == operand.shape]
        if same and drawn < 0.8:
            return Wire("value", self.rng.choice(same))
        usable = [i for i, shape in enumerate(self.shapes) if torch.Size(shape).numel() > 0]
        if usable and drawn < 0.4:
            return Wire("value", self.rng.choice(usable))
        if drawn < 0.7:
            self.free.append(nn.Parameter(torch.randn(operand.shape)))
            return Wire("parameter", len(self.free) - 1)
        return Wire("input", self._input(torch.randn(operand.shape)))

    def forward(self, *inputs: Tensor) -> Any:
        pool: list[Tensor] = []
        if len(self.blocks):
            x = inputs[0]
            for block in self.blocks:
                x = x + block(x)
            pool.append(x)
        others: list[Tensor] = []
        for piece in self.pieces:
            operands = [
                None if operand is None else self._operand(wire, operand, pool, inputs, piece.cast)
                for wire, operand in zip(piece.wires, piece.case.operands, strict=True)
            ]
            for result in _tensors(call(piece.case.target, operands, dict(piece.case.attributes))):
                (pool if result.is_floating_point() else others).append(result)
        loss = (inputs[-1][:3] * self.free[0]).sum() * 1e-3
        for value in pool:
            if value.numel():
                weights = inputs[-1].repeat(-(-value.numel() // 997))[: value.numel()].view(value.shape)
                loss = loss + (torch.tanh(value) * weights).sum()
        return (loss, *pool, *others) if self.aside else loss

    def _operand(
        self, wire: Wire, operand: Operand, pool: list[Tensor], inputs: tuple[Tensor, ...], cast: bool
    ) -> Tensor:
        if not operand.dtype.startswith("float") or not operand.gradient:
            return inputs[wire.index]
        source = {"value": pool, "parameter": self.free, "input": inputs}[wire.kind][wire.index]
        x = source.to(getattr(torch, operand.dtype)) if cast else source
        if tuple(x.shape) != operand.shape:
            count = torch.Size(operand.shape).numel()
            x = x.reshape(-1).repeat(-(-count // x.numel()))[:count].view(operand.shape)
        if operand.unit:
            return torch.sigmoid(x)
        if operand.positive:
            return torch.sigmoid(x) + 0.5
        return torch.tanh(x) if wire.kind == "value" else x


def sample(operand: Operand, rng: random.Random) -> Tensor:
    if operand.dtype == "bool":
        return torch.randint(0, 2, operand.shape).bool()
    if not operand.dtype.startswith("float"):
        return torch.randint(operand.low, operand.high, operand.shape, dtype=getattr(torch, operand.dtype))
    x = torch.randn(operand.shape)
    return torch.sigmoid(x) if operand.unit else x.abs() + 0.5 if operand.positive else x


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]


def build(seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of this seed and its inputs, built for real whatever the default device is."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RandomModel(seed)
    return model, tuple(model.example)
