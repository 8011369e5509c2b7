"""Small models for one feature each; `capture(spec("name"), arguments)` builds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


def spec(name: str) -> str:
    return f"{Path(__file__)}:{name}"


class Classifier(nn.Module):
    """Weighted, smoothed cross entropy, and the log-likelihood of other classes of the same rows."""

    def __init__(self, features: int, classes: int, smoothing: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(features, 12), nn.Linear(12, classes)
        self.smoothing = smoothing
        self.register_buffer("weights", torch.linspace(0.5, 2.0, classes))

    def forward(self, x: Tensor, labels: Tensor, others: Tensor) -> Tensor:
        y = self.outer(F.gelu(self.inner(x)))
        loss = F.cross_entropy(y, labels, self.weights, label_smoothing=self.smoothing)
        return loss + F.nll_loss(F.log_softmax(y, -1), others, self.weights)


def weighted(rows: int = 6, classes: int = 7, smoothing: float = 0.1) -> Built:
    labels = (torch.randint(0, classes, (rows,)) for _ in range(2))
    return Classifier(5, classes, smoothing), (torch.randn(rows, 5), *labels)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t),
    "bce_logits": lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=torch.full((4,), 3.0)),
    "huber": lambda y, t: F.huber_loss(y, t, delta=0.5),
    "kl": lambda y, t: F.kl_div(F.log_softmax(y, -1), t, reduction="batchmean"),
    "l1": lambda y, t: F.l1_loss(y, t),
    "smooth_l1": lambda y, t: F.smooth_l1_loss(y, t, beta=0.3),
    "soft": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.2),
    "soft_margin": lambda y, t: F.soft_margin_loss(y, t * 2 - 1),
}


class Regression(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(5, 4), kind

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return LOSSES[self.kind](self.layer(x), target)


def regression(kind: str, rows: int = 6) -> Built:
    return Regression(kind), (torch.randn(rows, 5), torch.rand(rows, 4))


def mixtral(
    form: str = "batched_mm", experts: int = 4, batch: int = 4, sequence: int = 4, hidden: int = 16, inner: int = 12,
    heads: int = 2, kv_heads: int = 1, vocabulary: int = 37,
) -> Built:  # fmt: skip
    """The library's Mixtral with one layer; `form` is how its experts are written."""
    import transformers as hf

    from tests.models.common import language

    config = hf.MixtralConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=2,
        use_cache=False, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    config._experts_implementation = form
    return language(hf.MixtralForCausalLM(config), batch, sequence, True)


class Draws(nn.Module):
    """Every way to draw random numbers that a plan can repeat on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = self.layer(x)
        x = x + torch.rand(rows, 1) + torch.randn_like(x) + torch.rand_like(x) + torch.randn(6)
        x = x * torch.empty_like(x).bernoulli_(0.7) + torch.bernoulli(x.sigmoid())
        x = x + torch.randint(2, 5, (6,)) + torch.randint_like(x, 3)
        x = F.alpha_dropout(x, 0.2, True)
        x = x * x.new_empty(rows, 1).uniform_(0.5, 1.5) + torch.empty(rows, 6).normal_(1.0, 2.0)
        chosen = torch.multinomial(x.softmax(-1), 2)
        x = x + F.one_hot(chosen, 6).sum(1) + torch.multinomial(x.softmax(-1), 6, replacement=True)
        return (F.gumbel_softmax(x) * F.dropout(x, 0.1)).square().mean() + torch.normal(0.0, 1.0, (6,)).mean()


def draws(rows: int = 4) -> Built:
    return Draws(), (torch.randn(rows, 6),)


class Images(nn.Module):
    """Resizing, shuffles of pixels, patches, and dropout of whole features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slope = nn.Conv2d(3, 4, 3, padding=1), nn.PReLU(4)
        self.norm = nn.InstanceNorm2d(1, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout2d(self.slope(self.first(x)), 0.3, True)
        y = F.interpolate(y, scale_factor=2, mode="nearest")
        y = F.interpolate(y, size=(8, 10), mode="bilinear")
        y = self.norm(F.pixel_shuffle(y, 2))
        y = F.feature_alpha_dropout(y, 0.1, True)
        y = F.interpolate(y, size=(32, 20), mode="nearest")
        return F.unfold(y, 4, stride=4).square().mean()


def resized(batch: int = 4) -> Built:
    return Images(), (torch.randn(batch, 3, 4, 6),)


class Layers(nn.Module):
    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 6, 2, dropout=dropout) if kind == "lstm" else nn.Linear(6, 6)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "lstm":
            return self.layer(x)[0].square().mean()
        return F.rrelu(self.layer(x), training=self.training).square().mean()


def layers(kind: str = "lstm", dropout: float = 0.2) -> Built:
    return Layers(kind, dropout), (torch.randn(3, 4, 6),)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(x, y)


def residual() -> Built:
    return Residual(), (torch.randn(8, 8), torch.randn(8, 8))
